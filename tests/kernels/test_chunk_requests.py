"""Requests cut at chunk borders: every query once, in one chunk, at its own position."""

from __future__ import annotations

import itertools

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rooftile.kernels.chunk_requests import cut_at_chunks


@settings(max_examples=200)
@given(
    lengths=st.lists(
        st.tuples(st.sampled_from([0, 1, 2, 5, 20]), st.sampled_from([0, 1, 4, 8, 9, 30])),
        min_size=1,
        max_size=5,
    ),
    chunk_len=st.sampled_from([1, 2, 3, 8, 100]),
    padding=st.integers(0, 3),
)
def test_pieces(lengths: list[tuple[int, int]], chunk_len: int, padding: int) -> None:
    q_lens, kv_lens = ([pair[i] for pair in lengths] for i in range(2))
    tokens = sum(q_lens)
    cu, lens, table = cut_at_chunks(
        torch.tensor([0, *q_lens]).cumsum(0).int(),
        torch.tensor(kv_lens, dtype=torch.int32),
        torch.arange(len(lengths)).int()[:, None].expand(-1, 2),
        tokens + padding,
        chunk_len,
    )
    assert {x.dtype for x in (cu, lens, table)} == {torch.int32}
    assert (
        len(lens) == len(table) == len(cu) - 1 == 2 * len(lengths) + (tokens + padding) // chunk_len
    )
    assert int(cu[-1]) == tokens
    found = []
    for (begin, end), kv_len, request in zip(
        itertools.pairwise(cu.tolist()), lens.tolist(), table[:, 0].tolist(), strict=True
    ):
        assert begin <= end
        positions = range(kv_len - (end - begin), kv_len)
        found += [(request, at) for at in positions]
        assert {at // chunk_len for at in positions if at >= 0} <= {(kv_len - 1) // chunk_len}
    assert found == [
        (request, kv - q + i) for request, (q, kv) in enumerate(lengths) for i in range(q)
    ]
