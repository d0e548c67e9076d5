"""Dual chunk attention on a GPU, through the operators.

Against the reference kernel in float64 on the same device, which tests/ops/test_dual_chunk.py has
compared with an oracle that builds the full matrix of positions.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rooftile.ops.dual_chunk import (
    PAGED_DUAL_CHUNK,
    dual_chunk_attention,
    dual_chunk_attention_varlen,
    dual_chunk_call,
    paged_dual_chunk_attention,
    plan_dual_chunk,
)
from rooftile.ops.dual_chunk_rotary import dual_chunk_rotary_embedding
from rooftile.ops.paged import plan_arguments
from rooftile.ops.rotary_table import RotaryConfig, rotary_table
from rooftile.types import PagedBatch
from tests.ops.accuracy import assert_rows_close
from tests.ops.test_paged_gpu import FEW, Case, Shape, assert_close, make

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
FAMILIES = ("gluon", "triton")
# Of a kernel, and the tokens of a chunk. Hopper's takes whole tiles of 128 keys.
SHAPES = [
    (Shape(max_q_len=1), 128),
    (Shape(max_q_len=FEW), 256),
    (Shape(), 128),
    (Shape(page_size=64, heads=(5, 1), max_q_len=1), 128),
    (Shape(page_size=256, heads=(7, 1), dtype=torch.float16), 384),
    (Shape(page_size=8, heads=(24, 2), dims=(64, 64), options=(("softcap", 20.0),)), 128),
    (Shape(dims=(64, 64), max_q_len=FEW), 256),
    (Shape(dims=(96, 96)), 256),
    (Shape(dims=(192, 128), page_size=32), 128),
    (Shape(dims=(256, 256), heads=(6, 2)), 64),
    (Shape(dims=(256, 256), heads=(32, 2), max_q_len=1), 64),
    (Shape(page_size=1, heads=(4, 4), max_q_len=FEW), 100),
    (Shape(dims=(72, 40), page_size=4), 37),
    (Shape(dtype=torch.float32, dims=(64, 64)), 128),
]
Q_LENS = st.one_of(st.just(1), st.integers(0, 8), st.sampled_from([33, 130, 150, 300]))
KV_LENS = st.one_of(
    st.integers(0, 40),
    st.sampled_from(
        [63, 64, 65, 127, 128, 129, 192, 255, 256, 257, 384, 385, 512, 513, 1000, 5000]
    ),
)
Lengths = Sequence[tuple[int, int]]


def rotations(case: Case, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Three unlike queries, so that none can stand in for another; NaN in the padding as it was."""
    g = torch.Generator("cuda").manual_seed(seed + 1)
    q = case.q
    others = (torch.randn(q.shape, generator=g, device="cuda").to(q.dtype) for _ in range(2))
    return (q, *(other + q * 0 for other in others))


def refused(family: str, shape: Shape, chunk_len: int) -> str | None:
    heads, dims = shape.heads, shape.dims
    empty = {"dtype": shape.dtype, "device": "cuda"}
    q = torch.empty(0, heads[0], dims[0], **empty)
    pages = (torch.empty(0, heads[1], shape.page_size, dim, **empty) for dim in dims)
    return PAGED_DUAL_CHUNK.refusal(dual_chunk_call(q, *pages, chunk_len, 0.0), family)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("shape", "chunk_len"), SHAPES, ids=str)
