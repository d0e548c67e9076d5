"""`score_mod` and `mask_mod` against attention written out in float64, and what is refused.

Triton's side is tested by tests/kernels/test_triton_attention.py (interpreter) and on a GPU below.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rooftile import attention, attention_varlen, mask_mod, score_mod
from rooftile.ops.attention_mods import ATTENTION_MODS, ATTENTION_VARLEN_MODS
from tests.ops.accuracy import opcheck
from tests.ops.attention_oracle import assert_attention_close


def tanh_bias(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor, bias: Tensor) -> Tensor:
    return torch.tanh(s) + bias[b, h] - 0.1 * (i - j).abs().to(s.dtype)  # not in float32


def every_third(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return (i + j + b + h) % 3 != 0


def same_document(b: Tensor, h: Tensor, i: Tensor, j: Tensor, document: Tensor) -> Tensor:
    return document[b, i] == document[b, j]


SCORE, THIRDS = score_mod(None, reference=tanh_bias), mask_mod(None, reference=every_third)
DOCUMENTS = mask_mod(None, reference=same_document)


def oracle(
    q: Tensor,  # [q_len, heads, dim]
    k: Tensor,  # [kv_len, kv_heads, dim]
    v: Tensor,  # [kv_len, kv_heads, v_dim]
    b: int,
    bias: Tensor | None,  # [batch, heads]
    thirds: bool,
    causal: bool,
    sink: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Entry by entry, in float64."""
    q, k, v = q.double(), k.double(), v.double()
    (m, heads, dim), n = q.shape, k.shape[0]
    out, lse = (
        torch.zeros(m, heads, v.shape[-1]).double(),
        torch.full((m, heads), -math.inf).double(),
    )
    for i in range(m):
        for h in range(heads):
            kv = h // (heads // k.shape[1])
            logits, seen = [], []
            for j in range(n):
                if (causal and j > i + n - m) or (thirds and (i + j + b + h) % 3 == 0):
                    continue
                s = float(q[i, h] @ k[j, kv]) / math.sqrt(dim)
                if bias is not None:
                    s = math.tanh(s) + float(bias[b, h]) - 0.1 * abs(i - j)
                logits.append(s)
                seen.append(j)
            if sink is not None:
                logits.append(float(sink[h]))
            if logits:
                x = torch.tensor(logits, dtype=torch.float64)
                lse[i, h] = x.logsumexp(0)
                out[i, h] = torch.softmax(x, 0)[: len(seen)] @ v[seen, kv]
    return out, lse


@given(
    m=st.integers(0, 5), n=st.integers(0, 6), heads=st.sampled_from([(1, 1), (4, 2)]),
    causal=st.booleans(), thirds=st.booleans(), biased=st.booleans(), sink=st.booleans(),
    dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16]), seed=st.integers(0, 99),
)  # fmt: skip
def test_dense(
    m: int, n: int, heads: tuple[int, int], causal: bool, thirds: bool, biased: bool, sink: bool,
    dtype: torch.dtype, seed: int,
) -> None:  # fmt: skip
    g = torch.Generator().manual_seed(seed)
    q = torch.randn(2, m, heads[0], 8, generator=g).to(dtype)
    k, v = (torch.randn(2, n, heads[1], d, generator=g).to(dtype) for d in (8, 4))
    bias = torch.randn(2, heads[0], generator=g).double() if biased else None
    sinks = torch.randn(heads[0], generator=g) if sink else None
    got = attention(
        q, k, v, causal=causal, sink=sinks, return_lse=True,
        score_mod=None if bias is None else SCORE(bias), mask_mod=THIRDS if thirds else None,
    )  # fmt: skip
    for b in range(2):
        exact = oracle(q[b], k[b], v[b], b, bias, thirds, causal, sinks)
        assert_attention_close((got[0][b], got[1][b]), exact, dtype)


