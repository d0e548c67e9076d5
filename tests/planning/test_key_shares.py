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

TILES = st.lists(st.tuples(st.integers(0, 5), st.integers(1, 40)), min_size=1, max_size=30)
HEADS = st.integers(1, 5)
COSTS = st.builds(
    Costs,
    st.integers(1, 3000),
    st.integers(0, 9000),
    st.integers(0, 4000),
    st.integers(0, 9000),
    st.integers(1, 4),
)


def clocks(items: list[Item], tiles: list[tuple[int, int]], costs: Costs) -> int:
    return sum(
        item.blocks * costs.block
        + costs.item
        + (costs.part if item[1:] != tiles[item.tile % len(tiles)] else 0)
        for item in items
    )


@given(tiles=TILES, heads=HEADS, ctas=st.integers(1, 40), costs=COSTS)
def test_every_block_is_in_one_share(
    tiles: list[tuple[int, int]], heads: int, ctas: int, costs: Costs
) -> None:
    shares = share_out(tiles, heads, ctas, costs)
    assert 1 <= len(shares.items) <= ctas
    assert all(shares.items)
    blocks = sorted(
        (item.tile, block)
        for items in shares.items
        for item in items
        for block in range(item.first, item.first + item.blocks)
    )
    assert blocks == [
        (t, f + i) for t, (f, count) in enumerate(tiles * heads) for i in range(count)
    ]
    for items in shares.items:
        assert all(i.blocks >= min(costs.fewest, tiles[i.tile % len(tiles)][1]) for i in items)
    assert shares.clocks == costs.join + max(clocks(i, tiles, costs) for i in shares.items)
    assert shares.clocks * ctas >= sum(count for _, count in tiles) * heads * costs.block


@given(tiles=TILES, heads=HEADS, ctas=st.integers(1, 40), costs=COSTS)
def test_shares_cost_about_the_same(
    tiles: list[tuple[int, int]], heads: int, ctas: int, costs: Costs
) -> None:
    shares = share_out(tiles, heads, ctas, costs)
    mean = least_clocks(tiles, heads, ctas, costs)
    # Both ends of a share move by less than `fewest` blocks and a half; two parts cost more.
    slack = (2 * costs.fewest + 1) * costs.block + 2 * (costs.item + costs.part)
    assert shares.clocks <= mean + slack


@given(tiles=TILES, heads=HEADS, ctas=st.integers(1, 40), costs=COSTS)
def test_the_table_chains_the_items_of_a_cta(
    tiles: list[tuple[int, int]], heads: int, ctas: int, costs: Costs
) -> None:
    shares = share_out(tiles, heads, ctas, costs)
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
    for tile, (first, count) in enumerate(tiles * heads):
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
    costs = Costs(block=2700, item=4000, part=2000, join=8000)
    whole = whole_tiles([(0, 32)] * 28, 5, 132, costs, 5)
    assert whole == 2 * (32 * 2700 + 4000)
    assert share_out([(0, 32)] * 28, 5, 132, costs).clocks < 0.65 * whole


def test_few_tiles_are_in_equal_parts() -> None:
    shares = share_out([(0, 8)] * 8, 8, 132, Costs(block=2700, item=4000, part=2000, join=8000))
    assert [len(items) for items in shares.items] == [1] * 128
    assert {items[0].blocks for items in shares.items} == {4}


@pytest.mark.parametrize("causal", [False, True])
def test_the_end_of_each_share_is_the_beginning_of_the_next(causal: bool) -> None:
    right = 0 if causal else -1
    tiles = [blocks_of_keys(row, 128, 2048, 2048, -1, right, 128) for row in range(0, 2048, 128)]
    shares = share_out(tiles, 2, 5, Costs(1, 1, 1, 1))
    line = [item for items in shares.items for item in items]
    for before, after in pairwise(line):
        if before.tile == after.tile:
            assert after.first + after.blocks == before.first
        else:
            assert before.first == tiles[before.tile % 16][0]
            assert after.tile == before.tile + 1


def test_a_second_tile_is_taken_before_the_first_has_ended() -> None:
    tiles = [(0, count) for count in range(32, 0, -1)]
    costs = Costs(block=1, item=0, part=0, join=0)
    assert whole_tiles(tiles, 4, 132, costs, 4) == 32
    assert whole_tiles(tiles, 8, 132, costs, 8) == 32 + 16
    assert whole_tiles(tiles, 8, 132, costs, 4) == 32 + 31  # 128 tiles of four heads come first
    even = 32 * 33 * 80 // 2 // 132
    assert even <= whole_tiles(tiles, 80, 132, costs, 80) < even + 3


def test_heads_that_come_last_leave_long_tiles_for_the_end() -> None:
    """4,096^2 causal with 16 heads took an H200 138 us where its work comes to 115."""
    tiles = [(0, count) for count in range(32, 0, -1)]
    costs = Costs(block=1365, item=6000, part=3000, join=8000)
    even = (32 * 33 // 2 * costs.block + 32 * costs.item) * 16 // 132
    together = whole_tiles(tiles, 16, 132, costs, 16)
    assert even <= together < 1.05 * even
    assert whole_tiles(tiles, 16, 132, costs, 4) > 1.15 * even
