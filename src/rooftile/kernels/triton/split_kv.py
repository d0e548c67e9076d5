"""Plans of paged attention made on the GPU, word for word those of planning/split_kv.py.

One small program makes the whole plan: prefix sums over requests, over their query tiles ("entries":
strips of one kv head, or their fixed pieces), and over cuts; whatever a place on the line or in a
list belongs to is found by binary search in these sums, so that no step is a serial loop. Where the
batch may have many items, several programs make the same sums, each in scratch memory of its own,
and write different items. Stores and later loads of one program are ordered by barriers.
"""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rooftile.kernels import Kernel
from rooftile.kernels.triton.interpreter import INTERPRETED
from rooftile.kernels.triton.split_kv_single import split_kv_single_kernel
from rooftile.planning.split_kv import HEADER_WORDS, MOST_SHARING, Item, Layout, Merge
from rooftile.types import SplitSpec

BLOCK = 512  # requests, entries or items at a time
MOST_PROGRAMS = 8
MOST_SINGLE = 1024  # requests whose sums fit the registers of one program
# Lanes of that program, out of few numbers, since an engine compiles it for each when it starts.
SINGLE_LANES = (32, 256, MOST_SINGLE)
SHARING_LANES = (32, 512, MOST_SHARING)
SINGLE_BLOCK = 64
MOST_SINGLE_PROGRAMS = 128
ITEM_WORDS = tl.constexpr(len(Item._fields))
MERGE_WORDS = tl.constexpr(len(Merge._fields))


@triton.jit
def _last_at_most(sums, count, steps, key, factor):
    """The last index below count whose sum, times factor, is at most key; sums never decrease."""
    found = key.to(tl.int32) * 0
    step = steps
    while step > 0:
        candidate = found + step
        inside = candidate < count
        value = tl.load(sums + candidate, mask=inside, other=0) * factor
        found = tl.where(inside & (value <= key), candidate, found)
        step = step // 2
    return found


@triton.jit
def _request(
    r, valid, cu_seqlens_q, kv_lens, group_size, left, kv_tile,
    tile_rows: tl.constexpr, tile_cost: tl.constexpr, piece: tl.constexpr,
):  # fmt: skip
    """Of requests r: q_begin, q_len, kv_len, tile rows and cost, query tiles, pieces, the first."""
    q_begin = tl.load(cu_seqlens_q + r, mask=valid, other=0).to(tl.int32)
    q_len = tl.load(cu_seqlens_q + r + 1, mask=valid, other=0).to(tl.int32) - q_begin
    kv_len = tl.load(kv_lens + r, mask=valid, other=0).to(tl.int32)
    rows = q_len * group_size
    tile = tl.zeros_like(rows) + tile_rows[len(tile_rows) - 1]
    cost = tl.zeros_like(rows) + tile_cost[len(tile_rows) - 1]
    for back in tl.static_range(1, len(tile_rows)):
        holds = rows <= tile_rows[len(tile_rows) - 1 - back]
        cost = tl.where(holds, tile_cost[len(tile_rows) - 1 - back], cost)
        tile = tl.where(holds, tile_rows[len(tile_rows) - 1 - back], tile)
    query_tiles = (rows + tile - 1) // tile
    pieces = tl.zeros_like(rows) + 1
    first_piece = tl.zeros_like(rows)
    if piece > 0:
        if left >= 0:
            first_key = tl.minimum(tl.maximum(kv_len - q_len - left, 0), kv_len)
            first_piece = first_key // (kv_tile * piece)
        pieces = (kv_len + kv_tile * piece - 1) // (kv_tile * piece) - first_piece
        pieces = tl.maximum(pieces, 1)
    return q_begin, q_len, kv_len, tile, cost, query_tiles, pieces, first_piece


