"""Calls whose tiles are cut along their keys: which ones, and what their kernel reads (shares.py)."""

from __future__ import annotations

import torch
from torch import Tensor

from rooftile.kernels.gluon.attention.config import (
    ALONE,
    BEYOND_CACHE,
    CACHED_BYTES,
    CUT_BELOW,
    MOST_TILES_CUT,
    Config,
)
from rooftile.kernels.gluon.counter import MOST_COUNTERS
from rooftile.planning.key_shares import (
    WORDS,
    Shares,
    blocks_of_keys,
    least_clocks,
    share_out,
    whole_tiles,
)


class Cut:
    """The items of a kind of call, and where its parts go."""

    def __init__(self, shares: Shares, config: Config, device: torch.device) -> None:
        self.ctas = len(shares.items)
        self._words, num_parts = shares.table()
        self._device = device
        self._items: Tensor | None = None  # once somebody has asked
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

    def items(self) -> Tensor | None:  # [places, WORDS] int32
        """The table on the device; None where it would have to be copied while a graph is captured."""
        if self._items is None:
            if self._device.type == "cuda":
                if torch.cuda.is_current_stream_capturing():
                    return None
                self._items = torch.tensor(self._words, dtype=torch.int32).to(self._device)
                torch.cuda.current_stream(self._device).synchronize()  # other streams use it too
            else:
                self._items = torch.tensor(self._words, dtype=torch.int32)
        return self._items

    def new_parts(self) -> Tensor:  # [parts, tile_rows, 1 + dim] float32
        return torch.empty_like(self._like_parts)


def cut_of(
    config: Config,
    device: torch.device,
    heads: int,  # of all sequences together
    q_len: int,
    kv_len: int,
    left: int,
    right: int,
    places: int,  # CTAs at a time
    last_first: bool,  # the kernel counts a sequence's last tile first
    kv_bytes: int,  # of all keys and values
    heads_together: int = 0,  # whose whole tiles are taken before those of others, 0: of all
) -> Cut | None:
    """How sequences of these lengths are cut, or None where whole tiles take about as long."""
    rows = config.tile_rows
    if (
        -(-q_len // rows) * heads > MOST_TILES_CUT * places
        or places * config.groups > MOST_COUNTERS
    ):
        return None
    tiles = [
        blocks_of_keys(row0, rows, q_len, kv_len, left, right, config.block)
        for row0 in range(0, q_len, rows)
    ]
    if last_first:
        tiles.reverse()
    limit = CUT_BELOW * whole_tiles(tiles, heads, places, config.costs, heads_together or heads)
    if kv_bytes > CACHED_BYTES:
        limit *= BEYOND_CACHE
    if len(tiles) * heads * config.ctas <= places and config.ctas > 1:
        limit *= ALONE
    if least_clocks(tiles, heads, places, config.costs) > limit:
        return None
    shares = share_out(tiles, heads, places, config.costs)
    return Cut(shares, config, device) if shares.clocks <= limit else None
