"""Keys that are NaN where a query sees them, on a GPU: output and lse of the row are NaN both.

As tests/ops/test_nan_keys.py for the kernels of a CPU; the hardware's maxima pass NaN over.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from rooftile.ops.attention import attention, attention_varlen
from rooftile.ops.differential import differential_attention, paged_differential_attention
from rooftile.ops.dual_chunk import dual_chunk_attention, paged_dual_chunk_attention
from rooftile.ops.paged import paged_attention
from tests.ops.test_nan_keys import assert_nan
from tests.ops.test_paged_gpu import FEW, Shape, make

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
FAMILIES = ("gluon", "triton")
DIMS = (64, 128, 256)
# Queries and keys: one tile of keys, some blocks, anchored maxima, few tiles that are cut along their keys.
LENGTHS = [(100, 100), (330, 300), (1100, 1200), (100, 5000)]


def drawn(*shapes: tuple[int, ...]) -> list[Tensor]:
    g = torch.Generator("cuda").manual_seed(3)
    return [torch.randn(x, generator=g, device="cuda").bfloat16() for x in shapes]


def seen_from(place: int, q_len: int, kv_len: int) -> Tensor:
    """Which queries see a key, causally: [q_len, 1]."""
    return (torch.arange(q_len, device="cuda") + kv_len - q_len >= place)[:, None]


def of_group(heads: int, group: int, groups: int) -> Tensor:
    """Which query heads read a head of keys: [heads]."""
    return torch.arange(heads, device="cuda") // (heads // groups) == group


@pytest.mark.parametrize("part", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("family", FAMILIES)
def test_dense(family: str, dim: int, lengths: tuple[int, int], part: float) -> None:
    q_len, kv_len = lengths
    q, k, v = drawn((1, q_len, 4, dim), *[(1, kv_len, 2, dim)] * 2)
    place = int(part * (kv_len - 1))
    k[0, place, 1, 3] = math.nan
    out, lse = attention(q, k, v, causal=True, return_lse=True, kernel=family)
    seen = seen_from(place, q_len, kv_len)
    assert_nan(out, lse, seen & of_group(4, 1, 2))
    nothing = torch.arange(q_len, device="cuda") + kv_len < q_len
    assert bool((lse[:, nothing] == -math.inf).all())


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("family", FAMILIES)
def test_ragged(family: str, dim: int) -> None:
    """The other sequences, and the padding, stay as they are."""
    q, k, v = drawn((700, 4, dim), (900, 2, dim), (900, 2, dim))
    k[430] = math.nan  # number 230 of the second sequence
    ends = [torch.tensor(x, device="cuda") for x in ([0, 200, 600, 690], [0, 200, 800, 890])]
    out, lse = attention_varlen(
        q, k, v, *ends, causal=True, return_lse=True, kernel=family
    )  # fmt: skip
    assert_nan(out[200:600], lse[200:600], seen_from(230, 400, 600))
    others = torch.cat([lse[:200], lse[600:]])
    assert not bool(others.isnan().any())
    assert bool((lse[690:] == -math.inf).all())


@pytest.mark.parametrize("lengths", [[(1, 700), (1, 90)], [(150, 700), (1, 90)]], ids=str)
@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("family", FAMILIES)
def test_pages(family: str, dim: int, lengths: list[tuple[int, int]]) -> None:
    (q_len, kv_len), _ = lengths
    case = make(Shape(dims=(dim, dim), max_q_len=FEW), lengths, 0)
    case.k_pages[case.batch.page_table[0, 20], 1, 3, 1] = math.nan  # key 323
    out, lse = paged_attention(
        case.q, case.k_pages, case.v_pages, case.batch, return_lse=True, kernel=family
    )
    assert_nan(out[:q_len], lse[:q_len], seen_from(323, q_len, kv_len) & of_group(8, 1, 2))
    assert not bool(lse[q_len:].isnan().any())


@pytest.mark.parametrize("place", [140, 299])
@pytest.mark.parametrize("dim", DIMS[:2])
@pytest.mark.parametrize("family", FAMILIES)
def test_dual_chunk(family: str, dim: int, place: int) -> None:
    *queries, k, v = drawn(*[(1, 300, 4, dim)] * 3, *[(1, 300, 2, dim)] * 2)
    k[0, place, 1, 3] = math.nan
    sizes = {"chunk_size": 144, "local_size": 16}
    out, lse = dual_chunk_attention(*queries, k, v, **sizes, return_lse=True, kernel=family)
    assert_nan(out, lse, seen_from(place, 300, 300) & of_group(4, 1, 2))


@pytest.mark.parametrize("lengths", [[(1, 700), (1, 90)], [(150, 700), (1, 90)]], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_paged_dual_chunk(family: str, lengths: list[tuple[int, int]]) -> None:
    (q_len, kv_len), _ = lengths
    case = make(Shape(max_q_len=FEW), lengths, 0)
    case.k_pages[case.batch.page_table[0, 20], 1, 3, 1] = math.nan
    out, lse = paged_dual_chunk_attention(
        *[case.q] * 3, case.k_pages, case.v_pages, case.batch, chunk_size=144, local_size=16,
        return_lse=True, kernel=family,
    )  # fmt: skip
    assert_nan(out[:q_len], lse[:q_len], seen_from(323, q_len, kv_len) & of_group(8, 1, 2))
    assert not bool(lse[q_len:].isnan().any())


@pytest.mark.parametrize("which", [1, 2])
@pytest.mark.parametrize("family", FAMILIES)
def test_differential(family: str, which: int) -> None:
    """NaN in the keys of one softmax: its lse is NaN, and so is their difference."""
    q1, q2, k1, k2, v = drawn(
        *[(1, 150, 2, 64)] * 2, *[(1, 300, 1, 64)] * 2, (1, 300, 1, 128)
    )  # fmt: skip
    (k1 if which == 1 else k2)[0, 200, 0, 1] = math.nan
    out, *both = differential_attention(
        q1, k1, q2, k2, v, 0.5, causal=True, return_lse=True, kernel=family
    )
    assert_nan(out, both[which - 1], seen_from(200, 150, 300))
    assert not bool(both[2 - which].isnan().any())


@pytest.mark.parametrize("which", [1, 2])
@pytest.mark.parametrize("q_len", [1, 150])
@pytest.mark.parametrize("family", FAMILIES)
def test_paged_differential(family: str, q_len: int, which: int) -> None:
    case: Any = make(Shape(max_q_len=FEW), [(q_len, 700), (1, 90)], 0)
    case.k_pages[case.batch.page_table[0, 20], 1, 3, 1 if which == 1 else 65] = math.nan
    lam = torch.full((8,), 0.5, device="cuda")
    out, *both = paged_differential_attention(
        case.q[..., :64], case.q[..., 64:], case.k_pages, case.v_pages, case.batch, lam,
        return_lse=True, kernel=family,
    )  # fmt: skip
    seen = seen_from(323, q_len, 700) & of_group(8, 1, 2)
    assert_nan(out[:q_len], both[which - 1][:q_len], seen)
    # A kernel may multiply both keys of a slot, one of them by zeros: then the other softmax is NaN, too.
    for lse in both:
        assert not bool((lse[:q_len].isnan() & ~seen).any())
        assert not bool(lse[q_len:].isnan().any())
