"""Dual chunk attention in portable Triton, in Triton's interpreter on a CPU, against float64.

The interpreter is chosen when a kernel is imported, so this needs a process of its own:
TRITON_INTERPRET=1 python -m pytest tests/kernels/test_triton_dual_chunk.py
"""

from __future__ import annotations

import math
import os
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from rooftile.kernels.reference import dual_chunk as reference
from rooftile.kernels.reference import dual_chunk_rotary as rotary_reference
from rooftile.ops.rotary_table import RotaryConfig, rotary_table
from tests.ops.accuracy import assert_rows_close
from tests.ops.test_paged import fill

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1, in a process of its own", allow_module_level=True)
pytest.importorskip("triton", reason="Triton is not installed")

from rooftile.kernels.triton import dual_chunk as kernel
from rooftile.kernels.triton import dual_chunk_rotary

# Chunks that are no whole tiles of 32 rows or keys, that are, and that are shorter.
CHUNKS = [1, 7, 31, 32, 33, 40, 64]
DTYPES = [torch.float32, torch.float16]


def wide(x: Any) -> Any:
    return x.double() if isinstance(x, Tensor) and x.is_floating_point() else x


def assert_close(got: tuple[Tensor, Tensor], exact: tuple[Tensor, Tensor]) -> None:
    out, lse = got
    if out.numel():
        error = (out.double() - exact[0]).abs().amax(-1)
        eps = torch.finfo(out.dtype).eps
        assert bool((error <= (3 * eps + 1e-6) * (exact[0].abs().amax(-1) + 0.5)).all())
    assert torch.equal(lse == -math.inf, exact[1] == -math.inf)
    seen = exact[1] > -math.inf
    assert torch.allclose(lse[seen].double(), exact[1][seen], atol=2e-5, rtol=1e-5)


@settings(max_examples=8)
@given(
    q_len=st.sampled_from([1, 31, 33, 70, 100]),
    kv_len=st.sampled_from([0, 1, 31, 64, 100, 130]),
    heads=st.sampled_from([(1, 1), (2, 1), (4, 2)]),
    dims=st.sampled_from([(16, 16), (24, 40), (5, 3)]),
    chunk_len=st.sampled_from(CHUNKS),
    softcap=st.sampled_from([0.0, 15.0]),
    scale=st.sampled_from([0.3, -0.2, 0.0]),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 2**31),
)
def test_dense(
    q_len: int,
    kv_len: int,
    heads: tuple[int, int],
    dims: tuple[int, int],
    chunk_len: int,
    softcap: float,
    scale: float,
    dtype: torch.dtype,
    seed: int,
) -> None:
    g = torch.Generator().manual_seed(seed)
    queries = [torch.randn(2, q_len, heads[0], dims[0], generator=g).to(dtype) for _ in range(3)]
    k = torch.randn(2, kv_len, heads[1], dims[0], generator=g).to(dtype)
    v = torch.randn(2, kv_len, heads[1], dims[1], generator=g).to(dtype)
    options = (chunk_len, softcap, scale)
    exact = reference.dual_chunk_attention(*map(wide, (*queries, k, v)), *options)
    assert_close(kernel.dual_chunk_attention(*queries, k, v, *options), exact)


