"""Plans where each request has one query tile: decoding, and speculation of a few tokens.

The same plan as split_kv.py makes for every batch, by vectors of one program alone. What a cut, an
item or a request belongs to is not searched for but counted: a histogram of where the owners begin,
summed up, says at every place how many have begun. Lengths are loaded again where they are needed
again (the second time from the nearest cache), which takes less than passing them on between threads.

With shared prefixes the groups are more lanes after those of the requests: all query tiles of a
group see the same keys and so cost the same, which is what this planner relies on.
"""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl

from rooftile.planning import split_shares
from rooftile.planning.split_kv import Item, Merge

ITEM_WORDS = tl.constexpr(len(Item._fields))
MERGE_WORDS = tl.constexpr(len(Merge._fields))
STRIP_BITS = tl.constexpr(20)  # of strips in one number with clocks
STRIP_MASK = tl.constexpr((1 << 20) - 1)
FAR = tl.constexpr(2**30)
MOST_UNEVEN = tl.constexpr(split_shares.MOST_UNEVEN)
MOST_TOGETHER = tl.constexpr(split_shares.MOST_TOGETHER)


@triton.jit
def _count(begins, counted, start, bins: tl.constexpr):
    """How many of the counted begin at start, start + 1, .. start + bins - 1."""
    at = tl.minimum(tl.maximum(begins - start, 0), bins - 1)
    inside = counted & (begins < start + bins)
    if start > 0:
        inside = inside & (begins >= start)
    return tl.histogram(at, bins, mask=inside)


@triton.jit
def _begun(begins, counted, bins: tl.constexpr):
    """For each place 0 .. bins - 1 which of the counted began last, at it or before.

    Counters of a histogram lie in the fewer banks of shared memory the more bins it has, so many
    bins are counted in parts.
    """
    if bins == 512:
        even = tl.join(_count(begins, counted, 0, 128), _count(begins, counted, 256, 128))
        odd = tl.join(_count(begins, counted, 128, 128), _count(begins, counted, 384, 128))
        counts = tl.join(even, odd).permute(1, 2, 0).reshape([512])
    elif bins == 256:
        low = _count(begins, counted, 0, 128)
        counts = tl.join(low, _count(begins, counted, 128, 128)).permute(1, 0).reshape([256])
    else:
        counts = _count(begins, counted, 0, bins)
    return tl.cumsum(counts, 0) - 1


@triton.jit
def _sum_of_two(a, b, c, d):
    return a + c, b + d


@triton.jit
def _quotient(a, b):
    """a // b of numbers from 0 on whose quotients are below 2^22: by floats, which is shorter."""
    q = (a.to(tl.float32) * (1.0 / b.to(tl.float32))).to(tl.int32)
    rest = a - q * b
    return q + tl.where(rest >= b, 1, 0) - tl.where(rest < 0, 1, 0)


@triton.jit
def _quotient_of_one(a, b):
    """a // b of two numbers of 64 bits from 0 and 1 on, whose quotient has at most 32 bits: what floats
    leave over of it is small enough for them."""
    q = (a.to(tl.float32) / b.to(tl.float32)).to(tl.int64)
    rest = a - q * b
    q += (rest.to(tl.float32) / b.to(tl.float32)).to(tl.int32)
    rest = a - q * b
    return q + tl.where(rest >= b, 1, 0) - tl.where(rest < 0, 1, 0)


@triton.jit
def _places(turn, total, parts):
    """turn * total // parts, of turns up to parts."""
    of_part = _quotient_of_one(total, parts)
    rest = (total - of_part * parts).to(tl.int32)
    return turn * of_part + _quotient(turn * rest, parts)


@triton.jit
def _alone(total, of_groups, strips, used, num_kv_heads):
    """How many CTAs each strip of a group has to itself (planning/split_shares.py), 0 where shares are
    to be cut like all others; strips: of all groups."""
    count = tl.maximum(strips, 1).to(tl.int64)
    alone = _quotient_of_one(2 * used * of_groups + total * count, 2 * total * count).to(tl.int32)
    alone = tl.where(strips > 0, alone, 0)
    ctas = alone * strips
    others = used - ctas
    most = MOST_UNEVEN * total
    even = (16 * used * of_groups <= most * ctas) & (others > 0)
    even = even & (16 * used * (total - of_groups) <= most * others)
    return tl.where(even, alone, 0)


