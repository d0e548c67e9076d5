"""The split of paged attention: complete, even, bounded, and what users of the buffer rely on."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import pytest
from hypothesis import given, settings

from rooftile.planning.split_kv import HEADER_WORDS, Item, Layout, Merge, Plan, Shared, plan
from rooftile.types import SplitSpec
from tests.planning.split_batches import Lengths, Prefixes, batches, sharing_batches

MANY = settings(max_examples=100)
SPEC = SplitSpec(
    batch=64, tokens=64, max_q_len=1, max_kv_len=32768, group_size=4, num_kv_heads=8, left=-1,
    right=0, kv_tile=64, tile_rows=(16,), tile_cost=(1600,), item_cost=1500, num_ctas=132,
    min_piece=2,
)  # fmt: skip


def planned(spec: SplitSpec, lengths: Lengths) -> Plan:
    return plan(spec, [q for q, _ in lengths], [kv for _, kv in lengths])


def items_of(found: Plan) -> list[Item]:
    return [item for cta in range(len(found.ctas)) for item in found.of_cta(cta)]


def share(spec: SplitSpec, items: list[Item]) -> int:
    costs = dict(zip(spec.tile_rows, spec.tile_cost, strict=True))
    return sum(spec.item_cost + (i.kv_end - i.kv_begin) * costs[i.tile_rows] for i in items)


@MANY
@given(batch=batches())
def test_every_query_and_visible_key_are_covered_once(batch: tuple[SplitSpec, Lengths]) -> None:
    spec, lengths = batch
    covered = defaultdict(list)  # (request, head, packed row) -> KV tiles
    for item in items_of(planned(spec, lengths)):
        assert (item.q_len, item.kv_len) == lengths[item.request]
        assert item.q_begin == sum(q for q, _ in lengths[: item.request])
        assert 0 < item.row_end - item.row_begin <= item.tile_rows
        assert item.tile_rows in spec.tile_rows
        for row in range(item.row_begin, item.row_end):
            covered[item.request, item.kv_head, row] += range(item.kv_begin, item.kv_end)
    for request, (q_len, kv_len) in enumerate(lengths):
        tiles = -(-kv_len // spec.kv_tile)
        for head in range(spec.num_kv_heads):
            for row in range(q_len * spec.group_size):
                got = covered.pop((request, head, row))  # every row belongs to an item
                assert got == sorted(set(got))
                assert not got or got[-1] < tiles
                position = kv_len - q_len + row // spec.group_size
                first = max(0, position - spec.left) if spec.left >= 0 else 0
                end = min(kv_len, position + spec.right + 1) if spec.right >= 0 else kv_len
                if first < end:
                    needed = range(first // spec.kv_tile, -(-end // spec.kv_tile))
                    assert set(needed) <= set(got)
    assert not covered


@MANY
@given(batch=batches())
def test_every_cta_may_read_an_item_before_it_knows_whether_there_is_one(
    batch: tuple[SplitSpec, Lengths],
) -> None:
    """kernels/gluon/paged/work.py: first_item, of which there may be as many as shares."""
    spec, _ = batch
    layout = Layout(spec)
    assert layout.ctas + 2 * spec.num_ctas <= layout.merges
    assert layout.items + len(Item._fields) * spec.num_ctas <= layout.size


@MANY
@given(batch=batches())
def test_tiles_wholly_outside_the_window_are_not_planned(batch: tuple[SplitSpec, Lengths]) -> None:
    spec, lengths = batch
    for item in items_of(planned(spec, lengths)):
        positions = [
            item.kv_len - item.q_len + row // spec.group_size
            for row in (item.row_begin, item.row_end - 1)
        ]
        for tile in range(item.kv_begin, item.kv_end):
            if spec.left >= 0:
                assert (tile + 1) * spec.kv_tile > positions[0] - spec.left
            if spec.right >= 0:
                assert tile * spec.kv_tile <= positions[1] + spec.right


@MANY
@given(batch=batches())
def test_shares_are_even(batch: tuple[SplitSpec, Lengths]) -> None:
    """Two cuts move by at most an item each, and beginning anew costs a share an item more."""
    spec, lengths = batch
    found = planned(spec, lengths)
    items = items_of(found)
    if not items:
        return
    most_cut = spec.item_cost + 2 * spec.min_piece * max(spec.tile_cost)
    if spec.piece:
        most_cut = spec.item_cost + spec.piece * max(spec.tile_cost)
    mean = share(spec, items) / found.ctas_used
    for cta in range(len(found.ctas)):
        cost = share(spec, found.of_cta(cta))
        assert cost <= mean + most_cut + spec.item_cost
        if cta >= found.ctas_used:
            assert cost == 0


@MANY
@given(batch=batches())
def test_parts_fill_the_partial_buffer_once_and_merges_name_them_in_order(
    batch: tuple[SplitSpec, Lengths],
) -> None:
    spec, lengths = batch
    found, layout = planned(spec, lengths), Layout(spec)
    parts = defaultdict(list)
    for item in items_of(found):
        assert (item.partial_row < 0) == (item.merge < 0)
        if item.merge >= 0:
            parts[item.merge].append(item)
    assert sorted(parts) == list(range(len(found.merges)))
    rows = 0
    for index, merge in enumerate(found.merges):
        assert merge.parts == len(parts[index]) > 1
        assert merge.row_stride >= merge.row_end - merge.row_begin
        begin = 0
        for part, item in enumerate(parts[index]):
            assert item.partial_row == merge.partial_row + part * merge.row_stride == rows
            assert item[1:4] == merge[1:4]
            assert merge.arrived == 0
            assert item.q_begin == merge.q_begin
            if item.kv_begin < item.kv_end:
                assert item.kv_begin >= begin
                begin = item.kv_end
            rows += merge.row_stride
    assert rows <= layout.partial_rows
    assert len(found.merges) <= layout.merge_capacity
    assert len(found.items) <= layout.item_capacity


@MANY
@given(batch=batches())
def test_a_request_alone_is_cut_as_among_others(batch: tuple[SplitSpec, Lengths]) -> None:
    spec, lengths = batch
    spec = replace(spec, piece=max(spec.piece, 1))

    def cut(found: Plan, request: int) -> list[tuple[int, ...]]:
        return [(*item[1:7], item.merge < 0) for item in items_of(found) if item.request == request]

    together = planned(spec, lengths)
    for request, pair in enumerate(lengths):
        alone = planned(spec, [pair])
        assert cut(alone, 0) == cut(together, request)
        for item in items_of(alone):
            assert item.kv_begin // spec.piece == max(item.kv_end - 1, 0) // spec.piece


@given(batch=batches())
def test_the_buffer_holds_the_plan(batch: tuple[SplitSpec, Lengths]) -> None:
    spec, lengths = batch
    found, layout = planned(spec, lengths), Layout(spec)
    words = found.words(spec)
    assert words == planned(spec, lengths).words(spec)
    assert len(words) == layout.size
    assert words[:HEADER_WORDS][:2] == [len(found.merges), len(items_of(found))]
    for at in (layout.ctas, layout.merges, layout.items):
        assert at % 32 == 0

    def rows(at: int, width: int, count: int) -> list[list[int]]:
        return [words[at + i * width : at + (i + 1) * width] for i in range(count)]

    merges = rows(layout.merges, len(Merge._fields), words[0])
    assert [Merge(*m) for m in merges] == found.merges
    for cta, (first, count) in enumerate(rows(layout.ctas, 2, spec.num_ctas)):
        mine = rows(layout.items, len(Item._fields), layout.item_capacity)[first : first + count]
        assert [Item(*i) for i in mine] == found.of_cta(cta)


@MANY
@given(batch=sharing_batches())
def test_with_shared_prefixes_every_key_is_attended_once_and_merged_once(
    batch: tuple[SplitSpec, Lengths, Prefixes],
) -> None:
    spec, lengths, prefixes = batch
    q_lens, kv_lens = [q for q, _ in lengths], [kv for _, kv in lengths]
    found, layout = plan(spec, q_lens, kv_lens, *prefixes), Layout(spec)
    attended = defaultdict(list)  # (token, query head) -> (KV tiles, row of the partial buffers)
    taken: set[int] = set()
    of_groups = {
        strip.partial_row + part * spec.tile_rows[-1]
        for strip in found.merges[found.request_strips :]
        if isinstance(strip, Shared)
        for part in range(strip.parts)
    }
    for item in items_of(found):
        assert item.merge in ((-2, -3) if item.partial_row in of_groups else (-1,))
        rows = range(item.row_begin, item.row_end)
        if item.partial_row >= 0:
            part = range(item.partial_row, item.partial_row + len(rows))
            assert part[-1] < layout.partial_rows
            assert taken.isdisjoint(part)
            taken.update(part)
        for row in rows:
            token = item.q_begin + row // spec.group_size
            head = item.kv_head * spec.group_size + row % spec.group_size
            at = item.partial_row + row - item.row_begin if item.partial_row >= 0 else -1
            tiles = range(item.kv_begin, item.kv_end)
            attended[token, head].append((tiles, at))
            # A causal mask must show a group's rows all that its members share.
            if item.kv_end <= (item.kv_len - item.q_len) // spec.kv_tile:
                assert item.kv_end * spec.kv_tile <= item.kv_len - item.q_len
    begins = [sum(q_lens[:r]) for r in range(len(q_lens))]
    for request, (q_len, kv_len) in enumerate(lengths):
        for i in range(q_len):
            end = min(kv_len, kv_len - q_len + i + spec.right + 1) if spec.right >= 0 else kv_len
            last = min(kv_len, kv_len + spec.right) if spec.right >= 0 else kv_len
            for head in range(spec.num_kv_heads * spec.group_size):
                parts = attended[begins[request] + i, head]
                tiles = sorted(tile for some, _ in parts for tile in some)
                assert tiles == list(range(len(tiles)))  # each once, without a gap
                assert len(tiles) * spec.kv_tile >= end
                assert len(tiles) <= -(-last // spec.kv_tile)
    assert found.request_strips == sum(q > 0 for q in q_lens) * spec.num_kv_heads
    assert len(found.merges) == found.strips <= layout.merge_capacity
    assert len(found.items) <= layout.item_capacity
    for strip in found.merges[: found.request_strips]:
        assert isinstance(strip, Shared)
        for row in range(strip.rows):
            rows = [strip.partial_row + row + n * spec.tile_rows[-1] for n in range(strip.parts)]
            if strip.prefix >= 0:
                below = strip.group_row + row
                other = found.merges[strip.prefix + below // strip.tile_rows]
                assert isinstance(other, Shared)
                first = other.partial_row + below % strip.tile_rows
                rows += [first + n * spec.tile_rows[-1] for n in range(other.parts)]
            token = strip.q_begin + row // spec.group_size
            head = strip.kv_head * spec.group_size + row % spec.group_size
            written = [at for _, at in attended[token, head]]
            assert sorted(written) == (sorted(rows) or [-1])


def test_a_prefix_is_planned_once_where_that_spares_enough() -> None:
    spec = replace(SPEC, groups=2, least_saved=4096, kv_tile=128, tile_rows=(16, 128),
                   tile_cost=(1600, 1600))  # fmt: skip
    lengths = [(1, 8192 + 256)] * 64

    def tiles(shared: list[int]) -> int:
        found = plan(spec, [1] * 64, [kv for _, kv in lengths], [0, 63, 64], shared)
        return sum(item.kv_end - item.kv_begin for item in items_of(found))

    assert tiles([0, 0]) == 8 * 64 * 66
    assert tiles([8192, 8192]) == 8 * (2 * 64 + 63 * 2 + 66)  # one request shares with nobody
    assert tiles([8300, 0]) == tiles([8192, 0])  # whole KV tiles
    assert tiles([66, 0]) == tiles([0, 0])
    few = plan(spec, [1] * 2, [4096 + 9] * 2, [0, 2], [4095])
    assert few.strips == few.request_strips


def test_groups_have_ctas_of_their_own_where_that_is_even() -> None:
    """64 requests of 256 keys of their own, 4 query tiles a head of what they share."""
    spec = replace(SPEC, groups=1, least_saved=4096, kv_tile=64, tile_rows=(64,), tile_cost=(3448,),
                   item_cost=2750, num_ctas=256)  # fmt: skip
    for keys, requests in ((8192, 96), (2048, None)):
        found = plan(spec, [1] * 64, [keys + 256] * 64, [0, 64], [keys])
        kinds = [{item.merge for item in found.of_cta(cta)} for cta in range(256)]
        alone = sum(kind == {-3} for kind in kinds)
        if (
            requests is None
        ):  # for 32 strips of half as many keys as shares have, 256 / 32 is not even
            assert {-1, -2} in kinds
            continue
        assert kinds == [{-1}] * requests + [{-3}] * alone
        assert alone % 32 == 0
        for cta in range(requests, 256, 4):
            items = [found.of_cta(cta + tile) for tile in range(4)]
            assert [len(mine) for mine in items] == [1] * 4
            assert [mine[0].row_begin for mine in items] == [0, 64, 128, 192]
            assert len({(m[0].kv_head, m[0].kv_begin, m[0].kv_end) for m in items}) == 1


@pytest.mark.parametrize(("requests", "reread"), [(32, -3), (64, -3), (80, -2), (96, -2)])
def test_keys_that_few_query_tiles_read_together_are_said(requests: int, reread: int) -> None:
    """A group of 64 requests has 4 query tiles; with more, some come too late for what was read."""
    spec = replace(SPEC, groups=1, least_saved=4096, kv_tile=64, tile_rows=(64,), tile_cost=(3448,),
                   item_cost=2750, num_ctas=264, batch=128, tokens=128, max_kv_len=8192 + 256)  # fmt: skip
    found = plan(spec, [1] * requests, [8192 + 256] * requests, [0, requests], [8192])
    assert {item.merge for item in items_of(found)} == {-1, reread}


def test_keys_of_query_tiles_that_are_cut_in_different_places_stay() -> None:
    spec = replace(SPEC, groups=2, least_saved=4096, kv_tile=64, tile_rows=(64,), tile_cost=(3448,),
                   item_cost=2750, num_ctas=264, batch=64, tokens=64, max_kv_len=8192 + 256)  # fmt: skip
    for keys, reread in (((8192, 8192), -3), ((8192, 6144), -2)):
        kv_lens = [keys[0] + 256] * 32 + [keys[1] + 256] * 32
        found = plan(spec, [1] * 64, kv_lens, [0, 32, 64], keys)
        kinds = [{item.merge for item in found.of_cta(cta)} for cta in range(264)]
        assert all(len(kind) <= 1 for kind in kinds)  # groups have CTAs of their own
        assert set().union(*kinds) == {-1, reread}


def test_one_long_request_among_short_ones() -> None:
    lengths = [(1, 32768), *[(1, 512)] * 63]
    found = planned(SPEC, lengths)
    shares = [share(SPEC, found.of_cta(cta)) for cta in range(132)]
    assert found.ctas_used == 132
    assert max(shares) < 1.2 * sum(shares) / 132
    # The same work with a strip to a CTA: one strip alone takes 20 times the mean.
    assert share(SPEC, [i for i in items_of(found) if i[:2] == (0, 0)]) > 20 * max(shares) / 3


def test_few_keys_use_few_ctas() -> None:
    found = planned(SPEC, [(1, 100)])
    assert found.ctas_used == 8
    assert all(count == 1 for _, count in found.ctas[:8])
    assert planned(SPEC, []).ctas_used == 1
    assert planned(SPEC, [(0, 100)]).strips == 0


def test_many_query_tiles_are_drawn_whole_those_with_most_keys_first() -> None:
    spec = replace(
        SPEC, batch=4, tokens=8192, max_q_len=2048, tile_rows=(64, 128), tile_cost=(800, 1600),
        num_ctas=16, whole=4,
    )  # fmt: skip
    found = planned(spec, [(2048, 2048)] * 4)
    assert found.drawn == found.strips == 4 * 8 * 2048 * 4 // 128
    assert not found.merges
    items = found.of_cta(0)
    assert len(items) == found.strips
    for request in range(4):
        mine = items[request * 512 : (request + 1) * 512]
        assert {item.request for item in mine} == {request}
        assert [item.kv_head for item in mine[:8]] == list(range(8))  # one query tile of each head
        lengths = [item.kv_end for item in mine]
        assert lengths == sorted(lengths, reverse=True)
    # One request of many more keys than the others have is cut, and so are they.
    assert planned(replace(spec, max_kv_len=2**20), [(1, 2**20), (2048, 2048)]).drawn == 0
    assert planned(replace(spec, whole=0), [(2048, 2048)] * 4).drawn == 0


def test_whole_strips_of_requests_together_come_last_query_tiles_first() -> None:
    spec = replace(SPEC, batch=5, tokens=500, max_q_len=100, max_kv_len=900, num_kv_heads=2,
                   group_size=4, tile_rows=(64,), tile_cost=(100,), num_ctas=2, whole=1,
                   right=0)  # fmt: skip
    q_lens, kv_lens = [100, 40, 100, 7, 90], [100, 900, 100, 7, 90]
    alone = plan(spec, q_lens, kv_lens)
    found = plan(replace(spec, together=2), q_lens, kv_lens)
    assert alone.drawn
    items = [item for item in found.items if item is not None]
    assert sorted(items) == sorted(item for item in alone.items if item is not None)
    places = [((item.request + 1) // 2, -item.row_begin) for item in items]
    assert places == sorted(places)  # the first request alone, then 1 and 2, and 3 and 4
    assert {item.request for item in items[:14]} == {0}
    assert [item.request for item in items[14:22]] == [2] * 8
    assert {item.request for item in items[24:28]} == {1, 2}


def test_lengths_beyond_the_capacities_are_refused() -> None:
    for lengths, message in (
        ([(1, 1)] * 65, "65 requests and the spec is made for 64; make one with batch = 65"),
        ([(1, 40000)], "40000 keys of one request.*max_kv_len = 40000 or more"),
        ([(2, 40)], "2 query tokens of one request"),
    ):
        with pytest.raises(ValueError, match=message):
            planned(SPEC, lengths)
