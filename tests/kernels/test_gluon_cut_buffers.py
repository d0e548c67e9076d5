"""What cut calls read and write beside their tensors fits into what the host allocates, at real sizes."""

from __future__ import annotations

from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rooftile.planning.key_shares import WORDS
from tests.support.gluon_sim import load_simulated

CONFIG, CUT, COUNTER = load_simulated(
    "rooftile.kernels.gluon.attention.config",
    "rooftile.kernels.gluon.attention.cut",
    "rooftile.kernels.gluon.counter",
)
PROCESSORS = 132


@settings(max_examples=300)
@given(
    dims=st.sampled_from([(64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256)]),
    heads=st.sampled_from([1, 2, 3, 4, 6, 8, 9, 12, 16, 20, 32, 40, 64, 128]),
    q_len=st.integers(1, 9000),
    kv_len=st.integers(1, 70000),
    window=st.sampled_from([(-1, -1), (-1, 0), (700, 0), (700, -1), (0, 0), (100_000, 3)]),
    below=st.sampled_from([0.9, 100.0]),
    ragged=st.booleans(),
)
def test_items_parts_and_counters(
    dims: tuple[int, int], heads: int, q_len: int, kv_len: int, window: tuple[int, int],
    below: float, ragged: bool,
) -> None:  # fmt: skip
    left, right = window
    config = CONFIG.config_of(*dims, q_len, right)
    places, tiles = PROCESSORS * config.ctas, -(-q_len // config.tile_rows)
    before, CONFIG.CUT_BELOW = CONFIG.CUT_BELOW, below
    try:
        cut = CUT.cut_of(
            *(config, torch.device("cpu"), heads, q_len, kv_len, left, right, places),
            *(ragged or right >= 0, 0),
        )
    finally:
        CONFIG.CUT_BELOW = before
    if cut is None:
        return
    if ragged and right >= 0:
        cut.number_across_heads(tiles, heads)
    items, parts = cut.items().view(-1, WORDS), cut._like_parts.shape
    assert 1 <= cut.ctas <= places
    assert cut.ctas <= cut.places == len(items)
    tile, first, blocks, part, first_part, count, number, following = items.T
    assert bool(((tile >= 0) & (tile < tiles * heads)).all())
    last = -(-kv_len // config.block)
    assert bool(((first >= 0) & (blocks >= 1)).all())
    # A tile whose rows see nothing has a block all the same, which the copy engine fills with zeros.
    assert bool(((first + blocks <= last) | (blocks == 1)).all())
    in_parts = part >= 0
    assert bool(((first_part + count <= parts[0]) & (part < first_part + count))[in_parts].all())
    assert bool((first_part >= 0)[in_parts].all())
    assert bool((part >= first_part)[in_parts].all())
    assert bool((number * config.groups + config.groups <= COUNTER.MOST_COUNTERS).all())
    assert bool(((following >= cut.ctas) & (following <= cut.places)).all())
    followed = following[following < cut.places]
    assert len(set(followed.tolist())) == len(followed) == cut.places - cut.ctas
    # As shares.py: rows_of_part lays lse and output of a part out, all its rows and columns.
    assert parts[1:] == (config.tile_rows, 1 + config.dim)
    assert cut._like_parts.numel() < 2**31


def test_tables_outlive_their_kind_of_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph reads the table whenever it is replayed, and so does a stream that has yet to come to it."""
    stream, capturing = 5, False
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: stream, raising=False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"stream {stream}")
    monkeypatch.setattr(CUT, "_in_graphs", [])
    table = Mock()
    cut = CUT.Cut(
        CONFIG.share_out([(0, 9)], 1, 2, CONFIG.CONFIGS[128].costs),
        CONFIG.CONFIGS[128],
        torch.device("cpu"),
    )
    cut._device, cut._items, cut._stream = SimpleNamespace(type="cuda", index=0), table, 5
    assert cut.items() is table
    table.record_stream.assert_not_called()
    stream = 6
    assert cut.items() is table
    table.record_stream.assert_called_once_with("stream 6")
    capturing = True
    assert cut.items() is cut.items() is table
    assert CUT._in_graphs == [table]
    cut._items = None
    assert cut.items() is None