@triton.jit
def _shares(cta, lane, packed, place_of, total, used, batch, num_kv_heads, shares: tl.constexpr):
    """Where on the line each CTA's share begins, and which is the first to begin at or after each lane;
    CTAs of requests, how many each strip of a group has, strips of groups, and what these cost."""
    others = used  # CTAs of requests, and what these cost
    of_requests = total
    alone = 0
    group_ctas = 0
    group_strips = 0
    if shares:
        in_groups = tl.sum(tl.where(lane >= batch, packed, 0), 0)
        group_strips = (in_groups & STRIP_MASK).to(tl.int32) * num_kv_heads
        of_groups = (in_groups >> STRIP_BITS) * num_kv_heads
        alone = _alone(total, of_groups, group_strips, used, num_kv_heads)
        group_ctas = alone * group_strips
        others = used - group_ctas
        of_requests = tl.where(alone > 0, total - of_groups, total)
    place = _places(tl.minimum(cta, others), of_requests, others)
    # The first cut at or after the beginning of each lane: near its share of the whole.
    begins_at = place_of
    of_all_parts = of_requests
    parts_of_all = others
    if shares:
        turn = tl.minimum(tl.maximum(cta - others, 0), group_ctas)
        place += _places(turn, total - of_requests, tl.maximum(group_ctas, 1))
        apart = (alone > 0) & (lane >= batch)
        begins_at = tl.where(apart, place_of - of_requests, place_of)
        of_all_parts = tl.where(apart, total - of_requests, of_requests)
        parts_of_all = tl.where(apart, group_ctas, others)
    near = begins_at.to(tl.float32) / tl.maximum(of_all_parts, 1).to(tl.float32) * parts_of_all
    near = tl.maximum(near.to(tl.int32) - 1, 0)
    wanted = begins_at * parts_of_all
    reached = near.to(tl.int64) * of_all_parts
    by = near
    for _ in tl.static_range(4):
        by += tl.where(reached < wanted, 1, 0)
        reached += of_all_parts
    if shares:
        by = tl.where(apart, by + others, by)
    return place, by, others, alone, group_strips, total - of_requests


@triton.jit
def _owners(cta, others, alone, group_strips, num_kv_heads):
    """Which CTA has each share: those of groups that are neighbours have the query tiles of the same
    keys."""
    query_tiles = _quotient(group_strips, num_kv_heads)
    of_head = tl.maximum(query_tiles * alone, 1)
    turn = cta - others
    of_group = (turn >= 0) & (turn < alone * group_strips)
    turn = tl.where(of_group, turn, 0)
    before = _quotient(turn, of_head) * of_head
    query_tile = _quotient(turn - before, tl.maximum(alone, 1))
    part = turn - before - query_tile * alone
    return tl.where(of_group, others + before + part * query_tiles + query_tile, cta)


@triton.jit
def _store_words(at, a, b, c, d, mask):
    tl.store(at, a, mask=mask)
    tl.store(at + 1, b, mask=mask)
    tl.store(at + 2, c, mask=mask)
    tl.store(at + 3, d, mask=mask)


@triton.jit
def _store_four(at, a, b, c, d, mask):
    """As `_store_words`, at multiples of 16 bytes, by one store; there are as many places as threads.

    Stored one by one every word is a sector of its own on its way to the L2 cache: 2,048 for the merges
    of 256 cuts, which one multiprocessor sends for a microsecond. Fewer places than threads would be
    moved between them before.
    """
    words = tl.join(tl.join(a, c), tl.join(b, d)).reshape([a.shape[0], 4])
    place = at[:, None] + tl.arange(0, 4)[None, :]
    tl.store(tl.multiple_of(place, [1, 16]), words, mask=mask[:, None])


