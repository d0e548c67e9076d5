"""The native attention over pages: few and many rows, at every level of instructions and any number
of threads, against the oracle."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rooftile.kernels.cpu import library
from rooftile.ops.paged import paged_attention
from tests.ops import attention_oracle as oracle
from tests.ops.test_paged import check, fill

pytestmark = pytest.mark.skipif(library.refusal() is not None, reason=str(library.refusal()))


# The levels that this machine has.
LEVELS = (
    []
    if library.refusal()
    else library.LEVEL_NAMES[: library.LEVEL_NAMES.index(library.level()) + 1]
)


# Query and key heads, with groups of 1, 3, 4, 5, 7, 8 and 12.
HEADS = st.sampled_from([(2, 2), (9, 3), (8, 2), (5, 1), (14, 2), (8, 1), (12, 1)])
DIMS = st.sampled_from([(64, 64), (128, 128), (32, 96), (96, 32), (256, 64), (40, 24)])


@pytest.mark.parametrize("level", LEVELS)
@given(
    lengths=st.lists(
        st.tuples(st.sampled_from([1, 1, 1, 2, 0, 37]), st.integers(0, 300)), min_size=1, max_size=4
    ),
    long=st.sampled_from([0, 0, 769, 1500]),
    heads=HEADS,
    dims=DIMS,
    page_size=st.sampled_from([16, 16, 48, 8]),
    dtype=st.sampled_from([torch.bfloat16, torch.bfloat16, torch.float16, torch.float32]),
    window=st.sampled_from([None, None, (70, 0), (200, None)]),
    softcap=oracle.SOFTCAPS,
    sink_kind=oracle.SINKS,
    scale=st.sampled_from([None, 0.0, -0.1]),
    seed=st.integers(0, 2**32),
)
@example([(1, 127), (1, 128), (2, 129)], 1500, (9, 3), (64, 64), 16, torch.bfloat16, None, 0.0, None, None, 0)  # fmt: skip
@settings(max_examples=12)
def test_equals_the_oracle(
    level: str,
    lengths: list[tuple[int, int]],
    long: int,
    heads: tuple[int, int],
    dims: tuple[int, int],
    page_size: int,
    dtype: torch.dtype,
    window: tuple[int, int | None] | None,
    softcap: float,
    sink_kind: float | None,
    scale: float | None,
    seed: int,
) -> None:
    g = torch.Generator().manual_seed(seed)
    lengths = [*lengths, *([(1, long)] if long else [])]
    left = None if window is None else window[0]
    paged = fill(g, lengths, heads, dims, page_size, dtype, left=left)
    sink = oracle.sink_of(g, heads[0], sink_kind)
    options: dict[str, Any] = {} if scale is None else {"softmax_scale": scale}
    options |= {"causal": True, "window": window, "softcap": softcap, "sink": sink}
    with library.at_level(level):
        check(paged, dtype, "cpu", **options)


def test_threads_and_neighbours_change_no_bit() -> None:
    """Whether heads are shared out among threads, and where a request stands in the batch."""
    g = torch.Generator().manual_seed(1)
    lengths = [(1, 2000 + 17 * i) for i in range(7)] + [(5, 900)]
    paged = fill(g, lengths, (9, 3), (64, 64), 16, torch.bfloat16)

    def run(threads: int) -> torch.Tensor:
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            out, lse = paged_attention(
                *(paged.q, paged.k_pages, paged.v_pages, paged.batch),
                causal=True,
                return_lse=True,
                kernel="cpu",
            )
        finally:
            torch.set_num_threads(before)
        return torch.cat([out.float().flatten(), lse.flatten()])

    expected = run(1)
    for threads in (2, 3, 16):
        assert torch.equal(run(threads), expected)


@pytest.mark.parametrize("steepness", [-1.0, 0.02, 1.0])
def test_scores_far_apart_and_growing_along_the_keys(steepness: float) -> None:
    """Rows take new largest scores again and again, or the first keys outweigh all others."""
    g = torch.Generator().manual_seed(2)
    paged = fill(g, [(1, 1000), (1, 300), (2, 640)], (9, 3), (64, 64), 16, torch.bfloat16)
    for i, k in enumerate(paged.k):
        position = torch.arange(k.shape[0])
        k.copy_(k.abs() * (steepness * position / 10 - 20)[:, None, None])
        pages = paged.batch.page_table[i].long()[position // 16]
        paged.k_pages[pages, :, position % 16] = k
    paged.q.abs_()
    check(paged, torch.bfloat16, "cpu", causal=True)
