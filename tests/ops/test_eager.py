"""Calls that go straight to a kernel: when they may, and that nothing is checked less for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from rooftile.ops import paged
from rooftile.ops.attention import attention, attention_varlen
from rooftile.ops.eager import CheckedCalls, undispatched
from rooftile.ops.linear import linear
from rooftile.ops.modifiers import score_mod
from rooftile.ops.operator import contents_checked
from rooftile.ops.paged import paged_attention, plan_paged_attention
from rooftile.types import PagedBatch


def test_only_where_nobody_looks() -> None:
    x = torch.randn(3, 3)
    assert undispatched(x, torch.nn.Parameter(x, requires_grad=False))
    assert not undispatched(x, None)  # type: ignore[arg-type]  # for the checks to judge
    wants_gradient = torch.randn(3, requires_grad=True)
    assert not undispatched(x, wants_gradient)
    with torch.no_grad():
        assert undispatched(x, wants_gradient)
    with torch.profiler.profile():
        assert not undispatched(x)
    with torch.autocast("cpu"):
        assert not undispatched(x)
    assert not undispatched(x, x.to("meta"))
    assert not undispatched(x, torch.complex(x, x).conj().imag)
    with FakeTensorMode():
        assert not undispatched(x)
    assert torch.equal(torch.func.vmap(lambda row: row + undispatched(row))(x), x)
    compiled = torch.compile(lambda y: y + undispatched(y), fullgraph=True, backend="eager")
    assert torch.equal(compiled(x), x)


def test_a_second_call_gives_the_same_and_its_own_options() -> None:
    q, k, v = (torch.randn(1, 5, 2, 8) for _ in range(3))
    first = attention(q, k, v, causal=True, softcap=2.0)
    assert torch.equal(attention(q, k, v, causal=True, softcap=2.0), first)  # type: ignore[arg-type]
    assert not torch.equal(attention(q, k, v, causal=True), first)  # type: ignore[arg-type]
    assert not torch.equal(attention(q, k, v, softcap=2.0), first)  # type: ignore[arg-type]
    out, lse = attention(q, k, v, causal=True, softcap=2.0, return_lse=True)
    assert torch.equal(out, first)  # type: ignore[arg-type]
    assert lse.shape == (1, 5, 2)
    listed = attention(q, k, v, window=[3, 0])  # type: ignore[arg-type]
    assert torch.equal(listed, attention(q, k, v, window=(3, 0)))  # type: ignore[arg-type]


def test_what_is_wrong_stays_wrong_after_a_good_call() -> None:
    q, k, v = (torch.randn(1, 5, 2, 8) for _ in range(3))
    attention(q, k, v)
    for _ in range(2):
        with pytest.raises(ValueError, match="batch 2"):
            attention(q, k.expand(2, 5, 2, 8), v.expand(2, 5, 2, 8))
        with pytest.raises(ValueError, match="softcap"):
            attention(q, k, v, softcap=-1.0)
        with pytest.raises(ValueError, match="does not exist"):
            attention(q, k, v, kernel="nothing")
        with pytest.raises(ValueError, match=r"softcap is \[1.0\]"):
            attention(q, k, v, softcap=[1.0])  # type: ignore[arg-type]
        for window in ([[1], 2], {1: 2}):
            with pytest.raises(ValueError, match="window is"):
                attention(q, k, v, window=window)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="sink is 1.0; it must be a tensor"):
            attention(q, k, v, sink=1.0)  # type: ignore[arg-type]
    good = torch.tensor([0, 5])
    attention_varlen(q[0], k[0], v[0], good, good)
    with pytest.raises(ValueError, match="decreases"):
        attention_varlen(q[0], k[0], v[0], good, torch.tensor([5, 0]).flip(0).neg())


def test_pages_of_a_known_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where contents are not looked at."""
    monkeypatch.setattr(paged, "contents_checked", lambda tensor: False)
    q, k_pages, v_pages = torch.randn(3, 4, 8), *torch.randn(2, 5, 2, 4, 8).unbind(0)
    cu, lens = torch.tensor([0, 1, 3], dtype=torch.int32), torch.tensor([7, 9], dtype=torch.int32)
    table = torch.tensor([[3, 1, 0], [4, 0, 2]], dtype=torch.int32)
    batch = PagedBatch(cu, lens, table, 2, 9)
    sink, scale = torch.randn(4), torch.rand(2) + 0.5
    plan, of_cpu = (
        plan_paged_attention(q, k_pages, v_pages, batch, kernel=kernel)
        for kernel in ("reference", "cpu")
    )
    calls: list[dict[str, Any]] = [
        {},
        {"sink": sink},
        {"softcap": 2.0},
        {"window": (3, 0)},
        {"softmax_scale": 0.2},
        {"return_lse": True},
        {"kernel": "reference"},
        {"plan": plan},
        {"plan": of_cpu},
        {"k_scale": scale, "v_scale": scale},
        {"k_scale": scale, "v_scale": 2 * scale, "sink": sink},
    ]
    for _ in range(2):
        for options in calls:
            given = k_pages, v_pages
            if "k_scale" in options:
                given = k_pages.to(torch.float8_e4m3fn), v_pages.to(torch.float8_e4m3fn)
            found = []
            for kinds in (paged._CHECKED, CheckedCalls()):
                with monkeypatch.context() as patch:
                    patch.setattr(paged, "_CHECKED", kinds)
                    found.append(paged_attention(q, *given, batch, **options))
            torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)
        other = PagedBatch(cu, lens - 1, table.flip(1), 2, 9)
        out, of_other = (paged_attention(q, k_pages, v_pages, x) for x in (batch, other))
        assert not torch.equal(out, of_other)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="page_table has shape"):
            paged_attention(q, k_pages, v_pages, PagedBatch(cu, lens, table[:1], 2, 9))
        with pytest.raises(ValueError, match="batch is 5"):
            paged_attention(q, k_pages, v_pages, 5)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="plan is 'mine'"):
            paged_attention(q, k_pages, v_pages, batch, plan="mine")  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="kernel='cpu' but the plan is for 'reference'"):
            paged_attention(q, k_pages, v_pages, batch, plan=plan, kernel="cpu")