@triton.jit
def _smaller(a, b):
    return tl.minimum(a, b)


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def _tokens(lane, there, cu_seqlens_q, first, shared, batch, groups, least_saved, kv_shift,
            shares: tl.constexpr):  # fmt: skip
    """Of requests and groups: the first request, q_begin, q_len, and KV tiles that a group shares."""
    begin = lane
    end = lane + 1
    tiles = lane * 0
    if shares:
        is_group = there & (lane >= batch)
        g = lane - batch
        begin = tl.where(is_group, tl.load(first + g, mask=is_group, other=0).to(tl.int32), lane)
        end = tl.where(is_group, tl.load(first + g + 1, mask=is_group, other=0).to(tl.int32), end)
        tiles = tl.load(shared + g, mask=is_group, other=0).to(tl.int32) >> kv_shift
        spared = (end - begin - 1).to(tl.int64) * (tiles << kv_shift)
        tiles = tl.where(spared >= least_saved, tiles, 0)
    q_begin = tl.load(cu_seqlens_q + begin, mask=there, other=0).to(tl.int32)
    q_len = tl.load(cu_seqlens_q + end, mask=there, other=0).to(tl.int32) - q_begin
    if shares:
        q_len = tl.where(is_group & (tiles == 0), 0, q_len)
    return begin, q_begin, q_len, tiles


