"""A key that is NaN where a query sees it: output and lse of the row are NaN both, in every kernel.

An lse of -inf would tell a merge that the row saw nothing, and the row's other parts would pass for the
whole. Keys that nothing sees are NaN in the tests of each operator.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from rooftile.ops.attention import ATTENTION, ATTENTION_VARLEN, attention, attention_varlen
from rooftile.ops.differential import (
    DIFFERENTIAL,
    PAGED_DIFFERENTIAL,
    differential_attention,
    paged_differential_attention,
)
from rooftile.ops.dual_chunk import (
    DUAL_CHUNK,
    PAGED_DUAL_CHUNK,
    dual_chunk_attention,
    paged_dual_chunk_attention,
)
from rooftile.ops.merge import MERGE, merge_attention_states
from rooftile.ops.paged import PAGED_ATTENTION, paged_attention
from tests.ops.accuracy import dtype_for, kernels_to_test
from tests.ops.test_paged import fill

# The first and the last key, and those beside borders of blocks and vectors.
PLACES = [0, 5, 15, 16, 63, 64, 99]
KEYS = 100


def assert_nan(out: Tensor, lse: Tensor, seen: Tensor) -> None:
    """out [..., heads, dim], lse [..., heads]; seen: which of these rows see the key."""
    seen = seen.expand(lse.shape)
    assert bool(out[seen].isnan().all())
    assert bool(lse[seen].isnan().all())
    # Whether others take part of it (a hidden key's value times 0) or not, both tell the same.
    assert torch.equal(out.isnan().any(-1), lse.isnan())


def drawn(*shapes: tuple[int, ...]) -> list[Tensor]:
    g = torch.Generator().manual_seed(3)
    return [torch.randn(shape, generator=g) for shape in shapes]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("q_len", [1, 40, 130])
@pytest.mark.parametrize("kernel", kernels_to_test(ATTENTION))
def test_dense(kernel: str, q_len: int, place: int) -> None:
    q, k, v = drawn((1, q_len, 4, 16), (1, KEYS, 2, 16), (1, KEYS, 2, 16))
    k[0, place, 1] = math.nan
    out, lse = attention(q, k, v, causal=True, return_lse=True, kernel=kernel)
    position = torch.arange(q_len) + KEYS - q_len
    seen = (position >= place)[None, :, None] & (torch.arange(4) >= 2)
    assert_nan(out, lse, seen)
    nothing = position < 0
    assert bool((lse[:, nothing] == -math.inf).all())


@pytest.mark.parametrize("sink", [False, True])
@pytest.mark.parametrize("kernel", kernels_to_test(ATTENTION_VARLEN))
def test_ragged(kernel: str, sink: bool) -> None:
    """The other sequences, and the padding, stay as they are."""
    q, k, v = drawn((50, 2, 16), (60, 2, 16), (60, 2, 16))
    k[30] = math.nan  # of the second sequence
    ends = torch.tensor([0, 20, 40, 45]), torch.tensor([0, 20, 50, 60])
    sinks = torch.tensor([0.3, -math.inf]) if sink else None
    out, lse = attention_varlen(q, k, v, *ends, sink=sinks, return_lse=True, kernel=kernel)
    rows = torch.arange(50)
    assert_nan(out, lse, ((rows >= 20) & (rows < 40))[:, None])
    assert not bool(lse[:20].isnan().any())
    assert bool((lse[45:] == -math.inf).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lengths", [[(1, KEYS), (1, 7)], [(30, KEYS), (9, 20)], [(1, 300)]])
@pytest.mark.parametrize("kernel", kernels_to_test(PAGED_ATTENTION))
def test_paged(kernel: str, lengths: list[tuple[int, int]], dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(3)
    p = fill(g, lengths, (4, 2), (16, 16), 8, dtype_for(kernel, dtype))
    p.k_pages[p.batch.page_table[0, 4], 0, 5] = math.nan  # key 37 of the first request
    out, lse = paged_attention(p.q, p.k_pages, p.v_pages, p.batch, return_lse=True, kernel=kernel)
    (q_len, kv_len), tokens = lengths[0], torch.arange(p.q.shape[0])
    seen = (tokens < q_len) & (tokens + kv_len - q_len >= 37)
    assert_nan(out, lse, seen[:, None] & (torch.arange(4) < 2))
    assert not bool(lse[q_len:].isnan().any())


@pytest.mark.parametrize("kernel", kernels_to_test(DUAL_CHUNK))
def test_dual_chunk(kernel: str) -> None:
    q, *others, k, v = drawn(*[(1, 70, 4, 16)] * 3, *[(1, 70, 2, 16)] * 2)
    k[0, 20, 1] = math.nan
    sizes = {"chunk_size": 32, "local_size": 16}
    out, lse = dual_chunk_attention(q, *others, k, v, **sizes, return_lse=True, kernel=kernel)
    assert_nan(out, lse, (torch.arange(70) >= 20)[None, :, None] & (torch.arange(4) >= 2))


@pytest.mark.parametrize("lengths", [[(1, KEYS), (1, 7)], [(30, KEYS), (9, 20)]])
@pytest.mark.parametrize("kernel", kernels_to_test(PAGED_DUAL_CHUNK))
def test_paged_dual_chunk(kernel: str, lengths: list[tuple[int, int]]) -> None:
    p = fill(torch.Generator().manual_seed(3), lengths, (4, 2), (16, 16), 8, torch.float32)
    p.k_pages[p.batch.page_table[0, 4], 0, 5] = math.nan
    sizes = {"chunk_size": 32, "local_size": 16}
    out, lse = paged_dual_chunk_attention(
        *(p.q, p.q, p.q, p.k_pages, p.v_pages, p.batch), **sizes, return_lse=True, kernel=kernel
    )
    seen = torch.arange(p.q.shape[0]) < lengths[0][0]
    assert_nan(out, lse, seen[:, None] & (torch.arange(4) < 2))


@pytest.mark.parametrize("which", [1, 2])
@pytest.mark.parametrize("kernel", kernels_to_test(DIFFERENTIAL))
def test_differential(kernel: str, which: int) -> None:
    """NaN in the keys of one softmax: its lse is NaN, and so is their difference."""
    q1, q2, k1, k2, v = drawn(*[(1, 40, 4, 16)] * 2, *[(1, 50, 2, 16)] * 2, (1, 50, 2, 32))
    (k1 if which == 1 else k2)[0, 20, 1] = math.nan
    out, *both = differential_attention(q1, k1, q2, k2, v, 0.5, return_lse=True, kernel=kernel)
    seen = (torch.arange(4) >= 2).expand(1, 40, 4)
    assert_nan(out, both[which - 1], seen)


@pytest.mark.parametrize("which", [1, 2])
@pytest.mark.parametrize("q_len", [1, 30])
@pytest.mark.parametrize("kernel", kernels_to_test(PAGED_DIFFERENTIAL))
def test_paged_differential(kernel: str, q_len: int, which: int) -> None:
    lengths = [(q_len, KEYS), (1, 7)]
    p = fill(torch.Generator().manual_seed(3), lengths, (4, 2), (32, 32), 8, torch.float32)
    page = p.k_pages[p.batch.page_table[0, 4], 0, 5]
    page[16 * (which - 1) : 16 * which] = math.nan  # k1 and k2 side by side
    q1, q2 = p.q[..., :16], p.q[..., 16:]
    lam = torch.full((4,), 0.5)
    out, *both = paged_differential_attention(
        *(q1, q2, p.k_pages, p.v_pages, p.batch, lam), return_lse=True, kernel=kernel
    )
    seen = (torch.arange(q_len + 1) < q_len)[:, None] & (torch.arange(4) < 2)
    assert_nan(out, both[which - 1], seen)


@pytest.mark.parametrize("kernel", kernels_to_test(MERGE))
def test_merge(kernel: str) -> None:
    outs, lses = drawn((3, 9, 2, 16), (3, 9, 2))
    lses[0, :3] = -math.inf
    outs[1, 2, 1] = lses[1, 2, 1] = math.nan
    out, lse = merge_attention_states(outs, lses, kernel=kernel)
    seen = torch.zeros(9, 2, dtype=torch.bool)
    seen[2, 1] = True
    assert_nan(out, lse, seen)
    assert int(lse.isnan().sum()) == 1
