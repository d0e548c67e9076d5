"""Sharing out the keys of a dense attention call over CTAs, where whole tiles would come out uneven.

100 tiles on 132 CTAs leave 32 without work, and 140 take as long as 264. All tiles end to end are a line
of blocks of keys, which is cut into shares that cost about the same; what a CTA has of a tile is an item.
A tile in several items is put together by whoever finishes its last (kernels/gluon/attention/shares.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

WORDS = 8  # of an item in the table


@dataclass(frozen=True)
class Costs:
    """Clocks of a CTA while all of them are busy."""

    block: int  # of keys
    item: int  # what an item takes besides: its first scores, its last product, its output
    part: int  # what a part takes beyond an item: its output is wider, and is read again
    fewest: int = 2  # blocks of a part, so that it is worth an item


class Item(NamedTuple):
    tile: int
    first: int  # block of keys
    blocks: int


@dataclass(frozen=True)
class Shares:
    """items: of each CTA, in order; clocks: of the costliest share."""

    items: list[list[Item]]
    clocks: int

    def table(self) -> tuple[list[int], int]:
        """The items as words, and how many parts there are.

        Words: tile, first block, blocks, part (-1: a whole tile), the tile's first part (-1), its
        parts, its number among tiles in parts, place of the CTA's next item (the number of places:
        none). CTA c's first item lies at place c.
        """
        items_of: dict[int, list[Item]] = {}
        for item in (item for items in self.items for item in items):
            items_of.setdefault(item.tile, []).append(item)
        place_of_part: dict[Item, tuple[int, int, int, int]] = {}
        parts = cut = 0
        for of_tile in items_of.values():
            if len(of_tile) > 1:
                for i, item in enumerate(sorted(of_tile, key=lambda item: item.first)):
                    place_of_part[item] = (parts + i, parts, len(of_tile), cut)
                parts += len(of_tile)
                cut += 1
        places = sum(len(items) for items in self.items)
        later = len(self.items)  # the next place that is not a CTA's first
        rows: list[list[int]] = [[] for _ in range(places)]
        for cta, items in enumerate(self.items):
            place = cta
            for i, item in enumerate(items):
                following = later if i + 1 < len(items) else places
                rows[place] = [*item, *place_of_part.get(item, (-1, -1, 1, 0)), following]
                if i + 1 < len(items):
                    place, later = later, later + 1
        return [word for row in rows for word in row], parts


def blocks_of_keys(
    row0: int, rows: int, q_len: int, kv_len: int, left: int, right: int, block: int
) -> tuple[int, int]:
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


def share_out(tiles: Sequence[tuple[int, int]], ctas: int, costs: Costs) -> Shares:
    """tiles: first block and number of blocks of each, in the order of the line.

    The costliest share is the cheapest that so many CTAs allow, up to one block.
    """
    smallest = costs.item + costs.part + costs.fewest * costs.block
    limit = max(least_clocks(tiles, ctas, costs), smallest)
    while True:
        items = _cut(tiles, ctas, limit, costs)
        if items is not None:
            return Shares(items, limit)
        limit += costs.block


def _cut(
    tiles: Sequence[tuple[int, int]], ctas: int, limit: int, costs: Costs
) -> list[list[Item]] | None:
    """Shares of at most `limit` clocks; None: they need more CTAs."""
    shares: list[list[Item]] = []
    share: list[Item] = []
    left = limit  # clocks of this share that are not used
    for tile, (first, count) in enumerate(tiles):
        end = first + count  # keys are taken from the last on, as the kernel does
        while end > first:
            rest = end - first
            whole = rest == count
            cost = rest * costs.block + costs.item + (0 if whole else costs.part)
            take = rest
            if cost > left:
                take = (left - costs.item - costs.part) // costs.block
                if rest - take < costs.fewest:
                    take = rest - costs.fewest
                if take < costs.fewest:
                    if not share:
                        return None  # the limit is below what a tile that cannot be cut takes
                    shares.append(share)
                    share, left = [], limit
                    continue
                cost = take * costs.block + costs.item + costs.part
            share.append(Item(tile, end - take, take))
            end -= take
            left -= cost
        if len(shares) >= ctas:
            return None
    if share:
        shares.append(share)
    return shares if len(shares) <= ctas else None


def least_clocks(tiles: Sequence[tuple[int, int]], ctas: int, costs: Costs) -> int:
    """Clocks that no way to cut them comes below: about an item a CTA more than there are tiles."""
    blocks = sum(count for _, count in tiles)
    return (blocks * costs.block + max(len(tiles), ctas) * costs.item) // ctas


def whole_tiles(tiles: Sequence[tuple[int, int]], ctas: int, costs: Costs) -> int:
    """Clocks, about, of whole tiles that CTAs take in turn, the longest first."""
    counts = [count for _, count in tiles]
    total = sum(counts) * costs.block + len(tiles) * costs.item
    longest = max(counts) * costs.block + costs.item
    if min(counts) == max(counts):
        return -(-len(tiles) // ctas) * longest
    return max(longest, -(-total // ctas))