@settings(max_examples=6)
@given(
    lengths=st.lists(
        st.tuples(st.sampled_from([0, 1, 33, 50]), st.sampled_from([0, 1, 40, 64, 90])),
        min_size=1,
        max_size=4,
    ),
    padding=st.sampled_from([0, 2, 90]),
    chunk_len=st.sampled_from(CHUNKS),
    seed=st.integers(0, 2**31),
)
def test_ragged_with_nan_in_the_padding(
    lengths: list[tuple[int, int]], padding: int, chunk_len: int, seed: int
) -> None:
    g = torch.Generator().manual_seed(seed)
    q_lens, kv_lens = ([pair[i] for pair in lengths] for i in range(2))
    tokens_q, tokens_k = sum(q_lens), sum(kv_lens)
    queries = [torch.randn(tokens_q + padding, 2, 32, generator=g) for _ in range(3)]
    k, v = (torch.randn(tokens_k + padding, 1, 32, generator=g) for _ in range(2))
    cu_q, cu_k = (torch.tensor([0, *lens]).cumsum(0) for lens in (q_lens, kv_lens))
    rest = (cu_q, cu_k, max(q_lens), max(kv_lens), chunk_len, 0.0, 0.2)
    exact = reference.dual_chunk_attention_varlen(*map(wide, (*queries, k, v)), *rest)
    for x, used in ((k, tokens_k), (v, tokens_k), *((q, tokens_q) for q in queries)):
        x[used:] = math.nan
    assert_close(kernel.dual_chunk_attention_varlen(*queries, k, v, *rest), exact)


@settings(max_examples=10)
@given(
    lengths=st.lists(
        st.tuples(st.sampled_from([0, 1, 1, 5, 40]), st.sampled_from([0, 1, 40, 63, 200])),
        min_size=1,
        max_size=4,
    ),
    padding=st.sampled_from([0, 3]),
    heads=st.sampled_from([(1, 1), (4, 2), (6, 1)]),
    page_size=st.sampled_from([1, 4, 16]),
    dims=st.sampled_from([(16, 16), (5, 3)]),
    chunk_len=st.sampled_from(CHUNKS),
    softcap=st.sampled_from([0.0, 15.0]),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 2**31),
)
@example(  # queries of many chunks, and a long request that is split
    lengths=[(40, 200), (1, 200)],
    padding=1,
    heads=(4, 2),
    page_size=4,
    dims=(16, 16),
    chunk_len=7,
    softcap=0.0,
    dtype=torch.float32,
    seed=0,
)
def test_paged(
    lengths: list[tuple[int, int]],
    padding: int,
    heads: tuple[int, int],
    page_size: int,
    dims: tuple[int, int],
    chunk_len: int,
    softcap: float,
    dtype: torch.dtype,
    seed: int,
) -> None:
    g = torch.Generator().manual_seed(seed)
    paged = fill(g, lengths, heads, dims, page_size, dtype, padding=padding, garbage=2**31 - 1)
    queries = [paged.q, *(torch.randn(paged.q.shape, generator=g).to(dtype) for _ in range(2))]
    batch = paged.batch
    rest = (batch.cu_seqlens_q, batch.kv_lens, batch.page_table, batch.max_q_len)
    rest = (*rest, batch.max_kv_len, chunk_len, softcap, 0.3)
    tensors = (*queries, paged.k_pages, paged.v_pages)
    exact = reference.paged_dual_chunk_attention(*map(wide, tensors), *rest)
    assert_close(kernel.paged_dual_chunk_attention(*tensors, *rest, None, []), exact)


@settings(max_examples=15)
@given(
    tokens=st.sampled_from([0, 1, 5]),
    heads=st.sampled_from([1, 3, 40]),
    dims=st.sampled_from([(8, 8), (64, 64), (11, 6)]),
    interleaved=st.booleans(),
    original=st.sampled_from([0, 4, 1000]),
    whole=st.booleans(),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 2**31),
)
def test_queries(
    tokens: int,
    heads: int,
    dims: tuple[int, int],
    interleaved: bool,
    original: int,
    whole: bool,
    dtype: torch.dtype,
    seed: int,
) -> None:
    g = torch.Generator().manual_seed(seed)
    q = torch.randn(tokens, heads, dims[0], generator=g).to(dtype)
    at = torch.randint(0, 5000, (tokens,), generator=g)
    table = rotary_table(RotaryConfig(dims[1], 100.0), 40)
    rest = (at, at + 77 if whole else None, table, interleaved, 39, 9, original)
    exact = rotary_reference.dual_chunk_rotary(q.double(), *rest)
    assert_rows_close(dual_chunk_rotary.dual_chunk_rotary(q, *rest), exact, dtype)
