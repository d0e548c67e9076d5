"""Differential attention in portable Triton, in Triton's interpreter on a CPU, against float64.

The interpreter is chosen when a kernel is imported, so this needs a process of its own:
TRITON_INTERPRET=1 python -m pytest tests/kernels/test_triton_differential.py
"""

from __future__ import annotations

import math
import os
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rooftile.kernels.reference import differential as reference
from rooftile.kernels.torch.differential import stack_queries
from tests.ops.test_paged import fill

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1, in a process of its own", allow_module_level=True)
pytest.importorskip("triton", reason="Triton is not installed")

from rooftile.kernels.triton import differential as kernel

Outputs = tuple[Tensor, Tensor, Tensor]
WINDOWS = [(-1, -1), (-1, 0), (20, 0), (0, 0), (40, 10), (9, -1)]
DTYPES = [torch.float32, torch.float16]


def wide(x: Any) -> Any:
    return x.double() if isinstance(x, Tensor) and x.is_floating_point() else x


def assert_close(got: Outputs, exact: Outputs) -> None:
    out = got[0]
    if out.numel():
        error = (out.double() - exact[0]).abs().amax(-1)
        eps = torch.finfo(out.dtype).eps
        assert bool((error <= (4 * eps + 1e-6) * (exact[0].abs().amax(-1) + 1)).all())
    for lse, expected in zip(got[1:], exact[1:], strict=True):
        assert torch.equal(lse == -math.inf, expected == -math.inf)
        seen = expected > -math.inf
        assert torch.allclose(lse[seen].double(), expected[seen], atol=2e-5, rtol=1e-5)


@settings(max_examples=8)
@given(
    q_len=st.sampled_from([1, 31, 33, 70]),
    kv_len=st.sampled_from([0, 1, 31, 64, 100]),
    pairs=st.sampled_from([(1, 1), (2, 1), (4, 2)]),
    dims=st.sampled_from([(16, 32), (24, 40), (5, 3), (8, 130)]),
    window=st.sampled_from(WINDOWS),
    shared=st.booleans(),
    per_token=st.booleans(),
    scale=st.sampled_from([0.3, -0.2, 0.0]),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 2**31),
)
def test_dense(
    q_len: int,
    kv_len: int,
    pairs: tuple[int, int],
    dims: tuple[int, int],
    window: tuple[int, int],
    shared: bool,
    per_token: bool,
    scale: float,
    dtype: torch.dtype,
    seed: int,
) -> None:
    """Heads are interleaved: both queries of a pair, and both keys, are strided views."""
    g = torch.Generator().manual_seed(seed)
    q = torch.randn(2, q_len, pairs[0], 2, dims[0], generator=g).to(dtype)
    k = torch.randn(2, kv_len, pairs[1], 2, dims[0], generator=g).to(dtype)
    v = torch.randn(2, kv_len, pairs[1], dims[1], generator=g).to(dtype)
    lam = torch.rand((2, q_len, pairs[0]) if per_token else pairs[:1], generator=g)
    k2 = None if shared else k[..., 1, :]
    tensors = (q[..., 0, :], k[..., 0, :], q[..., 1, :], k2, v, lam)
    exact = reference.differential_attention(*map(wide, tensors), *window, scale)
    assert_close(kernel.differential_attention(*tensors, *window, scale), exact)


@settings(max_examples=6)
@given(
    lengths=st.lists(
        st.tuples(st.sampled_from([0, 1, 33, 50]), st.sampled_from([0, 1, 40, 64])),
        min_size=1,
        max_size=4,
    ),
    padding=st.sampled_from([0, 2, 90]),
    window=st.sampled_from(WINDOWS),
    per_token=st.booleans(),
    v_dim=st.sampled_from([32, 32, 130]),
    seed=st.integers(0, 2**31),
)
def test_ragged_with_nan_in_the_padding(
    lengths: list[tuple[int, int]],
    padding: int,
    window: tuple[int, int],
    per_token: bool,
    v_dim: int,
    seed: int,
) -> None:
    g = torch.Generator().manual_seed(seed)
    q_lens, kv_lens = ([pair[i] for pair in lengths] for i in range(2))
    used_q, used_k = sum(q_lens), sum(kv_lens)
    q1, q2 = (torch.randn(used_q + padding, 2, 16, generator=g) for _ in range(2))
    k1, k2 = (torch.randn(used_k + padding, 1, 16, generator=g) for _ in range(2))
    v = torch.randn(used_k + padding, 1, v_dim, generator=g)
    lam = torch.rand((used_q + padding, 2) if per_token else (2,), generator=g)
    cu_q, cu_k = (torch.tensor([0, *lens]).cumsum(0) for lens in (q_lens, kv_lens))
    rest = (cu_q, cu_k, max(q_lens), max(kv_lens), *window, 0.2)
    tensors = (q1, k1, q2, k2, v, lam)
    exact = reference.differential_attention_varlen(*map(wide, tensors), *rest)
    for x, used in ((q1, used_q), (q2, used_q), (k1, used_k), (k2, used_k), (v, used_k)):
        x[used:] = math.nan
    if per_token:
        lam[used_q:] = math.nan
    assert_close(kernel.differential_attention_varlen(*tensors, *rest), exact)