@triton.jit
def _tiles(
    local, q_len, kv_len, tile, pieces, first_piece, group_size, left, right, kv_tile,
    piece: tl.constexpr,
):  # fmt: skip
    """Of entries, counted from their request's first: row_begin, row_end, kv_begin, kv_end.

    The last query tile comes first.
    """
    last = tl.maximum(q_len * group_size - 1, 0) // tile
    row_begin = (last - local // pieces) * tile
    row_end = tl.minimum(row_begin + tile, q_len * group_size)
    offset = kv_len - q_len
    first = tl.zeros_like(kv_len)
    end = kv_len
    if left >= 0:
        first = tl.maximum(offset + row_begin // group_size - left, 0)
    if right >= 0:
        end = tl.minimum(kv_len, offset + (row_end - 1) // group_size + right + 1)
    seen = end > first
    kv_begin = tl.where(seen, first // kv_tile, 0)
    kv_end = tl.where(seen, (end + kv_tile - 1) // kv_tile, 0)
    if piece > 0:
        part = first_piece + local % pieces
        kv_begin = tl.maximum(kv_begin, part * piece)
        kv_end = tl.minimum(kv_end, (part + 1) * piece)
        seen = kv_end > kv_begin
        kv_begin = tl.where(seen, kv_begin, 0)
        kv_end = tl.where(seen, kv_end, 0)
    return row_begin, row_end, kv_begin, kv_end


@triton.jit
def _write_merges(
    merges, merges_at,
    lane, plan, cu_seqlens_q, kv_lens, batch, batch_steps, entry_of, slot_of, merge_of, cut_strip,
    cut_tile, cut_place, cut_slots, cut_merges, merge_slot, group_size, num_kv_heads, left, right,
    kv_tile,
    tile_rows: tl.constexpr, tile_cost: tl.constexpr, cta_count: tl.constexpr,
    cta_block: tl.constexpr, piece: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    row_stride: tl.constexpr = tile_rows[len(tile_rows) - 1]
    for base in range(0, merges, block):
        index = base + lane
        valid = index < merges
        if piece > 0:
            r = _last_at_most(merge_of, batch, batch_steps, index, 1)
            local = index - tl.load(merge_of + r, mask=valid, other=0).to(tl.int32)
            slot = tl.load(slot_of + r, mask=valid, other=0).to(tl.int32)
        else:
            by = _last_at_most(cut_merges, cta_count, cta_block // 2, index, 1) + 1
            strip = tl.load(cut_strip + by, mask=valid, other=0)
            r = _last_at_most(entry_of, batch, batch_steps, strip, num_kv_heads)
            entry = tl.load(entry_of + r, mask=valid, other=0)
            local = (strip - entry * num_kv_heads).to(tl.int32)
            slot = tl.load(merge_slot + index, mask=valid, other=0).to(tl.int32)
        q_begin, q_len, _kv_len, tile, _cost, query_tiles, pieces, _first_piece = _request(
            r, valid, cu_seqlens_q, kv_lens, group_size, left, kv_tile, tile_rows, tile_cost,
            piece,
        )  # fmt: skip
        query_tiles = tl.maximum(query_tiles, 1)
        if piece > 0:
            parts = pieces
            slot += local * pieces
        else:
            parts = tl.load(merge_slot + index + 1, mask=valid, other=0).to(tl.int32) - slot
        row_begin = (query_tiles - 1 - local // num_kv_heads) * tile
        words = plan + merges_at + index * MERGE_WORDS
        tl.store(words, tl.zeros_like(r), mask=valid)
        tl.store(words + 1, local % num_kv_heads, mask=valid)
        tl.store(words + 2, row_begin, mask=valid)
        tl.store(words + 3, tl.minimum(row_begin + tile, q_len * group_size), mask=valid)
        tl.store(words + 4, slot * row_stride, mask=valid)
        tl.store(words + 5, parts, mask=valid)
        tl.store(words + 6, row_stride, mask=valid)
        tl.store(words + 7, q_begin, mask=valid)


@triton.jit
def _drawn_place(r, back, head, valid, entry_of, batch, num_kv_heads, together):
    """Where a strip stands among whole ones; back: query tiles of its request that come after it."""
    end_of_section = batch - (batch - 1 - r) // together * together
    section = tl.maximum(end_of_section - together, 0)
    before = tl.load(entry_of + section, mask=valid, other=0).to(tl.int32)
    begin = before
    tile = tl.load(entry_of + r + 1, mask=valid, other=0).to(tl.int32)
    tile = tile - tl.load(entry_of + r, mask=valid, other=0).to(tl.int32) - 1 - back
    for i in range(together):
        other = section + i
        exists = valid & (other < end_of_section)
        end = tl.load(entry_of + other + 1, mask=exists, other=0).to(tl.int32)
        tiles = tl.where(exists, end - begin, 0)
        before += tl.maximum(tiles - 1 - tile, 0) + tl.where((other < r) & (tiles > tile), 1, 0)
        begin = end
    return before * num_kv_heads + head


@triton.jit
def _write_items(
    strips, items_at, drawn, together,
    lane, plan, cu_seqlens_q, kv_lens, batch, batch_steps, entry_of, slot_of, merge_of, cut_strip,
    cut_tile, cut_place, cut_slots, cut_merges, merge_slot, group_size, num_kv_heads, left, right,
    kv_tile,
    tile_rows: tl.constexpr, tile_cost: tl.constexpr, cta_count: tl.constexpr,
    cta_block: tl.constexpr, piece: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    row_stride: tl.constexpr = tile_rows[len(tile_rows) - 1]
    for base in range(tl.program_id(0) * block, strips + cta_count, tl.num_programs(0) * block):
        index = base + lane
        cta = _last_at_most(cut_place, cta_count, cta_block // 2, index, 1)
        strip = index - cta
        begins = tl.load(cut_strip + cta).to(tl.int32)
        ends = tl.load(cut_strip + cta + 1).to(tl.int32)
        begins_at = tl.load(cut_tile + cta).to(tl.int32)
        ends_at = tl.load(cut_tile + cta + 1).to(tl.int32)
        valid = (strip < ends) | ((strip == ends) & (ends_at > 0))
        valid = valid & ((begins < ends) | (begins_at < ends_at)) & (strip < strips)
        r = _last_at_most(entry_of, batch, batch_steps, strip.to(tl.int64), num_kv_heads)
        entry = tl.load(entry_of + r, mask=valid, other=0).to(tl.int32)
        q_begin, q_len, kv_len, tile, _cost, _query_tiles, pieces, first_piece = _request(
            r, valid, cu_seqlens_q, kv_lens, group_size, left, kv_tile, tile_rows, tile_cost, piece
        )
        of_strip = (strip - entry * num_kv_heads) // pieces
        piece_of = (strip - entry * num_kv_heads) % pieces
        head = of_strip % num_kv_heads
        local = of_strip // num_kv_heads * pieces + piece_of
        row_begin, row_end, kv_begin, kv_end = _tiles(
            local, q_len, kv_len, tile, pieces, first_piece, group_size, left, right, kv_tile, piece
        )
        continues = (strip == begins) & (begins_at > 0)
        breaks = (strip == ends) & (ends_at > 0)
        if piece > 0:
            split = pieces > 1
            slot = tl.load(slot_of + r, mask=valid, other=0).to(tl.int32)
            slot += of_strip * pieces + piece_of
            merge = tl.load(merge_of + r, mask=valid, other=0).to(tl.int32) + of_strip
        else:
            split = continues | breaks
            by = cta + tl.where(continues, 0, 1)
            slot = tl.load(cut_slots + by).to(tl.int32) - tl.where(continues, 1, 2)
            merge = tl.load(cut_merges + by).to(tl.int32) - 1
        stop = tl.where(breaks, kv_begin + ends_at, kv_end)
        place = index
        if drawn > 0:
            place = _drawn_place(
                r, of_strip // num_kv_heads, head, valid, entry_of, batch, num_kv_heads, together
            )
        words = plan + items_at + place * ITEM_WORDS
        tl.store(words, r, mask=valid)
        tl.store(words + 1, head, mask=valid)
        tl.store(words + 2, row_begin, mask=valid)
        tl.store(words + 3, row_end, mask=valid)
        tl.store(words + 4, tile, mask=valid)
        tl.store(words + 5, kv_begin + tl.where(continues, begins_at, 0), mask=valid)
        tl.store(words + 6, stop, mask=valid)
        tl.store(words + 7, tl.where(split, slot * row_stride, -1), mask=valid)
        tl.store(words + 8, tl.where(split, merge, -1), mask=valid)
        tl.store(words + 9, q_begin, mask=valid)
        tl.store(words + 10, q_len, mask=valid)
        tl.store(words + 11, kv_len, mask=valid)


@triton.jit(
    do_not_specialize=[
        *("batch", "batch_steps", "entry_capacity", "entry_steps", "merges_at", "items_at"),
        *(
            "scratch_size",
            "left",
            "right",
            "group_size",
            "num_kv_heads",
            "kv_tile",
            "item_cost",
            "together",
        ),
    ]
)
def split_kv_kernel(
    cu_seqlens_q,  # [batch + 1]
    kv_lens,  # [batch]
    plan,  # int32
    scratch,  # int64
    batch,
    batch_steps,  # the largest power of two up to batch, and to the number of entries
    entry_capacity,
    entry_steps,
    ctas_at,
    merges_at,
    items_at,
    scratch_size,
    group_size,
    num_kv_heads,
    left,
    right,
    kv_tile,
    item_cost,
    together,
    tile_rows: tl.constexpr,
    tile_cost: tl.constexpr,
    cta_count: tl.constexpr,
    cta_block: tl.constexpr,
    min_piece: tl.constexpr,
    piece: tl.constexpr,
    whole: tl.constexpr,
    block: tl.constexpr,
):
    program = tl.program_id(0)
    lane = tl.arange(0, block)
    scratch += program * scratch_size
    entry_cost = scratch  # [entries + 1] sums of costs of one head
    entry_of = entry_cost + entry_capacity + 1  # [batch + 1] first entry of each request
    slot_of = entry_of + batch + 1  # [batch + 1] first part, with fixed pieces
    merge_of = slot_of + batch + 1  # [batch + 1] first merge, with fixed pieces
    cut_strip = merge_of + batch + 1  # [cta_count + 1] each
    cut_tile = cut_strip + cta_count + 1
    cut_place = cut_tile + cta_count + 1  # strip + CTA, the index of its first item
    cut_slots = cut_place + cta_count + 1
    cut_merges = cut_slots + cta_count + 1
    merge_slot = cut_merges + cta_count + 1

    # Requests: how many entries each has.
    entries = tl.zeros([], tl.int32)
    slots = tl.zeros([], tl.int32)
    merges = tl.zeros([], tl.int32)
    for base in range(0, batch + 1, block):
        r = base + lane
        valid = r < batch
        _begin, q_len, kv_len, tile, cost, query_tiles, pieces, first_piece = _request(
            r, valid, cu_seqlens_q, kv_lens, group_size, left, kv_tile, tile_rows, tile_cost, piece
        )
        count = tl.where(valid, query_tiles * pieces, 0)
        tl.store(entry_of + r, entries + tl.cumsum(count, 0) - count, mask=r <= batch)
        entries += tl.sum(count, 0)
        if piece > 0:
            strips = tl.where(valid & (pieces > 1), query_tiles * num_kv_heads, 0)
            parts = strips * pieces
            tl.store(merge_of + r, merges + tl.cumsum(strips, 0) - strips, mask=r <= batch)
            tl.store(slot_of + r, slots + tl.cumsum(parts, 0) - parts, mask=r <= batch)
            merges += tl.sum(strips, 0)
            slots += tl.sum(parts, 0)
    tl.debug_barrier()

    # Entries: what they cost.
    one_head = tl.zeros([], tl.int64)
    costliest = tl.zeros([], tl.int64)
    for base in range(0, entries + 1, block):
        e = base + lane
        r = _last_at_most(entry_of, batch, batch_steps, e, 1)
        valid = e < entries
        local = e - tl.load(entry_of + r, mask=valid, other=0).to(tl.int32)
        _begin, q_len, kv_len, tile, cost, query_tiles, pieces, first_piece = _request(
            r, valid, cu_seqlens_q, kv_lens, group_size, left, kv_tile, tile_rows, tile_cost, piece
        )
        _rows, _end, kv_begin, kv_end = _tiles(
            local, q_len, kv_len, tile, pieces, first_piece, group_size, left, right, kv_tile, piece
        )
        clocks = tl.where(valid, item_cost + (kv_end - kv_begin) * cost.to(tl.int64), 0)
        tl.store(entry_cost + e, one_head + tl.cumsum(clocks, 0) - clocks, mask=e <= entries)
        one_head += tl.sum(clocks, 0)
        costliest = tl.maximum(costliest, tl.max(clocks, 0))
    tl.debug_barrier()

    # Cuts: where each CTA's share begins.
    total = one_head * num_kv_heads
    used = total // (item_cost + min_piece * tile_cost[0])
    used = tl.minimum(tl.maximum(used, 1), cta_count)
    drawn = tl.zeros([], tl.int32)
    if whole > 0:
        uncut = (entries > 0) & (costliest * whole * cta_count <= total)
        drawn = tl.where(uncut, entries * num_kv_heads, 0)
        used = tl.where(uncut, 1, used)
    cta = tl.arange(0, cta_block)
    place = tl.minimum(cta, used) * total // used
    inside = place < total
    first = tl.zeros([cta_block], tl.int32)
    step = batch_steps
    while step > 0:
        candidate = first + step
        exists = candidate < batch
        entry = tl.load(entry_of + candidate, mask=exists, other=0)
        value = tl.load(entry_cost + entry, mask=exists, other=0) * num_kv_heads
        first = tl.where(exists & (value <= place), candidate, first)
        step = step // 2
    r = first
    entry = tl.load(entry_of + r, mask=inside, other=0)
    _q_begin, q_len, kv_len, tile, cost, query_tiles, pieces, first_piece = _request(
        r, inside, cu_seqlens_q, kv_lens, group_size, left, kv_tile, tile_rows, tile_cost, piece
    )
    key = tl.where(inside, place, 0)
    e = _last_at_most(entry_cost, entries, entry_steps, key, num_kv_heads)
    e = tl.where(inside, e, entry.to(tl.int32))
    tile_begin = entry + (e - entry) // pieces * pieces
    tile_before = tl.load(entry_cost + tile_begin, mask=inside, other=0)
    width = tl.load(entry_cost + tile_begin + pieces, mask=inside, other=1) - tile_before
    offset = tl.where(inside, place - tile_before * num_kv_heads, 0)
    head = offset // width
    offset -= head * width
    if piece > 0:
        key = tl.where(inside, tile_before + offset, 0)
        e = _last_at_most(entry_cost, entries, entry_steps, key, 1)
        offset -= tl.load(entry_cost + e, mask=inside, other=0) - tile_before
    local = tl.where(inside, e - entry, 0).to(tl.int32)
    strip = entry + local // pieces * pieces
    strip = strip * num_kv_heads + head * pieces + local % pieces
    _row_begin, _row_end, kv_begin, kv_end = _tiles(
        local, q_len, kv_len, tile, pieces, first_piece, group_size, left, right, kv_tile, piece
    )
    tiles = kv_end - kv_begin
    at = (tl.maximum(offset - item_cost, 0) + cost // 2) // cost
    at = tl.where((at < min_piece), 0, tl.where(tiles - at >= min_piece, at, -1))
    nearer = tl.where(2 * offset < item_cost + tiles.to(tl.int64) * cost, 0, -1)
    at = nearer.to(at.dtype) if piece > 0 else tl.where(tiles < 2 * min_piece, nearer, at)
    strip = tl.where(inside, strip + (at < 0), entries.to(tl.int64) * num_kv_heads)
    at = tl.where(inside, tl.maximum(at, 0), 0)
    exists = cta <= cta_count
    tl.store(cut_strip + cta, strip, mask=exists)
    tl.store(cut_tile + cta, at, mask=exists)
    tl.store(cut_place + cta, strip + cta, mask=exists)
    tl.debug_barrier()

    # Parts and merges: numbered by the cuts inside of strips.
    earlier = exists & (cta > 0)
    last_strip = tl.load(cut_strip + cta - 1, mask=earlier, other=-1)
    last_at = tl.load(cut_tile + cta - 1, mask=earlier, other=0)
    new = exists & (at > 0) & ((strip != last_strip) | (at != last_at))
    opens = new & ~((last_at > 0) & (strip == last_strip))
    slots_so_far = tl.cumsum(new.to(tl.int32) + opens.to(tl.int32), 0)
    merges_so_far = tl.cumsum(opens.to(tl.int32), 0)
    if piece == 0:
        tl.store(cut_slots + cta, slots_so_far, mask=exists)
        tl.store(cut_merges + cta, merges_so_far, mask=exists)
        tl.store(merge_slot + merges_so_far - 1, slots_so_far - 2, mask=opens)
        slots = tl.sum(new.to(tl.int32) + opens.to(tl.int32), 0)
        merges = tl.sum(opens.to(tl.int32), 0)
        tl.store(merge_slot + merges, slots.to(tl.int64))
    is_cta = cta < cta_count
    next_strip = tl.load(cut_strip + cta + 1, mask=is_cta, other=0)
    next_at = tl.load(cut_tile + cta + 1, mask=is_cta, other=0)
    some = is_cta & ((strip < next_strip) | ((strip == next_strip) & (at < next_at)))
    count = tl.where(some, next_strip + (next_at > 0) - strip, 0).to(tl.int32)
    if program == 0:
        tl.store(plan + ctas_at + cta * 2, (strip + cta).to(tl.int32), mask=is_cta)
        tl.store(plan + ctas_at + cta * 2 + 1, count, mask=is_cta)
        tl.store(plan, merges)
        tl.store(plan + 1, tl.sum(count, 0))
        tl.store(plan + 2, used.to(tl.int32))
        tl.store(plan + 3, entries * num_kv_heads)
        tl.store(plan + 4, 0)
        tl.store(plan + 5, drawn)
        tl.store(plan + 6, 0)
        tl.store(plan + 7, 0)
    tl.debug_barrier()

    if program == 0:
        _write_merges(
            merges, merges_at,
            lane, plan, cu_seqlens_q, kv_lens, batch, batch_steps, entry_of, slot_of, merge_of,
            cut_strip, cut_tile, cut_place, cut_slots, cut_merges, merge_slot, group_size,
            num_kv_heads, left, right, kv_tile, tile_rows, tile_cost, cta_count, cta_block, piece,
            block,
        )  # fmt: skip
    _write_items(
        entries * num_kv_heads, items_at, drawn, together,
        lane, plan, cu_seqlens_q, kv_lens, batch, batch_steps, entry_of, slot_of, merge_of,
        cut_strip, cut_tile, cut_place, cut_slots, cut_merges, merge_slot, group_size,
        num_kv_heads, left, right, kv_tile, tile_rows, tile_cost, cta_count, cta_block, piece,
        block,
    )  # fmt: skip


def split_kv(
    cu_seqlens_q: Tensor,  # [batch + 1]
    kv_lens: Tensor,  # [batch]
    split: list[int],
    first: Tensor | None = None,  # [groups + 1]
    shared: Tensor | None = None,  # [groups]
) -> Tensor:
    spec = SplitSpec.from_numbers(split)
    layout = Layout(spec)
    batch = kv_lens.shape[0]
    plan = torch.empty(layout.size, dtype=torch.int32, device=kv_lens.device)
    cta_block = max(HEADER_WORDS, triton.next_power_of_2(spec.num_ctas + 1))
    most_rows = spec.max_q_len * spec.group_size
    one_tile = not spec.piece and not spec.whole and most_rows <= spec.tile_rows[-1]
    if spec.groups or (one_tile and batch <= MOST_SINGLE and len(spec.tile_rows) <= 4):
        _split_single(cu_seqlens_q, kv_lens, first, shared, plan, spec, layout)
        return plan
    scratch_size = layout.entries + 1 + 3 * (batch + 1) + 6 * (spec.num_ctas + 2)
    programs = min(MOST_PROGRAMS, triton.cdiv(layout.item_capacity, BLOCK))
    scratch = torch.empty(programs * scratch_size, dtype=torch.int64, device=kv_lens.device)
    with torch.cuda.device(kv_lens.device) if kv_lens.is_cuda else torch.no_grad():
        split_kv_kernel[(programs,)](
            cu_seqlens_q.contiguous(),
            kv_lens.contiguous(),
            plan,
            scratch,
            batch,
            largest_power(batch),
            layout.entries,
            largest_power(layout.entries),
            layout.ctas,
            layout.merges,
            layout.items,
            scratch_size,
            spec.group_size,
            spec.num_kv_heads,
            spec.left,
            spec.right,
            spec.kv_tile,
            spec.item_cost,
            spec.together,
            tile_rows=spec.tile_rows,
            tile_cost=spec.tile_cost,
            cta_count=spec.num_ctas,  # Triton takes num_ctas for itself
            cta_block=cta_block,
            min_piece=spec.min_piece,
            piece=spec.piece,
            whole=0 if spec.piece else spec.whole,
            block=BLOCK,
            num_warps=8,
        )
    return plan


def _split_single(
    cu_seqlens_q: Tensor,
    kv_lens: Tensor,
    first: Tensor | None,
    shared: Tensor | None,
    plan: Tensor,
    spec: SplitSpec,
    layout: Layout,
) -> None:
    costs = [*spec.tile_cost, 0, 0, 0][:4]
    batch = kv_lens.shape[0]
    lanes = SHARING_LANES if spec.groups else SINGLE_LANES
    programs = max(1, min(MOST_SINGLE_PROGRAMS, triton.cdiv(layout.item_capacity, SINGLE_BLOCK)))
    with torch.cuda.device(kv_lens.device) if kv_lens.is_cuda else torch.no_grad():
        split_kv_single_kernel[(2 + programs,)](
            cu_seqlens_q.contiguous(),
            kv_lens.contiguous(),
            cu_seqlens_q if first is None else first.contiguous(),
            kv_lens if shared is None else shared.contiguous(),
            plan,
            batch,
            spec.groups,
            layout.ctas,
            layout.merges,
            layout.items,
            spec.group_size,
            spec.num_kv_heads,
            spec.left,
            spec.kv_tile.bit_length() - 1,
            spec.item_cost,
            *costs,
            spec.min_piece,
            spec.least_saved,
            spec.tokens,
            layout.cut_rows,
            tile_rows=spec.tile_rows,
            cta_count=spec.num_ctas,
            cta_block=max(HEADER_WORDS, triton.next_power_of_2(spec.num_ctas)),
            lanes=next(n for n in lanes if n >= batch + spec.groups),
            block=SINGLE_BLOCK,
            shares=spec.groups > 0,
            num_warps=8,
        )


def largest_power(n: int) -> int:
    """The largest power of two up to n; 0 for 0."""
    return 1 << n.bit_length() >> 1


def supports(call: object) -> str | None:
    device = getattr(call, "device", "cuda")
    return None if device == "cuda" or INTERPRETED else f"it needs a GPU, not a {device}"


KERNELS = {"split_kv": Kernel(split_kv, supports, efficiency=0.5)}
assert HEADER_WORDS == 8  # as many as the kernel writes