@given(
    lengths=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 5)), min_size=1, max_size=4),
    padding=st.sampled_from([0, 2]), causal=st.booleans(), seed=st.integers(0, 99),
)  # fmt: skip
def test_ragged_counts_from_each_sequences_beginning(
    lengths: list[tuple[int, int]], padding: int, causal: bool, seed: int
) -> None:
    g = torch.Generator().manual_seed(seed)
    q_lens, kv_lens = ([pair[i] for pair in lengths] for i in range(2))
    q = torch.randn(sum(q_lens) + padding, 4, 8, generator=g)
    k, v = (torch.randn(sum(kv_lens) + padding, 2, 8, generator=g) for _ in range(2))
    for x, used in ((q, q_lens), (k, kv_lens), (v, kv_lens)):
        x[sum(used) :] = math.nan
    bias = torch.randn(len(lengths), 4, generator=g).double()
    cu = [torch.tensor([0, *lens]).cumsum(0) for lens in (q_lens, kv_lens)]
    out, lse = attention_varlen(
        q, k, v, *cu, causal=causal, score_mod=SCORE(bias), mask_mod=THIRDS, return_lse=True
    )
    for b, (a, c) in enumerate(lengths):
        rows = slice(int(cu[0][b]), int(cu[0][b]) + a)
        keys = slice(int(cu[1][b]), int(cu[1][b]) + c)
        exact = oracle(q[rows], k[keys], v[keys], b, bias, True, causal, None)
        assert_attention_close((out[rows], lse[rows]), exact, torch.float32)
    assert bool((out[sum(q_lens) :] == 0).all())
    assert bool((lse[sum(q_lens) :] == -math.inf).all())


@pytest.mark.parametrize("causal", [False, True])
def test_gradients_of_inputs_sink_and_captured_tensors(causal: bool) -> None:
    tensors = [
        torch.randn(2, 4, 2, 3), torch.randn(2, 3, 1, 3), torch.randn(2, 3, 1, 2), torch.randn(2),
        torch.randn(2, 2),
    ]  # fmt: skip
    q, k, v, sink, bias = (x.double().requires_grad_() for x in tensors)

    def run(q: Tensor, k: Tensor, v: Tensor, sink: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        return attention(
            q, k, v, sink=sink, causal=causal, score_mod=SCORE(bias), mask_mod=THIRDS,
            return_lse=True,
        )  # fmt: skip

    assert torch.autograd.gradcheck(run, (q, k, v, sink, bias))


def test_gradients_of_rows_that_see_nothing_are_zero() -> None:
    q, k = torch.randn(1, 4, 1, 8, requires_grad=True), torch.randn(1, 2, 1, 8, requires_grad=True)
    out = attention(q, k, k, causal=True, mask_mod=THIRDS)
    grads = torch.autograd.grad(out.sum(), (q, k))
    assert bool((grads[0][0, :2] == 0).all())  # before the first key
    assert not any(bool(grad.isnan().any()) for grad in grads)


def test_documents_packed_into_one_sequence() -> None:
    document = torch.tensor([[0, 0, 0, 1, 1], [0, 1, 1, 1, 1]])
    q = torch.randn(2, 5, 2, 8)
    out = attention(q, q, q, causal=True, mask_mod=DOCUMENTS(document))
    alone = attention(q[:1, 3:], q[:1, 3:], q[:1, 3:], causal=True)
    assert torch.allclose(out[:1, 3:], alone, atol=1e-6)


@pytest.mark.parametrize("differentiable", [False, True])
def test_compiles_whole(differentiable: bool) -> None:
    def run(q: Tensor, bias: Tensor) -> Tensor:
        return attention(q, q, q, causal=True, score_mod=SCORE(bias), mask_mod=THIRDS)

    q, bias = torch.randn(1, 6, 2, 8, requires_grad=differentiable), torch.randn(1, 2)
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    assert torch.allclose(compiled(q, bias), run(q, bias), atol=1e-6)
    if differentiable:
        (grad,) = torch.autograd.grad(compiled(q, bias).square().sum(), q)
        (expected,) = torch.autograd.grad(run(q, bias).square().sum(), q)
        assert torch.allclose(grad, expected, atol=1e-5)


def test_opcheck() -> None:
    q, k, bias = torch.randn(1, 4, 2, 8), torch.randn(1, 5, 1, 8), torch.randn(1, 2)
    options = (None, -1, 0, 0.0, 0.3, SCORE.key, [bias], THIRDS.key, [])
    opcheck(ATTENTION_MODS, q, k, k, *options)
    cu = (torch.tensor([0, 4]), torch.tensor([0, 5]))
    opcheck(ATTENTION_VARLEN_MODS, q[0], k[0], k[0], *cu, 4, 5, *options)


def test_the_source_names_the_modifier() -> None:
    assert score_mod(None, reference=tanh_bias).key == SCORE.key
    assert SCORE.key.startswith("tanh_bias-")
    assert mask_mod(None, reference=same_document).key != THIRDS.key
    typed = []
    for factor in (2, 2, 3):  # as at an interpreter's prompt: no file holds the source
        names: dict[str, Any] = {}
        exec(f"def double(s, b, h, i, j): return s * {factor}", names)
        typed.append(score_mod(None, reference=names["double"]).key)
    assert typed[0] == typed[1] != typed[2]


def test_the_same_text_in_two_modules_is_two_modifiers() -> None:
    """Global numbers, functions, and functions that these call."""
    q = torch.randn(1, 3, 1, 8)
    text = "def inner(x): return x * K\ndef outer(x): return inner(x)\n"
    for body in ("s * K", "inner(s)", "outer(s)", "(lambda y: y * K)(s)"):
        found = []
        for factor in (2.0, 5.0, 2.0):
            names: dict[str, Any] = {"K": factor}
            exec(text + f"def scaled(s, b, h, i, j): return {body}", names)
            found.append((factor, score_mod(None, reference=names["scaled"])))
        assert found[0][1].key == found[2][1].key != found[1][1].key
        for factor, modifier in found:
            expected = attention(q, q, q, softmax_scale=factor * 8**-0.5)
            assert torch.allclose(attention(q, q, q, score_mod=modifier), expected, atol=1e-6)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            "torch.ones(5)",
            r"returned shape \[5\]; it must return {} that broadcast to \[1, 1, 3, 3\]",
        ),
        ("torch.ones(2, 1, 1, 1, 1)", r"returned shape \[2, 1, 1, 1, 1\]"),
        ("None", "returned None; it must return {}"),
        ("i * 1j", "returned torch.complex64"),
    ],
)
@pytest.mark.parametrize("kind", ["score", "mask"])
def test_what_modifiers_must_return(kind: str, body: str, message: str) -> None:
    names: dict[str, Any] = {"torch": torch}
    score = "s, " if kind == "score" else ""
    body = f"{body}.bool()" if kind == "mask" and "ones" in body else body
    exec(f"def odd({score}b, h, i, j): return {body}", names)
    register = score_mod if kind == "score" else mask_mod
    modifier, q = register(None, reference=names["odd"]), torch.randn(1, 3, 1, 8)
    wanted = {"score": "numbers", "mask": "booleans"}[kind]
    with pytest.raises(ValueError, match=f"{kind}_mod {message.format(wanted)}"):
        attention(q, q, q, **{f"{kind}_mod": modifier})  # type: ignore[arg-type]