@triton.jit
def _shape(
    lane, there, q_len, skipped, tiles, kv_lens, batch, group_size, left, kv_shift, cost_0, cost_1,
    cost_2, cost_3, tile_rows: tl.constexpr, shares: tl.constexpr,
):  # fmt: skip
    """Of strips of requests and groups: rows, tile and its cost, query tiles, keys, KV tiles."""
    kv_len = tl.load(kv_lens + lane, mask=there & (lane < batch), other=0).to(tl.int32)
    rows = q_len * group_size
    tile = tl.zeros_like(rows) + tile_rows[0]
    cost = tl.zeros_like(rows) + cost_0
    if len(tile_rows) > 1:
        cost = tl.where(rows > tile_rows[0], cost_1, cost)
        tile = tl.where(rows > tile_rows[0], tile_rows[1], tile)
    if len(tile_rows) > 2:
        cost = tl.where(rows > tile_rows[1], cost_2, cost)
        tile = tl.where(rows > tile_rows[1], tile_rows[2], tile)
    if len(tile_rows) > 3:
        cost = tl.where(rows > tile_rows[2], cost_3, cost)
        tile = tl.where(rows > tile_rows[2], tile_rows[3], tile)
    first_key = tl.zeros_like(kv_len)
    if left >= 0:
        first_key = tl.maximum(kv_len - q_len - left, 0)
    seen = kv_len > first_key
    kv_begin = tl.where(seen, first_key >> kv_shift, 0)
    kv_end = tl.where(seen, (kv_len + (1 << kv_shift) - 1) >> kv_shift, 0)
    query_tiles = tl.where(q_len > 0, 1, 0)
    if shares:
        of_group = lane >= batch
        kv_begin = tl.where(of_group, 0, skipped)
        kv_end = tl.where(of_group, tiles, kv_end)
        kv_len = tl.where(of_group, (tiles << kv_shift) + q_len, kv_len)
        query_tiles = tl.where(of_group, (rows + tile - 1) // tile, query_tiles)
    return rows, tile, cost, query_tiles, kv_len, kv_begin, kv_end


@triton.jit(
    do_not_specialize=[
        *("batch", "groups", "group_size", "num_kv_heads"),
        *("left", "kv_shift", "item_cost", "cost_0", "cost_1", "cost_2", "cost_3", "min_piece"),
        *("least_saved", "tokens", "cut_rows"),
    ]
)
def split_kv_single_kernel(
    cu_seqlens_q,  # [batch + 1]
    kv_lens,  # [batch]
    first,  # [groups + 1], where shares
    shared,  # [groups]
    plan,  # int32
    batch,
    groups,
    ctas_at,
    merges_at,
    items_at,
    group_size,
    num_kv_heads,
    left,
    kv_shift,  # log2 of kv_tile
    item_cost,
    cost_0,
    cost_1,
    cost_2,
    cost_3,
    min_piece,
    least_saved,
    tokens,  # capacity, and rows of the partial buffers for cuts
    cut_rows,
    tile_rows: tl.constexpr,
    cta_count: tl.constexpr,
    cta_block: tl.constexpr,  # a power of two from cta_count and 8 on
    lanes: tl.constexpr,  # a power of two from batch + groups on
    block: tl.constexpr,  # items at a time
    shares: tl.constexpr,
):
    """Program 0 writes the CTAs' runs, program 1 merges, the others items."""
    row_stride: tl.constexpr = tile_rows[len(tile_rows) - 1]
    program = tl.program_id(0)

    # Requests and groups: what a strip of each costs, and how many strips and costs lie before it.
    lane = tl.arange(0, lanes)
    there = lane < batch
    if shares:
        there = lane < batch + groups
    begin, q_begin, q_len, tiles = _tokens(
        lane, there, cu_seqlens_q, first, shared, batch, groups, least_saved, kv_shift, shares
    )
    skipped = tiles
    group = lane
    if shares:
        group = _begun(begin, there & (lane >= batch), lanes)
        skipped = tl.gather(tiles, tl.maximum(tl.minimum(batch + group, lanes - 1), 0), 0)
        skipped = tl.where((lane < batch) & there, skipped, 0)
    _rows, tile, cost, query_tiles, _kv_len, kv_begin, kv_end = _shape(
        lane, there, q_len, skipped, tiles, kv_lens, batch, group_size, left, kv_shift, cost_0,
        cost_1, cost_2, cost_3, tile_rows, shares,
    )  # fmt: skip
    of_lane = (item_cost + (kv_end - kv_begin) * cost).to(tl.int64) * query_tiles
    packed = (of_lane << STRIP_BITS) + query_tiles
    sums = tl.cumsum(packed, 0) - packed
    of_all, of_lanes = tl.reduce((packed, tl.where(query_tiles > 0, lane, 0)), 0, _sum_of_two)
    total = (of_all >> STRIP_BITS) * num_kv_heads
    all_strips = (of_all & STRIP_MASK).to(tl.int32) * num_kv_heads
    place_of = (sums >> STRIP_BITS) * num_kv_heads
    strip_of = (sums & STRIP_MASK).to(tl.int32) * num_kv_heads

    # Cuts: where each CTA's share begins.
    least = item_cost + min_piece * cost_0
    used = tl.minimum(total, least.to(tl.int64) * cta_count).to(tl.int32) // least
    used = tl.maximum(used, 1)
    cta = tl.arange(0, cta_block)
    place, by, others, alone, group_strips, of_groups = _shares(
        cta, lane, packed, place_of, total, used, batch, num_kv_heads, shares
    )
    inside = place < total
    at_lane = _begun(by, place_of < total, cta_block)
    at_lane = tl.where(inside, at_lane, 0)
    before = tl.gather(sums, at_lane, 0)
    offset = place - (before >> STRIP_BITS) * num_kv_heads
    _begin, cut_q_begin, cut_q_len, cut_tiles = _tokens(
        at_lane, inside, cu_seqlens_q, first, shared, batch, groups, least_saved, kv_shift, shares
    )
    cut_skipped = cut_tiles
    if shares:
        cut_skipped = tl.gather(skipped, at_lane, 0)
    rows_there, _tile, cut_cost, _query_tiles, _kv_len, cut_begin, cut_end = _shape(
        at_lane, inside, cut_q_len, cut_skipped, cut_tiles, kv_lens, batch, group_size, left,
        kv_shift, cost_0, cost_1, cost_2, cost_3, tile_rows, shares,
    )  # fmt: skip
    tiles_there = cut_end - cut_begin
    width = item_cost + tiles_there * cut_cost
    into_lane = (offset.to(tl.float32) / width.to(tl.float32)).to(tl.int32)
    over = offset - into_lane.to(tl.int64) * width
    into_lane += tl.where(over >= width, 1, 0) - tl.where(over < 0, 1, 0)
    into = tl.where(inside, offset - into_lane.to(tl.int64) * width, 0).to(tl.int32)
    strip = (before & STRIP_MASK).to(tl.int32) * num_kv_heads + into_lane
    at = _quotient(tl.maximum(into - item_cost, 0) + (cut_cost >> 1), cut_cost)
    at = tl.where(at < min_piece, 0, tl.where(tiles_there - at >= min_piece, at, -1))
    at = tl.where(tiles_there < 2 * min_piece, tl.where(2 * into < width, 0, -1), at)
    strip = tl.where(inside, strip + tl.where(at < 0, 1, 0), all_strips)
    at = tl.where(inside, tl.maximum(at, 0), 0)
    cut = (strip.to(tl.int64) << 32) + at

    end_cut = all_strips.to(tl.int64) << 32  # of the last CTA

    # Parts and merges: numbered by the cuts inside of strips.
    last = tl.gather(cut, tl.maximum(cta - 1, 0), 0)
    new = (at > 0) & (cut != last)
    opens = new & ((strip != (last >> 32)) | (last.to(tl.int32) == 0))
    parts_opened = (new.to(tl.int32) + opens.to(tl.int32)) * 65536 + opens.to(tl.int32)
    numbers = tl.cumsum(parts_opened, 0)
    slots = numbers // 65536
    next_strip = strip
    next_at = at
    closing = slots
    if shares or program < 2:
        following = tl.gather(cut, tl.minimum(cta + 1, cta_block - 1), 0)
        following = tl.where(cta + 1 < cta_count, following, end_cut)
        next_strip = (following >> 32).to(tl.int32)
        next_at = following.to(tl.int32)
    closes = (at > 0) & ((next_strip != strip) | (next_at == 0))
    if shares:
        # The last cut inside of a strip knows how many parts the strip has.
        closing = tl.associative_scan(tl.where(closes, slots, FAR), 0, _smaller, reverse=True)

    if program == 0:
        is_cta = cta < cta_count
        some = is_cta & ((strip < next_strip) | (at < next_at))
        count = tl.where(some, next_strip - strip + tl.where(next_at > 0, 1, 0), 0)
        run = tl.join(strip + cta, count)
        owner = cta
        if shares:
            owner = _owners(cta, others, alone, group_strips, num_kv_heads)
        run_at = plan + ctas_at + owner[:, None] * 2 + tl.arange(0, 2)[None, :]
        tl.store(tl.multiple_of(run_at, [1, 2]), run, mask=is_cta[:, None])
        both = tl.sum((count.to(tl.int64) << 32) + opens.to(tl.int64), 0)
        merges = both.to(tl.int32)
        of_requests = 0
        if shares:
            merges = all_strips
            of_requests = tl.sum(tl.where(lane < batch, query_tiles, 0), 0) * num_kv_heads
        word = tl.where(cta == 0, merges, (both >> 32).to(tl.int32))
        word = tl.where(cta < 2, word, tl.where(cta == 2, used, all_strips))
        word = tl.where(cta < 4, word, tl.where(cta == 4, of_requests, 0))
        tl.store(plan + cta, word, mask=cta < 8)
        return
    if program == 1:
        if not shares:
            opened = tl.associative_scan(tl.where(opens, slots - 2, -1), 0, _larger)
            words = plan + merges_at + (numbers % 65536 - 1) * MERGE_WORDS
            none = tl.zeros_like(into_lane)
            _store_four(words, none, into_lane, none, rows_there, closes)
            stride = tl.full([cta_block], row_stride, tl.int32)
            first_part = opened * row_stride
            _store_four(words + 4, first_part, slots - opened, stride, cut_q_begin, closes)
        return

    # Requests without queries, if any, come last, and the others have a strip for each head.
    some_lanes = (of_all & STRIP_MASK).to(tl.int32)
    in_order = (2 * of_lanes == some_lanes * (some_lanes - 1)) & (not shares)

    # Items.
    index_of = tl.where(cta < cta_count, strip + cta, FAR)
    for base in range(
        (program - 2) * block, all_strips + cta_count, (tl.num_programs(0) - 2) * block
    ):
        index = base + tl.arange(0, block)
        of = _begun(index_of - base, cta < cta_count, block)
        mine = index - of
        from_cut = tl.gather(cut, of, 0)
        to_cut = tl.gather(cut, tl.minimum(of + 1, cta_block - 1), 0)
        to_cut = tl.where(of + 1 < cta_count, to_cut, end_cut)
        begins = (from_cut >> 32).to(tl.int32)
        begins_at = from_cut.to(tl.int32)
        ends = (to_cut >> 32).to(tl.int32)
        ends_at = to_cut.to(tl.int32)
        valid = (mine < ends) | ((mine == ends) & (ends_at > 0))
        valid = valid & (from_cut < to_cut) & (mine < all_strips)
        if in_order:
            request = _quotient(mine, num_kv_heads)
        else:
            from_strip = tl.min(mine, 0)
            request = _begun(strip_of - from_strip, there, block)
            request = tl.gather(request, mine - from_strip, 0)
        request = tl.where(valid, request, 0)
        if shares:
            number = mine - tl.gather(strip_of, request, 0)
        else:  # every request that has queries has a strip for each head
            number = mine - _quotient(mine, num_kv_heads) * num_kv_heads
        member, q_begin_, q_len_, tiles_ = _tokens(
            request, valid, cu_seqlens_q, first, shared, batch, groups, least_saved, kv_shift,
            shares,
        )  # fmt: skip
        skipped_ = tiles_
        if shares:
            skipped_ = tl.gather(skipped, request, 0)
        rows_, tile_, cost_, query_tiles_, kv_len_, from_tile, to_tile = _shape(
            request, valid, q_len_, skipped_, tiles_, kv_lens, batch, group_size, left, kv_shift,
            cost_0, cost_1, cost_2, cost_3, tile_rows, shares,
        )  # fmt: skip
        head = number
        row_begin = number * 0
        row_end = rows_
        if shares:
            head = number // tl.maximum(query_tiles_, 1)
            row_begin = (number - head * query_tiles_) * tile_
            row_end = tl.minimum(row_begin + tile_, rows_)
        continues = (mine == begins) & (begins_at > 0)
        breaks = (mine == ends) & (ends_at > 0)
        at_cut = tl.minimum(of + tl.where(continues, 0, 1), cta_count - 1)
        numbers_ = tl.gather(numbers, at_cut, 0)
        slot = numbers_ // 65536 - tl.where(continues, 1, 2)
        split = continues | breaks
        partial_row = tl.where(split, slot * row_stride, -1)
        merge = tl.where(split, numbers_ % 65536 - 1, -1)
        if shares:
            of_group = tiles_ > 0
            heads = tl.where(of_group, num_kv_heads, 0) + head
            only = cut_rows + (heads * tokens + q_begin_) * group_size + row_begin
            has_parts = split | of_group | (skipped_ > 0)
            partial_row = tl.where(has_parts & ~split, only, partial_row)
            strip_cost = item_cost + (to_tile - from_tile) * cost_
            whole = strip_cost.to(tl.int64) * group_strips == of_groups  # shares, cut alike
            together = (alone > 0) & (query_tiles_ <= MOST_TOGETHER) & whole
            merge = tl.where(of_group, tl.where(together, -3, -2), -1)
        words = plan + items_at + index * ITEM_WORDS
        first_tile = from_tile + tl.where(continues, begins_at, 0)
        end_tile = tl.where(breaks, from_tile + ends_at, to_tile)
        _store_words(words, member, head, row_begin, row_end, valid)
        _store_words(words + 4, tile_, first_tile, end_tile, partial_row, valid)
        _store_words(words + 8, merge, q_begin_, q_len_, kv_len_, valid)
        if shares:
            opens_strip = valid & ~continues
            parts = tl.where(split, tl.gather(closing, at_cut, 0) - slot, tl.where(has_parts, 1, 0))
            is_member = skipped_ > 0
            of_prefix = batch + tl.gather(group, request, 0)
            of_prefix = tl.where(is_member, of_prefix, 0)
            prefix = tl.gather(strip_of, of_prefix, 0)
            prefix += head * tl.gather(query_tiles, of_prefix, 0)
            group_row = (q_begin_ - tl.gather(q_begin, of_prefix, 0)) * group_size
            group_tile = tl.gather(tile, of_prefix, 0)
            words = plan + merges_at + mine * MERGE_WORDS
            prefix = tl.where(is_member, prefix, -1)
            group_row = tl.where(is_member, group_row, row_begin)
            group_tile = tl.where(is_member, group_tile, tile_)
            _store_words(words, prefix, head, group_row, row_end - row_begin, opens_strip)
            _store_words(words + 4, partial_row, parts, group_tile, q_begin_, opens_strip)