def test_pages_without_data_have_shapes_each_time() -> None:
    q, k_pages, v_pages = (
        torch.empty(*s, device="meta") for s in ((3, 4, 8), (5, 2, 4, 8), (5, 2, 4, 6))
    )
    cu, lens, table = (
        torch.empty(*s, dtype=torch.int32, device="meta") for s in ((3,), (2,), (2, 3))
    )
    for _ in range(2):
        out = paged_attention(q, k_pages, v_pages, PagedBatch(cu, lens, table, 2, 9))
        assert out.shape == (3, 4, 6)  # type: ignore[union-attr]


def test_contents_on_a_gpu_are_checked_where_asked_to(monkeypatch: pytest.MonkeyPatch) -> None:
    class Elsewhere:
        device = torch.device("cuda")

    for value, checked in ((None, False), ("1", True), ("0", False), ("", False)):
        if value is None:
            monkeypatch.delenv("ROOFTILE_CHECK", raising=False)
        else:
            monkeypatch.setenv("ROOFTILE_CHECK", value)
        assert contents_checked(Elsewhere()) == checked  # type: ignore[arg-type]
    for value in ("yes", "true", "2"):
        monkeypatch.setenv("ROOFTILE_CHECK", value)
        with pytest.raises(ValueError, match=f"ROOFTILE_CHECK is '{value}'; choose one of 0, 1"):
            contents_checked(Elsewhere())  # type: ignore[arg-type]
    assert contents_checked(torch.zeros(1))


def operators(q: Tensor, k: Tensor, v: Tensor, weight: Tensor) -> Tensor:
    heads = attention(q, k, v, causal=True, kernel="reference")
    assert isinstance(heads, Tensor)
    return linear(heads.flatten(2), weight)


def modified(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor) -> Tensor:
    """Torch code of ours without an operator around it, where gradients are wanted."""
    doubled = score_mod(None, reference=lambda score, b, h, i, j: 2 * score)
    out = attention(q, k, v, score_mod=doubled)
    with_alibi = attention(q, k, v, alibi_slopes=slopes)
    assert isinstance(out, Tensor)
    assert isinstance(with_alibi, Tensor)
    return out + with_alibi


@pytest.mark.parametrize(
    ("function", "last"),
    [
        (operators, torch.randn(3, 16)),
        (torch.compile(operators, fullgraph=True, backend="aot_eager"), torch.randn(3, 16)),
        (modified, torch.rand(2)),
    ],
)
def test_autocast_changes_neither_results_nor_gradients(
    function: Callable[..., Tensor], last: Tensor
) -> None:
    q, k, v = (torch.randn(1, 5, 2, 8) for _ in range(3))
    found = []
    for enabled in (False, True):
        inputs = [x.clone().requires_grad_() for x in (q, k, v, last)]
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            out = function(*inputs)
        found.append((out.detach(), *torch.autograd.grad(out.square().sum(), inputs)))
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)


def test_kinds_are_forgotten_when_there_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CheckedCalls, "MOST", 2)
    calls = CheckedCalls()
    for i in range(3):
        calls.add(i, print)
    assert calls.get(0) is None
    assert calls.get(2) is print
