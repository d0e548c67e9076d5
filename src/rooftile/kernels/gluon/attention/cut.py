"""Calls whose tiles are cut along their keys: which ones, and what their kernel reads (shares.py)."""

from __future__ import annotations

import torch
from torch import Tensor

from rooftile.kernels.gluon.attention.config import Config, shares_of
from rooftile.kernels.gluon.counter import MOST_COUNTERS
from rooftile.planning.key_shares import WORDS, Shares

_in_graphs: list[Tensor] = []  # tables that CUDA graphs read, which may be replayed at any time


class Cut:
    """The items of a kind of call, and where its parts go."""

    def __init__(self, shares: Shares, config: Config, device: torch.device) -> None:
        self.ctas = len(shares.items)
        self._words, num_parts = shares.table()
        self._device = device
        self._items: Tensor | None = None  # once somebody has asked
        self._stream = 0  # that it was made on
        self._in_graph = False
        one = torch.empty(1, dtype=torch.float32, device=device)
        self._like_parts = one.expand(num_parts, config.tile_rows, 1 + config.dim)

    @property
    def places(self) -> int:
        return len(self._words) // WORDS

    def number_across_heads(self, tiles: int, heads: int) -> None:
        """Counts the n-th tiles of all heads before those that follow; not after `items`."""
        for at in range(0, len(self._words), WORDS):
            head, n = divmod(self._words[at], tiles)
            self._words[at] = n * heads + head

    def items(self) -> Tensor | None:  # [places * WORDS] int32
        """The table on the device; None where it would have to be copied while a graph is captured."""
        if self._device.type != "cuda":
            if self._items is None:
                self._items = torch.tensor(self._words, dtype=torch.int32)
            return self._items
        capturing = torch.cuda.is_current_stream_capturing()
        stream = torch._C._cuda_getCurrentRawStream(self._device.index)
        if self._items is None:
            if capturing:
                return None
            self._items = torch.tensor(self._words, dtype=torch.int32).to(self._device)
            self._stream = stream
            torch.cuda.current_stream(self._device).synchronize()  # other streams use it too
        elif capturing and not self._in_graph:  # which outlives what is known of this kind of call
            _in_graphs.append(self._items)
            self._in_graph = True
        elif stream != self._stream and not capturing:
            self._items.record_stream(torch.cuda.current_stream(self._device))
        return self._items

    def new_parts(self) -> Tensor:  # [parts, tile_rows, 1 + dim] float32
        return torch.empty_like(self._like_parts)


def cut_of(
    config: Config,
    device: torch.device,
    heads: int,
    q_len: int,
    kv_len: int,
    left: int,
    right: int,
    places: int,
    last_first: bool,
    kv_bytes: int,
    heads_together: int = 0,
) -> Cut | None:
    """As config.py: shares_of."""
    if places * config.groups > MOST_COUNTERS:
        return None
    lengths = (q_len, kv_len, left, right)
    shares = shares_of(config, heads, *lengths, places, last_first, kv_bytes, heads_together)
    return Cut(shares, config, device) if shares else None