@settings(max_examples=12, deadline=None)
@given(
    lengths=st.lists(st.tuples(Q_LENS, KV_LENS), min_size=1, max_size=6),
    padding=st.integers(0, 2),
    together=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_paged(
    family: str,
    shape: Shape,
    chunk_len: int,
    lengths: Lengths,
    padding: int,
    together: bool,
    seed: int,
) -> None:
    reason = refused(family, shape, chunk_len)
    if reason is not None:
        pytest.skip(reason)
    lengths = [(min(q, shape.max_q_len), kv) for q, kv in lengths]
    case = make(shape, lengths, seed, padding)
    queries = rotations(case, seed)
    if together:  # as dual_chunk_rotary_embedding lays them
        queries = tuple(torch.stack(queries))
    options = {"chunk_size": chunk_len + 5, "local_size": 5, "return_lse": True, **case.options}

    def run(kernel: str, dtype: torch.dtype = shape.dtype) -> Any:
        tensors = (x.to(dtype) for x in (*queries, case.k_pages, case.v_pages))
        return paged_dual_chunk_attention(*tensors, case.batch, kernel=kernel, **options)

    torch.full((1 << 22,), math.nan, device="cuda")  # what outputs are likely to be made of
    got = run(family)
    assert_close(got, run("reference", torch.float64), run("reference"))
    tokens = sum(q for q, _ in lengths)
    assert bool((got[0][tokens:] == 0).all())
    assert all(torch.equal(a, b) for a, b in zip(got, run(family), strict=True))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("q_len", [12, 300])
@pytest.mark.parametrize("chunk_len", [128, 256])
def test_items_of_many_tiles(family: str, q_len: int, chunk_len: int) -> None:
    """Whole strips of 47 KV tiles: more than fit into the rings of keys and values."""
    case = make(Shape(heads=(32, 8)), [(q_len, 6000)] * 17, 0)
    queries = rotations(case, 0)
    options = {"chunk_size": chunk_len + 5, "local_size": 5, "return_lse": True}
    pages = case.k_pages, case.v_pages
    got = paged_dual_chunk_attention(*queries, *pages, case.batch, kernel=family, **options)
    wide = (x.double() for x in (*queries, *pages))
    exact = paged_dual_chunk_attention(*wide, case.batch, kernel="reference", **options)
    plain = paged_dual_chunk_attention(*queries, *pages, case.batch, kernel="reference", **options)
    assert_close(got, exact, plain)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("max_q_len", [1, 8])
def test_graph_replay_with_other_lengths_equals_eager(family: str, max_q_len: int) -> None:
    """With a plan, as an engine's layers take it."""
    case = make(Shape(), [(1, 700), (1, 33), (1, 1), (1, 90), (1, 5000)], 1, padding=20)
    batch = dataclasses.replace(case.batch, max_q_len=max_q_len, max_kv_len=6000)
    pages = [x.nan_to_num_(0.5) for x in (case.k_pages, case.v_pages)]  # others will be seen
    queries = torch.randn(3, *case.q.shape, device="cuda").bfloat16()
    call = dual_chunk_call(queries[0], *pages, 128, 0.0)
    assert PAGED_DUAL_CHUNK.refusal(call, family) is None

    def step() -> Tensor:
        planned, plan = plan_dual_chunk(call, batch, case.q.shape[0], family)
        out: Tensor = PAGED_DUAL_CHUNK.handle(
            *(*queries, *pages, planned.cu_seqlens_q, planned.kv_lens, planned.page_table),
            *(planned.max_q_len, planned.max_kv_len, 128, 0.0, 0.1, *plan_arguments(plan), family),
        )[0]
        return out

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    queries.normal_()
    for kv_lens, q_lens in (
        ([650, 40, 5, 90, 4097], [1, 1, 1, 0, 1]),
        ([130, 48, 1, 9, 4999], [8, 1, 0, 2, 4]),
        ([257, 48, 0, 0, 0], [1, 1, 0, 0, 0]),
    ):
        q_lens = [min(n, max_q_len) for n in q_lens]
        batch.kv_lens.copy_(torch.tensor(kv_lens))
        batch.cu_seqlens_q.copy_(torch.tensor([0, *q_lens]).cumsum(0))
        captured.fill_(math.nan)
        graph.replay()
        options = {"chunk_size": 129, "local_size": 1, "softmax_scale": 0.1}
        eager = paged_dual_chunk_attention(*queries, *pages, batch, kernel=family, **options)
        assert torch.equal(captured, eager)
        wide = (x.double() for x in (*queries, *pages))
        exact = paged_dual_chunk_attention(*wide, batch, kernel="reference", **options)
        used = sum(q_lens)
        assert float((captured[:used].double() - exact[:used]).abs().max()) < 0.02
        assert bool((captured[used:] == 0).all())


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("page_size", [16, 64])
def test_neither_pages_nor_steps_change_a_result(family: str, page_size: int) -> None:
    """A text of 700 tokens in one piece, in steps, and token by token, in pages of any size."""
    g = torch.Generator("cuda").manual_seed(0)
    count, chunk = 700, {"chunk_size": 300, "local_size": 44}
    queries = torch.randn(3, count, 8, 128, generator=g, device="cuda").bfloat16()
    k, v = torch.randn(2, count, 2, 128, generator=g, device="cuda").bfloat16()
    whole = dual_chunk_attention(*queries[:, None], k[None], v[None], kernel="triton", **chunk)
    pages = -(-count // page_size)
    order = torch.randperm(pages, generator=g, device="cuda")
    pools = []
    for x in (k, v):
        pool = torch.full((pages * page_size, 2, 128), math.nan, device="cuda", dtype=x.dtype)
        pool[:count] = x
        cut = pool.view(pages, page_size, 2, 128).transpose(1, 2)
        pools.append(torch.empty_like(cut).index_copy_(0, order, cut))
    for begin, end in ((0, 700), (0, 100), (100, 513), (255, 256), (256, 257), (699, 700)):
        cu = torch.tensor([0, end - begin], dtype=torch.int32, device="cuda")
        lens = torch.tensor([end], dtype=torch.int32, device="cuda")
        batch = PagedBatch(cu, lens, order[None].int(), end - begin, end)
        part = paged_dual_chunk_attention(
            *queries[:, begin:end], *pools, batch, kernel=family, **chunk
        )
        # The same sums in another order: a rounding of the result and of its weights.
        torch.testing.assert_close(part, whole[0, begin:end], atol=8e-3, rtol=2e-2)


@pytest.mark.parametrize(
    ("family", "chunks"), [("triton", (1, 33, 64, 100, 2048)), ("gluon", (128, 256, 2048))]
)
@settings(max_examples=25, deadline=None)
@given(data=st.data(), seed=st.integers(0, 2**31))
def test_dense(family: str, chunks: tuple[int, ...], data: Any, seed: int) -> None:
    chunk_len = data.draw(st.sampled_from(chunks))
    lengths = st.sampled_from([1, 2, 63, 64, 65, 129, 300, 2047, 2048, 2049, 4097, 4200])
    q_len, kv_len = data.draw(lengths), data.draw(lengths)
    heads = data.draw(st.sampled_from([(2, 1), (3, 3), (4, 2)]))
    dim = data.draw(st.sampled_from([64, 128, 256]))
    g = torch.Generator("cuda").manual_seed(seed)

    def draw(length: int, heads: int) -> Tensor:
        return torch.randn(1, length, heads, dim, generator=g, device="cuda").bfloat16()

    tensors = [
        *(draw(q_len, heads[0]) for _ in range(3)),
        *(draw(kv_len, heads[1]) for _ in range(2)),
    ]
    options = {"chunk_size": chunk_len + 1, "local_size": 1, "return_lse": True}
    exact = dual_chunk_attention(*(x.double() for x in tensors), kernel="reference", **options)
    plain = dual_chunk_attention(*tensors, kernel="reference", **options)
    assert_close(dual_chunk_attention(*tensors, kernel=family, **options), exact, plain)
    cu_q, cu_k = (torch.tensor([0, n], dtype=torch.int32, device="cuda") for n in (q_len, kv_len))
    if family == "triton":
        flat = dual_chunk_attention_varlen(*(x[0] for x in tensors), cu_q, cu_k, **options)
        assert_close([x[None] for x in flat], exact, plain)


@pytest.mark.parametrize("rises", [(), (5,), (700,), (1250, 3)])
def test_scores_that_rise_far_above_those_of_the_last_keys(rises: tuple[int, ...]) -> None:
    """Long enough for anchored maxima, whose weights must not overflow."""
    g = torch.Generator("cuda").manual_seed(0)
    queries = torch.randn(3, 2, 1200, 4, 128, generator=g, device="cuda").bfloat16()
    k, v = torch.randn(2, 2, 1300, 2, 128, generator=g, device="cuda").bfloat16()
    k[1, list(rises)] *= 100
    options = {"chunk_size": 512, "local_size": 128, "return_lse": True}
    wide = (x.double() for x in (*queries, k, v))
    exact = dual_chunk_attention(*wide, kernel="reference", **options)
    plain = dual_chunk_attention(*queries, k, v, kernel="reference", **options)
    assert_close(dual_chunk_attention(*queries, k, v, kernel="gluon", **options), exact, plain)


@settings(max_examples=25, deadline=None)
@given(
    tokens=st.integers(0, 70),
    heads=st.sampled_from([1, 3, 40]),
    dims=st.sampled_from([(8, 8), (128, 128), (80, 32)]),
    interleaved=st.booleans(),
    original=st.sampled_from([None, 4, 1000]),
    whole=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    seed=st.integers(0, 2**31),
)
def test_queries(
    tokens: int,
    heads: int,
    dims: tuple[int, int],
    interleaved: bool,
    original: int | None,
    whole: bool,
    dtype: torch.dtype,
    seed: int,
) -> None:
    g = torch.Generator("cuda").manual_seed(seed)
    q = torch.randn(tokens, heads, dims[0], generator=g, device="cuda").to(dtype)
    at = torch.randint(0, 5000, (tokens,), generator=g, device="cuda")
    table = rotary_table(RotaryConfig(dims[1], 100.0), 40, device="cuda")
    options: dict[str, Any] = {"chunk_size": 39, "local_size": 9, "interleaved": interleaved}
    options |= {"original_max_position": original, "lengths": at + 77 if whole else None}
    got = dual_chunk_rotary_embedding(q, at, table, kernel="triton", **options)
    exact = dual_chunk_rotary_embedding(q.double(), at, table, kernel="reference", **options)
    for ours, expected in zip(got, exact, strict=True):
        assert_rows_close(ours, expected, dtype)