@settings(max_examples=8)
@given(
    lengths=st.lists(
        st.tuples(st.sampled_from([0, 1, 1, 5, 40]), st.sampled_from([0, 1, 40, 63, 200])),
        min_size=1,
        max_size=4,
    ),
    padding=st.sampled_from([0, 3]),
    pairs=st.sampled_from([(1, 1), (4, 2), (3, 1)]),
    page_size=st.sampled_from([1, 4, 16]),
    left=st.sampled_from([-1, 9]),
    shared=st.booleans(),
    per_token=st.booleans(),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 2**31),
)
def test_paged(
    lengths: list[tuple[int, int]],
    padding: int,
    pairs: tuple[int, int],
    page_size: int,
    left: int,
    shared: bool,
    per_token: bool,
    dtype: torch.dtype,
    seed: int,
) -> None:
    g = torch.Generator().manual_seed(seed)
    dims = (8, 16) if shared else (16, 16)
    paged = fill(g, lengths, pairs, dims, page_size, dtype, padding=padding, garbage=2**31 - 1)
    q1 = paged.q[..., :8]
    q2 = torch.randn(q1.shape, generator=g).to(dtype)
    lam = torch.rand(q1.shape[:-1] if per_token else q1.shape[1:2], generator=g)
    batch = paged.batch
    if per_token:
        lam[int(batch.cu_seqlens_q[-1]) :] = math.nan
    rest = (batch.cu_seqlens_q, batch.kv_lens, batch.page_table, batch.max_q_len)
    rest = (*rest, batch.max_kv_len, left, 0, 0.3)
    tensors = (q1, q2, paged.k_pages, paged.v_pages, lam)
    exact = reference.paged_differential_attention(*map(wide, tensors), *rest)
    assert_close(kernel.paged_differential_attention(*tensors, *rest), exact)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(("pairs", "dim"), [(1, 8), (3, 5), (40, 128), (16, 64)])
def test_queries_stacked(pairs: int, dim: int, shared: bool) -> None:
    g = torch.Generator().manual_seed(0)
    q = torch.randn(7, 2 * pairs, dim, generator=g)
    for q1, q2 in ((q[:, 0::2], q[:, 1::2]), q.chunk(2, 1), (q[:0, 0::2], q[:0, 1::2])):
        got = kernel.stack_queries(q1, q2, shared)
        assert torch.equal(got, stack_queries(q1, q2, shared))


@pytest.mark.parametrize("dims", [(8, 16), (8, 130)])  # in one program, and in two calls
def test_lam_of_a_query_that_sees_nothing_is_not_read(dims: tuple[int, int]) -> None:
    q, k = torch.randn(1, 5, 2, dims[0]), torch.randn(1, 2, 2, dims[0])
    v, lam = torch.randn(1, 2, 2, dims[1]), torch.full((1, 5, 2), math.nan)
    lam[:, 3:] = 0.5
    out, _, _ = kernel.differential_attention(q, k, 2 * q, k, v, lam, -1, 0, 0.3)
    assert bool((out[:, :3] == 0).all())
    assert bool(out.isfinite().all())


def test_more_tokens_than_the_second_axis_of_a_grid_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    grids: list[tuple[int, ...]] = []

    class Launched:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            grids.append(grid)
            return lambda *arguments, **options: None

    monkeypatch.setattr(kernel, "_subtract_kernel", Launched())
    monkeypatch.setattr(kernel, "_stack_kernel", Launched())
    tokens = 70_000
    kernel.subtract(torch.empty(tokens, 4, 8), torch.empty(tokens, 4), torch.empty(2))
    kernel.stack_queries(torch.empty(tokens, 2, 8), torch.empty(tokens, 2, 8), False)
    assert all(axis <= 65_535 for grid in grids for axis in grid[1:])
