"""Sharing out the keys of a dense attention call over CTAs, where whole tiles would come out uneven.

100 tiles on 132 CTAs leave 32 without work, and 140 take as long as 264. All tiles end to end are a line
of blocks of keys, which is cut into shares that cost about the same; what a CTA has of a tile is an item.
A tile in several items is put together by whoever finishes its last (kernels/gluon/attention/shares.py).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heapreplace
from itertools import accumulate, islice, pairwise
from typing import NamedTuple

WORDS = 8  # of an item in the table
Tile = tuple[int, int]  # first block of keys, number of blocks


@dataclass(frozen=True)
class Costs:
    """Clocks of a CTA while all of them are busy."""

    block: int  # of keys
    item: int  # what an item takes besides: its first scores, its last product, its output
    part: int  # what a part takes beyond an item: its output is wider, and is read again
    join: int  # at the very end: the last parts are read by whoever puts their tile together
    fewest: int = 2  # blocks of a part, so that it is worth an item


class Item(NamedTuple):
    tile: int
    first: int  # block of keys
    blocks: int


@dataclass(frozen=True)
class Shares:
    """items: of each CTA, in order; clocks: of the costliest share, and of joining parts after it."""

    items: list[list[Item]]
    clocks: int

    def table(self) -> tuple[list[int], int]:
        """The items as words, and how many parts there are.

        Words: tile, first block, blocks, part (-1: a whole tile), the tile's first part (-1), its
        parts, its number among tiles in parts, place of the CTA's next item (the number of places:
        none). CTA c's first item lies at place c.
        """
        sizes: dict[int, int] = {}
        for items in self.items:
            for tile, _, _ in items:
                sizes[tile] = sizes.get(tile, 0) + 1
        first_part: dict[int, int] = {}
        parts = 0
        for tile, size in sizes.items():
            if size > 1:
                first_part[tile] = parts
                parts += size
        numbers = dict(zip(first_part, range(len(first_part)), strict=True))
        places = sum(sizes.values())
        later = len(self.items)  # the next place that is not a CTA's first
        firsts: list[int] = []
        others: list[int] = []
        for items in self.items:
            words = firsts
            last = len(items) - 1
            for i, (tile, first, blocks) in enumerate(items):
                following = later if i < last else places
                later += i < last
                size = sizes[tile]
                if size == 1:
                    words += (tile, first, blocks, -1, -1, 1, 0, following)
                else:  # a tile's items come last keys first, its parts are counted from the first on
                    at = first_part[tile]
                    rest = sizes[-1 - tile] = sizes.get(-1 - tile, size) - 1
                    words += (tile, first, blocks, at + rest, at, size, numbers[tile], following)
                words = others
        return firsts + others, parts


def blocks_of_keys(
    row0: int, rows: int, q_len: int, kv_len: int, left: int, right: int, block: int
) -> Tile:
    """First block of keys that rows row0 .. row0 + rows - 1 of q_len see, and how many, at least 1.

    left, right: of the window, -1 for an unbounded side. As kernels/gluon/tile/mask.py: key_range.
    """
    offset = kv_len - q_len
    low, high = 0, kv_len
    if right >= 0:
        high = max(min(kv_len, min(row0 + rows, q_len) + offset + right), 0)
    if left >= 0:
        low = max(row0 + offset - left, 0)
    first = low // block
    return first, max(-(-high // block) - first, 1)


def share_out(tiles: Sequence[Tile], heads: int, ctas: int, costs: Costs) -> Shares:
    """tiles: of a head, in the order of the line; all heads have the same. The tiles of a call are
    counted head by head."""
    shares = _cut(tiles, heads, ctas, costs)
    total = len(tiles) * heads
    if total < ctas and ctas % total:
        # Each tile in equally many parts: none of them is two CTAs' end and beginning.
        even = _cut(tiles, heads, ctas // total * total, costs)
        shares = min(shares, even, key=lambda shares: shares.clocks)
    return shares


def _cut(tiles: Sequence[Tile], heads: int, ctas: int, costs: Costs) -> Shares:
    counts = [count for _, count in tiles]
    starts = list(accumulate((costs.item + n * costs.block for n in counts), initial=0))
    of_head = starts.pop()
    total = len(tiles) * heads
    cuts = [(0, 0)]  # tile, blocks of it that lie before the cut
    for cta in range(1, ctas):
        head, at = divmod(cta * of_head * heads // ctas, of_head)
        j = bisect_right(starts, at) - 1
        # What an item takes besides lies half before its keys and half behind them.
        before = (at - starts[j] - costs.item // 2 + costs.block // 2) // costs.block
        tile = head * len(tiles) + j
        if before < costs.fewest:
            before = 0
        elif counts[j] - before < costs.fewest:
            tile, before = tile + 1, 0
        last, end = cuts[-1]
        near = tile == last and before - end < costs.fewest
        if (tile, before) > cuts[-1] and tile < total and not near:
            cuts.append((tile, before))
    cuts.append((total, 0))
    shares: list[list[Item]] = []
    most = 0
    for (tile, begin), (last, end) in pairwise(cuts):
        share: list[Item] = []
        clocks = 0
        while (tile, begin) < (last, end):
            first, count = tiles[tile % len(tiles)]
            stop = end if tile == last else count
            # Keys are taken from the last on, as the kernel does.
            share.append(Item(tile, first + count - stop, stop - begin))
            clocks += costs.item + (stop - begin) * costs.block
            if stop - begin < count:
                clocks += costs.part
            tile, begin = tile + 1, 0
        shares.append(share)
        most = max(most, clocks)
    return Shares(shares, most + costs.join)


def least_clocks(tiles: Sequence[Tile], heads: int, ctas: int, costs: Costs) -> int:
    """Clocks that no way to cut them comes below: every CTA has at least an item."""
    blocks = sum(count for _, count in tiles) * heads
    return (blocks * costs.block + max(len(tiles) * heads, ctas) * costs.item) // ctas + costs.join


def whole_tiles(tiles: Sequence[Tile], heads: int, ctas: int, costs: Costs, together: int) -> int:
    """Clocks, about, of whole tiles that CTAs take in turn, the longest of `together` heads first."""
    counts = sorted((count for _, count in tiles), reverse=True)
    total = len(tiles) * heads
    if counts[0] == counts[-1]:
        return -(-total // ctas) * (counts[0] * costs.block + costs.item)
    sections = (min(together, heads - first) for first in range(0, heads, together))
    in_turn = (
        count * costs.block + costs.item
        for width in sections
        for count in counts
        for _ in range(width)
    )
    # When a CTA is free, and what it takes then: it draws its next tile when it begins with one.
    held = [(0, cta, clocks) for cta, clocks in enumerate(islice(in_turn, ctas))]
    latest = 0
    while held:
        now, cta, clocks = held[0]
        latest = max(latest, now + clocks)
        following = next(in_turn, None)
        if following is None:
            heappop(held)
        else:
            heapreplace(held, (now + clocks, cta, following))
    return latest
