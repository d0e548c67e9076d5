"""Plans where each request has one query tile: decoding, and speculation of a few tokens.

The same plan as split_kv.py makes for every batch, in registers alone: sums over requests and over
cuts are vectors of one program, and searches gather from them. A batch of 256 is one load, two sums,
two searches and one store deep.
"""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl

from rooftile.planning.split_kv import Item, Merge

ITEM_WORDS = tl.constexpr(len(Item._fields))
MERGE_WORDS = tl.constexpr(len(Merge._fields))


@triton.jit
def _last_at_most(sums, steps: tl.constexpr, key):
    """The last index whose sum is at most key; sums never decrease and begin with at most key."""
    found = key.to(tl.int32) * 0
    step = steps
    while step > 0:
        value = tl.gather(sums, found + step, 0)
        found = tl.where(value <= key, found + step, found)
        step = step // 2
    return found


@triton.jit
def _later(a, b):
    return tl.maximum(a, b)


@triton.jit(
    do_not_specialize=[
        *("batch", "merges_at", "items_at", "group_size", "num_kv_heads", "left", "kv_shift"),
        *("item_cost", "cost_0", "cost_1", "cost_2", "cost_3", "min_piece"),
    ]
)
def split_kv_single_kernel(
    cu_seqlens_q,  # [batch + 1]
    kv_lens,  # [batch]
    plan,  # int32
    batch,
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
    tile_rows: tl.constexpr,
    cta_count: tl.constexpr,
    cta_block: tl.constexpr,  # a power of two above cta_count
    batch_block: tl.constexpr,  # a power of two from batch on
    block: tl.constexpr,  # items at a time
):
    row_stride: tl.constexpr = tile_rows[len(tile_rows) - 1]
    program = tl.program_id(0)

    # Requests: what a strip of each costs, and how many strips and costs lie before it.
    r = tl.arange(0, batch_block)
    exists = r < batch
    q_begin = tl.load(cu_seqlens_q + r, mask=exists, other=0).to(tl.int32)
    q_end = tl.load(cu_seqlens_q + r + 1, mask=exists, other=0).to(tl.int32)
    kv_len = tl.load(kv_lens + r, mask=exists, other=0).to(tl.int32)
    q_len = q_end - q_begin
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
    width = item_cost + (kv_end - kv_begin) * cost
    clocks = tl.where(q_len > 0, width, 0).to(tl.int64)
    strips = tl.where(q_len > 0, num_kv_heads, 0)
    place_of = (tl.cumsum(clocks, 0) - clocks) * num_kv_heads
    strip_of = tl.cumsum(strips, 0) - strips
    total = tl.sum(clocks, 0) * num_kv_heads
    all_strips = tl.sum(strips, 0)

    # Cuts: where each CTA's share begins.
    used = total // (item_cost + min_piece * cost_0)
    used = tl.minimum(tl.maximum(used, 1), cta_count).to(tl.int32)
    of_cta = total // used
    rest = (total - of_cta * used).to(tl.int32)
    cta = tl.arange(0, cta_block)
    turn = tl.minimum(cta, used)
    place = turn * of_cta + turn * rest // used
    inside = place < total
    at_request = _last_at_most(place_of, batch_block // 2, tl.where(inside, place, 0))
    of_strip = tl.gather(width, at_request, 0)
    offset = place - tl.gather(place_of, at_request, 0)
    head = (offset.to(tl.float32) / of_strip.to(tl.float32)).to(tl.int32)
    left_over = offset - head.to(tl.int64) * of_strip
    head += tl.where(left_over >= of_strip, 1, 0) - tl.where(left_over < 0, 1, 0)
    into = tl.where(inside, offset - head.to(tl.int64) * of_strip, 0).to(tl.int32)
    strip = tl.gather(strip_of, at_request, 0) + head
    tiles = tl.gather(kv_end - kv_begin, at_request, 0)
    tile_clocks = tl.gather(cost, at_request, 0)
    at = (tl.maximum(into - item_cost, 0) + tile_clocks // 2) // tile_clocks
    at = tl.where(at < min_piece, 0, tl.where(tiles - at >= min_piece, at, -1))
    at = tl.where(tiles < 2 * min_piece, tl.where(2 * into < of_strip, 0, -1), at)
    strip = tl.where(inside, strip + tl.where(at < 0, 1, 0), all_strips)
    at = tl.where(inside, tl.maximum(at, 0), 0)

    # Parts and merges: numbered by the cuts inside of strips.
    before = tl.maximum(cta - 1, 0)
    last_strip = tl.gather(strip, before, 0)
    last_at = tl.gather(at, before, 0)
    after = tl.minimum(cta + 1, cta_count)
    next_strip = tl.gather(strip, after, 0)
    next_at = tl.gather(at, after, 0)
    new = (at > 0) & ((strip != last_strip) | (at != last_at))
    opens = new & ((strip != last_strip) | (last_at == 0))
    slots = tl.cumsum(new.to(tl.int32) + opens.to(tl.int32), 0)
    merges = tl.cumsum(opens.to(tl.int32), 0)
    some = (strip < next_strip) | (at < next_at)
    some = some & (cta < cta_count)
    count = tl.where(some, next_strip - strip + tl.where(next_at > 0, 1, 0), 0)
    index_of = tl.where(cta < cta_count, strip + cta, 2**30)
    if program == 0:
        is_cta = cta < cta_count
        tl.store(plan + ctas_at + cta * 2, index_of, mask=is_cta)
        tl.store(plan + ctas_at + cta * 2 + 1, count, mask=is_cta)
        word = tl.where(cta == 0, tl.sum(opens.to(tl.int32), 0), tl.sum(count, 0))
        word = tl.where(cta < 2, word, tl.where(cta == 2, used, all_strips))
        tl.store(plan + cta, tl.where(cta < 4, word, 0), mask=cta < 8)
        # The last cut inside of a strip knows how many parts the strip has.
        closes = (at > 0) & ((next_strip != strip) | (next_at == 0))
        opened = tl.associative_scan(tl.where(opens, slots - 2, -1), 0, _later)
        words = plan + merges_at + (merges - 1) * MERGE_WORDS
        strip_head = strip - tl.gather(strip_of, at_request, 0)
        tl.store(words, 0, mask=closes)
        tl.store(words + 1, strip_head, mask=closes)
        tl.store(words + 2, 0, mask=closes)
        tl.store(words + 3, tl.gather(rows, at_request, 0), mask=closes)
        tl.store(words + 4, opened * row_stride, mask=closes)
        tl.store(words + 5, slots - opened, mask=closes)
        tl.store(words + 6, row_stride, mask=closes)
        tl.store(words + 7, tl.gather(q_begin, at_request, 0), mask=closes)

    # Items.
    for base in range(program * block, all_strips + cta_count, tl.num_programs(0) * block):
        index = base + tl.arange(0, block)
        of = _last_at_most(index_of, cta_block // 2, index)
        mine = index - of
        begins = tl.gather(strip, of, 0)
        begins_at = tl.gather(at, of, 0)
        ends = tl.gather(next_strip, of, 0)
        ends_at = tl.gather(next_at, of, 0)
        valid = index - tl.gather(index_of, of, 0) < tl.gather(count, of, 0)
        request = _last_at_most(strip_of, batch_block // 2, tl.where(valid, mine, 0))
        from_tile = tl.gather(kv_begin, request, 0)
        to_tile = tl.gather(kv_end, request, 0)
        continues = (mine == begins) & (begins_at > 0)
        breaks = (mine == ends) & (ends_at > 0)
        by = tl.minimum(of + tl.where(continues, 0, 1), cta_count)
        slot = tl.gather(slots, by, 0) - tl.where(continues, 1, 2)
        merge = tl.gather(merges, by, 0) - 1
        split = continues | breaks
        words = plan + items_at + index * ITEM_WORDS
        tl.store(words, request, mask=valid)
        tl.store(words + 1, mine - tl.gather(strip_of, request, 0), mask=valid)
        tl.store(words + 2, 0, mask=valid)
        tl.store(words + 3, tl.gather(rows, request, 0), mask=valid)
        tl.store(words + 4, tl.gather(tile, request, 0), mask=valid)
        tl.store(words + 5, from_tile + tl.where(continues, begins_at, 0), mask=valid)
        tl.store(words + 6, tl.where(breaks, from_tile + ends_at, to_tile), mask=valid)
        tl.store(words + 7, tl.where(split, slot * row_stride, -1), mask=valid)
        tl.store(words + 8, tl.where(split, merge, -1), mask=valid)
        tl.store(words + 9, tl.gather(q_begin, request, 0), mask=valid)
        tl.store(words + 10, tl.gather(q_len, request, 0), mask=valid)
        tl.store(words + 11, tl.gather(kv_len, request, 0), mask=valid)