def test_masks_are_booleans_and_arguments_have_places() -> None:
    q = torch.randn(1, 3, 1, 8)
    names: dict[str, Any] = {}
    exec("def number(b, h, i, j): return i - j\ndef named(b, h, i, j, *, k=1): return i > k", names)
    with pytest.raises(ValueError, match=r"mask_mod returned torch.int64; it must return booleans"):
        attention(q, q, q, mask_mod=mask_mod(None, reference=names["number"]))
    with pytest.raises(ValueError, match="named has arguments that are given by name only"):
        mask_mod(None, reference=names["named"])


def test_refusals() -> None:
    q, factor = torch.randn(1, 3, 1, 8), 2.0

    def closes(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return s * factor

    with pytest.raises(ValueError, match="closes captures factor; pass tensors as arguments"):
        score_mod(None, reference=closes)
    with pytest.raises(ValueError, match=r"decorate it with @triton.jit, or pass None"):
        score_mod(tanh_bias, reference=tanh_bias)
    with pytest.raises(ValueError, match="score_mod tanh_bias takes 1 tensors .* but has 0"):
        attention(q, q, q, score_mod=SCORE)
    with pytest.raises(ValueError, match="argument 0 of score_mod is 0.5; it must be a tensor"):
        attention(q, q, q, score_mod=SCORE(0.5))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"reference takes 4 arguments; .*\(score, batch, head"):
        score_mod(None, reference=every_third)
    with pytest.raises(ValueError, match="it must be a torch function"):
        mask_mod(None, reference="causal")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"score_mod is .*pass what rooftile.score_mod\("):
        attention(q, q, q, score_mod=THIRDS)
    with pytest.raises(ValueError, match="tensor 0 of score_mod is on meta but q is on cpu"):
        attention(q, q, q, score_mod=SCORE(torch.zeros(1, 1, device="meta")))
    with pytest.raises(NotImplementedError, match="it takes no score_mod or mask_mod"):
        attention(q, q, q, mask_mod=THIRDS, kernel="torch")
    q.requires_grad_()
    with pytest.raises(
        NotImplementedError, match="kernel='triton' has no gradients with score_mod"
    ):
        attention(q, q, q, mask_mod=THIRDS, kernel="triton")
