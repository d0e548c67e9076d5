"""Differential attention on a GPU, through the operators.

Against the reference kernel in float64 on the same device, which tests/ops/test_differential.py has
compared with two softmaxes written out row by row.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rooftile.ops.differential import (
    DIFFERENTIAL,
    PAGED_DIFFERENTIAL,
    differential_attention,
    differential_attention_varlen,
    paged_differential_attention,
    plan_differential,
)
from rooftile.ops.paged import plan_arguments
from rooftile.types import PagedBatch, PrefixGroups
from tests.ops.test_paged_gpu import FEW, Shape, make

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
FAMILIES = ("gluon", "triton")
LAMBDAS = st.sampled_from(["number", "pairs", "tokens"])
Lengths = Sequence[tuple[int, int]]
# Of pages: dims of a slot, that is of both keys of a pair, or of one that both queries share.
SHAPES = [
    (Shape(max_q_len=1), False),
    (Shape(), False),
    (Shape(max_q_len=FEW), True),
    (Shape(heads=(5, 1), page_size=64), False),
    (Shape(dims=(256, 256), heads=(6, 2)), False),
    (Shape(dims=(256, 256), heads=(4, 4), dtype=torch.float16, max_q_len=1), False),
    (Shape(dims=(64, 64), page_size=8, options=(("window", (100, 0)),)), False),
    (Shape(dims=(96, 96), options=(("window", (17, 3)), ("causal", False))), False),
    (Shape(dims=(72, 40), page_size=4), False),
    (Shape(dims=(64, 64), dtype=torch.float32), True),
]
Q_LENS = st.one_of(st.just(1), st.integers(0, 8), st.sampled_from([33, 150, 300]))
KV_LENS = st.one_of(st.integers(0, 40), st.sampled_from([63, 64, 65, 128, 257, 1000, 5000]))


def draw_lam(g: torch.Generator, kind: str, queries: Tensor) -> Tensor | float:
    if kind == "number":
        return 0.7
    shape = queries.shape[-2:-1] if kind == "pairs" else queries.shape[:-1]
    return torch.rand(shape, generator=g, device="cuda")


def assert_close(got: Any, exact: Any, plain: Any, size: Tensor) -> None:
    """Each row's error is at most twice that of the reference in the same dtype, plus a floor.

    size: of the two outputs that are subtracted, each of which a kernel may round.
    """
    floor = 2 * torch.finfo(got[0].dtype).eps * size + 4e-6
    error = (got[0].double() - exact[0]).abs().amax(-1)
    allowed = 2 * (plain[0].double() - exact[0]).abs().amax(-1) + floor
    assert bool((error <= allowed).all()), (error - allowed).amax()
    for lse, exact_lse in zip(got[1:], exact[1:], strict=True):
        hidden = exact_lse == -math.inf
        assert torch.equal(lse == -math.inf, hidden)
        off = (lse.double() - exact_lse).masked_fill(hidden, 0).abs()
        assert bool((off <= 1e-4 * (1 + exact_lse.masked_fill(hidden, 0).abs())).all())


def size_of_both(exact: Callable[[float], Any]) -> Tensor:
    """Of each query: the largest number of both outputs. exact: lam -> results."""
    first = exact(0.0)[0]
    size: Tensor = first.abs().amax(-1) + (first - exact(1.0)[0]).abs().amax(-1)
    return size


def wide(values: Sequence[Any]) -> list[Any]:
    return [x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for x in values]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("shape", "shared"), SHAPES, ids=str)
@settings(max_examples=12, deadline=None)
@given(
    lengths=st.lists(st.tuples(Q_LENS, KV_LENS), min_size=1, max_size=6),
    padding=st.integers(0, 2),
    lam_kind=LAMBDAS,
    seed=st.integers(0, 2**31),
)
def test_paged(
    family: str,
    shape: Shape,
    shared: bool,
    lengths: Lengths,
    padding: int,
    lam_kind: str,
    seed: int,
) -> None:
    lengths = [(min(q, shape.max_q_len), kv) for q, kv in lengths]
    case = make(shape, lengths, seed, padding)
    k_dim = shape.dims[0] if shared else shape.dims[0] // 2
    g = torch.Generator("cuda").manual_seed(seed)
    q1 = case.q[..., :k_dim]
    q2 = torch.randn(q1.shape, generator=g, device="cuda").to(q1.dtype) + q1 * 0
    call = PAGED_DIFFERENTIAL.call(*(q1, q2, case.k_pages, case.v_pages, q1, -1, 0, 1.0, None, []))
    reason = PAGED_DIFFERENTIAL.refusal(call, family)
    if reason is not None:
        pytest.skip(reason)
    lam = draw_lam(g, lam_kind, q1)
    tokens = sum(q for q, _ in lengths)
    if lam_kind == "tokens":
        lam[tokens:] = math.nan
    tensors = (q1, q2, case.k_pages, case.v_pages)
    options = {"return_lse": True, **case.options}

    def run(kernel: str, tensors: Sequence[Tensor] = tensors, lam: Any = lam) -> Any:
        return paged_differential_attention(*tensors, case.batch, lam, kernel=kernel, **options)

    torch.full((1 << 22,), math.nan, device="cuda")  # what outputs are likely to be made of
    got = run(family)
    exact = run("reference", wide(tensors), *wide([lam]))
    size = size_of_both(lambda lam: run("reference", wide(tensors), lam))
    assert_close(got, exact, run("reference"), size)
    assert bool((got[0][tokens:] == 0).all())
    assert all(torch.equal(a, b) for a, b in zip(got, run(family), strict=True))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("dims", "shared", "mask", "dtype"),
    [  # what kernels are compiled for
        ((64, 128), False, (True, None), torch.bfloat16),
        ((64, 128), False, (True, (70, 0)), torch.float16),
        ((32, 64), False, (False, (40, 9)), torch.bfloat16),
        ((128, 256), False, (True, None), torch.bfloat16),
        ((128, 128), False, (False, None), torch.bfloat16),
        ((128, 128), True, (True, None), torch.bfloat16),
        ((40, 72), True, (True, None), torch.float16),
    ],
    ids=str,
)
@settings(max_examples=12, deadline=None)
@given(
    q_len=st.sampled_from([1, 2, 63, 64, 65, 129, 500]),
    kv_len=st.sampled_from([1, 64, 65, 200, 513, 1000]),
    heads=st.sampled_from([(1, 1), (3, 3), (4, 2), (5, 1)]),
    lam_kind=LAMBDAS,
    ragged=st.booleans(),
    interleaved=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_dense(
    family: str,
    dims: tuple[int, int],
    shared: bool,
    mask: tuple[bool, Any],
    dtype: torch.dtype,
    q_len: int,
    kv_len: int,
    heads: tuple[int, int],
    lam_kind: str,
    ragged: bool,
    interleaved: bool,
    seed: int,
) -> None:
    g = torch.Generator("cuda").manual_seed(seed)

    def draw(length: int, heads: int, dim: int) -> Tensor:
        return torch.randn(2, length, heads, dim, generator=g, device="cuda").to(dtype)

    def pair(length: int, heads: int) -> tuple[Tensor, Tensor]:
        both = draw(length, 2 * heads, dims[0])
        return (both[:, :, 0::2], both[:, :, 1::2]) if interleaved else both.chunk(2, 2)

    (q1, q2), (k1, k2) = pair(q_len, heads[0]), pair(kv_len, heads[1])
    tensors = [q1, k1, q2, None if shared else k2, draw(kv_len, heads[1], dims[1])]
    lam = draw_lam(g, lam_kind, q1)
    call = DIFFERENTIAL.call(*tensors, q1, -1, -1, 1.0)
    reason = DIFFERENTIAL.refusal(call, family)
    if reason is not None:
        pytest.skip(reason)
    options: dict[str, Any] = {"causal": mask[0], "window": mask[1], "return_lse": True}

    def exactly(lam: Any) -> Any:
        return differential_attention(*wide(tensors), lam, kernel="reference", **options)

    exact, size = exactly(*wide([lam])), size_of_both(exactly)
    plain = differential_attention(*tensors, lam, kernel="reference", **options)
    if not ragged:
        got = differential_attention(*tensors, lam, kernel=family, **options)
        assert_close(got, exact, plain, size)
        return
    flat = [None if x is None else x.flatten(0, 1) for x in tensors]
    of_tokens = lam.flatten(0, 1) if lam_kind == "tokens" else lam
    cu = [torch.tensor([0, n, 2 * n], dtype=torch.int32, device="cuda") for n in (q_len, kv_len)]
    options |= {"max_q_len": q_len, "max_kv_len": kv_len}
    got = differential_attention_varlen(*flat, of_tokens, *cu, kernel=family, **options)
    assert_close([x.unflatten(0, (2, q_len)) for x in got], exact, plain, size)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_prefix_is_read_once(family: str) -> None:
    """By the plan of a step whose requests share their first pages, as an engine's layers take it."""
    shared, own, count = 2048, 64, 24
    g = torch.Generator("cuda").manual_seed(0)
    pages = shared // 16 + count * own // 16
    k, v = torch.randn(2, pages, 2, 16, 128, generator=g, device="cuda").bfloat16()
    mine = torch.arange(shared // 16, pages, device="cuda").view(count, -1)
    first = torch.arange(shared // 16, device="cuda").expand(count, -1)
    kv_lens = (torch.randint(1, own + 1, (count,), generator=g, device="cuda") + shared).int()
    groups = PrefixGroups(
        torch.tensor([0, count, count], dtype=torch.int32, device="cuda"),
        torch.tensor([shared, 0], dtype=torch.int32, device="cuda"),
        shared,
    )
    cu = torch.arange(count + 1, dtype=torch.int32, device="cuda")
    table = torch.cat([first, mine], 1).int()
    batch = PagedBatch(cu, kv_lens, table, 1, shared + own, groups)
    q1, q2 = torch.randn(2, count, 8, 64, generator=g, device="cuda").bfloat16()
    lam = torch.rand(8, generator=g, device="cuda")
    call = PAGED_DIFFERENTIAL.call(
        q1, q2, k, v, lam, cu, kv_lens, table, 1, 1, -1, 0, 1.0, None, []
    )
    batch, plan = plan_differential(call, batch, count, family)
    assert plan.split is not None
    assert plan.split.groups == 2
    got = PAGED_DIFFERENTIAL.handle(
        *(q1, q2, k, v, lam, cu, kv_lens, table, 1, shared + own, -1, 0, 0.125),
        *(*plan_arguments(plan), family),
    )

    def run(tensors: Sequence[Tensor], lam: Any) -> Any:
        alone = dataclasses.replace(batch, prefix=None)
        return paged_differential_attention(
            *tensors, alone, lam, return_lse=True, kernel="reference"
        )

    tensors = (q1, q2, k, v)
    exact, size = run(wide(tensors), lam.double()), size_of_both(lambda x: run(wide(tensors), x))
    assert_close(got, exact, run(tensors, lam), size)


@pytest.mark.parametrize("which", [(), (1,), (2,), (1, 2)])
def test_scores_that_rise_far_above_those_of_the_last_keys(which: tuple[int, ...]) -> None:
    """Weights under an anchored maximum must not overflow."""
    g = torch.Generator("cuda").manual_seed(0)
    q1, q2 = torch.randn(2, 2, 300, 4, 64, generator=g, device="cuda").bfloat16()
    k1, k2 = torch.randn(2, 2, 1300, 2, 64, generator=g, device="cuda").bfloat16()
    v = torch.randn(2, 1300, 2, 128, generator=g, device="cuda").bfloat16()
    lam = torch.rand(4, generator=g, device="cuda")
    for number, k in ((1, k1), (2, k2)):
        if number in which:
            k[1, 40:45] *= 100
    tensors, options = (q1, k1, q2, k2, v), {"causal": True, "return_lse": True}

    def exactly(lam: Any) -> Any:
        return differential_attention(*wide(tensors), lam, kernel="reference", **options)

    got = differential_attention(*tensors, lam, kernel="gluon", **options)
    plain = differential_attention(*tensors, lam, kernel="reference", **options)
    assert_close(got, exactly(lam.double()), plain, size_of_both(exactly))


def test_gradients_equal_those_on_the_cpu() -> None:
    g = torch.Generator().manual_seed(0)
    shapes = ((2, 9, 4, 32), (2, 20, 2, 32), (2, 9, 4, 32), (2, 20, 2, 32), (2, 20, 2, 64), (4,))
    drawn = [torch.randn(shape, generator=g) for shape in shapes]
    found = []
    for device in ("cpu", "cuda"):
        inputs = [x.to(device).requires_grad_() for x in drawn]
        out = differential_attention(*inputs, causal=True, kernel="auto")
        found.append(torch.autograd.grad(out.square().sum(), inputs))
    for cpu, gpu in zip(*found, strict=True):
        torch.testing.assert_close(gpu.cpu(), cpu, atol=2e-4, rtol=2e-3)


def test_under_torch_compile() -> None:
    tensors = [torch.randn(1, 70, 4, 64, device="cuda").bfloat16() for _ in range(4)]
    v, lam = torch.randn(1, 70, 4, 128, device="cuda").bfloat16(), torch.rand(4, device="cuda")

    def run(q1: Tensor, k1: Tensor, q2: Tensor, k2: Tensor, v: Tensor) -> Any:
        return differential_attention(q1, k1, q2, k2, v, lam, causal=True)

    compiled = torch.compile(run, fullgraph=True)(*tensors, v)
    assert torch.equal(compiled, run(*tensors, v))
