"""Sharing out the keys of a dense call: everything once, nobody over the limit, and the kernel's words."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rooftile.planning.key_shares import (
    WORDS,
    Costs,
    Item,
    blocks_of_keys,
    least_clocks,
    share_out,
    whole_tiles,
)

TILES = st.lists(st.tuples(st.integers(0, 5), st.integers(1, 40)), min_size=1, max_size=60)
COSTS = st.builds(
    Costs, st.integers(1, 3000), st.integers(0, 9000), st.integers(0, 4000), st.integers(1, 4)
)


def clocks(items: list[Item], tiles: list[tuple[int, int]], costs: Costs) -> int:
    return sum(
        item.blocks * costs.block + costs.item + (costs.part if item[1:] != tiles[item.tile] else 0)
        for item in items
    )


@given(tiles=TILES, ctas=st.integers(1, 20), costs=COSTS)
def test_every_block_is_in_one_share(tiles: list[tuple[int, int]], ctas: int, costs: Costs) -> None:
    shares = share_out(tiles, ctas, costs)
    assert 1 <= len(shares.items) <= ctas
    assert all(shares.items)
    blocks = sorted(
        (item.tile, block)
        for items in shares.items
        for item in items
        for block in range(item.first, item.first + item.blocks)
    )
    assert blocks == [(t, f + i) for t, (f, count) in enumerate(tiles) for i in range(count)]
    for items in shares.items:
        assert clocks(items, tiles, costs) <= shares.clocks
        assert all(i.blocks >= min(costs.fewest, tiles[i.tile][1]) for i in items)
    assert shares.clocks >= least_clocks(tiles, ctas, costs)


@given(tiles=TILES, ctas=st.integers(1, 20), costs=COSTS)
def test_the_table_chains_the_items_of_a_cta(
    tiles: list[tuple[int, int]], ctas: int, costs: Costs
) -> None:
    shares = share_out(tiles, ctas, costs)
    words, num_parts = shares.table()
    rows = [words[at : at + WORDS] for at in range(0, len(words), WORDS)]
    for cta, items in enumerate(shares.items):
        place = cta
        for item in items:
            assert tuple(rows[place][:3]) == item
            place = rows[place][7]
        assert place == len(rows)
    parts = sorted(row[3] for row in rows if row[3] >= 0)
    assert parts == list(range(num_parts))
    for tile, (first, count) in enumerate(tiles):
        mine = sorted((row for row in rows if row[0] == tile), key=lambda row: row[1])
        if len(mine) == 1:
            assert mine[0][1:6] == [first, count, -1, -1, 1]
            continue
        assert [row[3] - row[4] for row in mine] == list(range(len(mine)))  # first keys first
        assert {row[5] for row in mine} == {len(mine)}
        assert len({row[6] for row in mine}) == 1
    cut = sorted({row[6] for row in rows if row[3] >= 0})
    assert cut == list(range(len(cut)))


@given(
    lengths=st.tuples(st.integers(1, 300), st.integers(1, 300)),
    window=st.tuples(st.integers(-1, 90), st.integers(-1, 90)),
    rows=st.sampled_from([64, 128, 192]),
    block=st.sampled_from([64, 128]),
)
def test_blocks_hold_all_keys_that_a_tile_sees(
    lengths: tuple[int, int], window: tuple[int, int], rows: int, block: int
) -> None:
    (q_len, kv_len), (left, right) = lengths, window
    offset = kv_len - q_len
    for row0 in range(0, q_len, rows):
        seen = [
            j
            for i in range(row0, min(row0 + rows, q_len))
            for j in range(kv_len)
            if (left < 0 or j >= i + offset - left) and (right < 0 or j <= i + offset + right)
        ]
        first, count = blocks_of_keys(row0, rows, q_len, kv_len, left, right, block)
        assert count >= 1
        if seen:
            assert (first, count) == (
                min(seen) // block,
                max(seen) // block - min(seen) // block + 1,
            )


def test_tiles_a_little_over_a_wave_take_a_little_over_its_time() -> None:
    costs = Costs(block=2700, item=4000, part=2000)
    tiles = [(0, 32)] * 140
    assert whole_tiles(tiles, 132, costs) == 2 * (32 * 2700 + 4000)
    assert share_out(tiles, 132, costs).clocks < 0.6 * whole_tiles(tiles, 132, costs)


@pytest.mark.parametrize("causal", [False, True])
def test_the_end_of_each_share_is_the_beginning_of_the_next(causal: bool) -> None:
    right = 0 if causal else -1
    tiles = [blocks_of_keys(row, 128, 2048, 2048, -1, right, 128) for row in range(0, 2048, 128)]
    shares = share_out(tiles, 5, Costs(1, 1, 1))
    line = [item for items in shares.items for item in items]
    for before, after in pairwise(line):
        if before.tile == after.tile:
            assert after.first + after.blocks == before.first
        else:
            assert before.first == tiles[before.tile][0]
            assert after.tile == before.tile + 1
