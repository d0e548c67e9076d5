"""The producer's role: one warp that walks the CTA's items and loads their keys and values."""
# mypy: disable-error-code="no-untyped-def,assignment"

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from rooftile.kernels.gluon.paged.work import (
    FIRST_ROW,
    HEAD,
    JOINED_BY,
    KEYS,
    KV_BEGIN,
    KV_END,
    KV_HEAD,
    KV_LEN,
    LANES,
    LAST,
    MERGE,
    MORE,
    OF_REQUEST,
    PARTIAL_ROW,
    Q_BEGIN,
    Q_LEN,
    QUERIES,
    READ_AGAIN,
    REQUEST,
    ROW_BEGIN,
    ROW_END,
    TILES,
    TOKEN,
    WARP,
    pick,
)
from rooftile.kernels.gluon.tile.mma import GROUP_ROWS
from rooftile.kernels.gluon.tile.pages import packed_corner
from rooftile.kernels.gluon.tile.policy import first_to_leave
from rooftile.kernels.gluon.tile.ring import first_fill


@gluon.jit
def _valid_rows(work, key, first_key, kv_len, rows: gl.constexpr):
    """How many of the keys from `key` on a box takes; none where it holds no key in sight."""
    valid = gl.minimum(gl.maximum(kv_len - key, 0), rows)
    if work.has_left:
        valid = gl.where(key + rows <= first_key, 0, valid)
    return valid


@gluon.jit
def _window(work, table, number, first_key, kv_len):
    """Entries 32 * number .. 32 * number + 31 of a page table [32], one a lane, in one load.

    Entries without a key in sight are not read.
    """
    entry = number * WARP + gl.arange(0, WARP, LANES)
    seen = (entry >= 0) & (entry * work.page_size < kv_len)
    if work.has_left:
        seen = seen & ((entry + 1) * work.page_size > first_key)
    return gl.load(table + entry, mask=seen, other=0)


@gluon.jit
def _pages_of(entry, window, boxes: gl.constexpr):
    """Which pages entries `entry` and following are, as a tuple; `window` holds them."""
    found = ()
    for p in gl.static_range(boxes):
        found = found + (pick(window, (entry + p) % WARP),)  # noqa: RUF005
    return found


@gluon.jit
def _load_tile(
    work, ring, fill, desc, found, tile, first_key, kv_len, kv_head, pitch, pages: gl.constexpr
):
    rows: gl.constexpr = work.block // pages
    inside = 0
    if pages == 1:
        inside = tile % (work.page_size // work.block) * work.block
    ring.acquire(fill)
    whole = (tile + 1) * work.block <= kv_len
    if work.has_left:
        whole = whole & (tile * work.block >= first_key)
    if whole:  # fewer numbers to work out: one warp issues all boxes
        for p in gl.static_range(pages):
            # As numbers of the kernel's: `load` is translated once, not for each box.
            row = found[p] * pitch + inside
            ring.load(fill, gl.to_tensor(p), desc, row, kv_head, gl.to_tensor(rows))
    else:
        for p in gl.static_range(pages):
            valid = _valid_rows(work, tile * work.block + p * rows, first_key, kv_len, rows)
            ring.load(fill, gl.to_tensor(p), desc, found[p] * pitch + inside, kv_head, valid)


@gluon.jit
def _fetch_queries(work, q_ring, q_desc, turn, rotation, kv_head, row_begin, q_begin, q_len):
    """Starts the copies of a tile of queries for each warpgroup; returns the turn that follows."""
    for group in gl.static_range(work.groups):
        q_fill = work.q_fill(turn, group)
        token0 = (row_begin + group * GROUP_ROWS) // work.packed
        q_ring.acquire(q_fill)
        start = q_begin + rotation * work.tokens if work.rotations > 1 else q_begin
        corner = packed_corner(kv_head * work.packed, start, q_len, token0)
        q_ring.fetch(q_fill, 0, q_desc, corner)
    return work.next_q(turn)


@gluon.jit
def _find(work, table, tile, number, window, before, first_key, kv_len, boxes: gl.constexpr):
    """The pages of a KV tile's boxes, and the windows of the table that hold them and those before."""
    tiles_of_page: gl.constexpr = work.page_size // work.block if boxes == 1 else 1
    entry = tile // tiles_of_page * boxes
    if entry // WARP != number:
        number -= 1
        window = before
        before = _window(work, table, number - 1, first_key, kv_len)
    return _pages_of(entry, window, boxes), number, window, before


@gluon.jit
def _number_of(work, tile, boxes: gl.constexpr):
    """Which window of the page table has a KV tile's pages."""
    tiles_of_page: gl.constexpr = work.page_size // work.block if boxes == 1 else 1
    return gl.maximum(tile, 0) // tiles_of_page * boxes // WARP


@gluon.jit
def _load_next(
    work, k_desc, v_desc, k_ring, v_ring, fill, table, tile, number, window, before, first_key, kv_len,
    kv_head,
):  # fmt: skip
    """Loads a KV tile; returns the fill that follows, and where in the page table it was found."""
    boxes: gl.constexpr = k_ring.pages
    found, number, window, before = _find(
        work, table, tile, number, window, before, first_key, kv_len, boxes
    )
    seen = (first_key, kv_len, kv_head)
    _load_tile(work, k_ring, fill, k_desc, found, tile, *seen, work.k_pitch, boxes)
    if work.loaders == 1:
        _load_tile(work, v_ring, fill, v_desc, found, tile, *seen, work.v_pitch, boxes)
    return k_ring.after(fill), number, window, before


@gluon.jit
def _place(work, request, last, row_begin, q_len, kv_len, boxes: gl.constexpr):
    """An item's page table, its first key in sight, and which window of the table has its last tile."""
    table = work.page_table + gl.cast(request, gl.int64) * work.table_stride
    first_key = 0
    if work.has_left:
        first_key = kv_len - q_len + row_begin // work.heads_of_group() - work.left
    return table, first_key, _number_of(work, last, boxes)


@gluon.jit
def _place_of(work, words, boxes: gl.constexpr):
    row_begin, q_len, kv_len = pick(words, ROW_BEGIN), pick(words, Q_LEN), pick(words, KV_LEN)
    last = pick(words, KV_END) - 1
    return _place(work, pick(words, REQUEST), last, row_begin, q_len, kv_len, boxes)


@gluon.jit
def _windows(work, table, first_key, number, kv_len):
    """The windows of a page table with an item's last tiles, and with those before."""
    window = _window(work, table, number, first_key, kv_len)
    return window, _window(work, table, number - 1, first_key, kv_len)


@gluon.jit
def _tell(queue, slot, words, there):
    """Tells the other roles what an item is; returns the slot that follows."""
    kv_end = pick(words, KV_END)
    queue.send(
        slot,
        (
            gl.where(there, 1, 0),
            kv_end - pick(words, KV_BEGIN),
            kv_end - 1,
            pick(words, KV_HEAD),
            pick(words, ROW_BEGIN),
            pick(words, ROW_END),
            pick(words, PARTIAL_ROW),
            pick(words, Q_BEGIN),
            pick(words, Q_LEN),
            pick(words, KV_LEN),
            pick(words, MERGE),
            pick(words, REQUEST),
        ),
    )
    return queue.after(slot)


@gluon.jit
def _look_up(work, words, boxes: gl.constexpr):
    """The windows of an item's page table, as `_windows`."""
    table, first_key, number = _place_of(work, words, boxes)
    return _windows(work, table, first_key, number, pick(words, KV_LEN))


@gluon.jit
def _announce(work, queue, slot, words, there, boxes: gl.constexpr):
    """Tells the other roles what an item is, and starts to look up its pages: in time, while all are
    busy with the item before."""
    window, before = _look_up(work, words, boxes)
    return _tell(queue, slot, words, there), window, before


@gluon.jit
def load_items(work, queue, q_desc, k_desc, v_desc, q_ring, k_ring, v_ring):
    """Tells the consumers what each item is, and loads it, last keys first."""
    boxes: gl.constexpr = k_ring.pages
    fill = first_fill()
    slot = first_fill()
    turn = first_fill()
    share, item, following, words, drawn_from, end = work.first_item()
    slot, window, before = _announce(work, queue, slot, words, share < end, boxes)
    while share < end:
        if work.passing:
            # Keys of a request are read once, those of a prefix by every query tile of its group: a few
            # at a time, or at any time.
            first_to_leave(gl.where(pick(words, MERGE) == READ_AGAIN, 0, 1))
        kv_head = pick(words, KV_HEAD)
        kv_begin = pick(words, KV_BEGIN)
        kv_end = pick(words, KV_END)
        kv_len = pick(words, KV_LEN)
        table, first_key, number = _place_of(work, words, boxes)
        queries = (kv_head, pick(words, ROW_BEGIN), pick(words, Q_BEGIN), pick(words, Q_LEN))
        if work.rotations == 1:
            tiles = kv_end - kv_begin
            if work.packed > 0 and not work.q_with_values:
                turn = _fetch_queries(work, q_ring, q_desc, turn, 0, *queries)
            next_window, next_before = window, before
            # An item without keys has a turn all the same: what follows it is found out then.
            for i in range(gl.maximum(tiles, 1)):
                if i < tiles:
                    fill, number, window, before = _load_next(
                        work, k_desc, v_desc, k_ring, v_ring, fill, table, kv_end - 1 - i, number,
                        window, before, first_key, kv_len, kv_head,
                    )  # fmt: skip
                if i == gl.maximum(gl.minimum(k_ring.ring.stages, tiles), 1) - 1:
                    # What comes next is found out when there is nothing left to do but wait.
                    share, item, following, words = work.next_item(
                        share, item, following, drawn_from, end
                    )
                    slot, next_window, next_before = _announce(
                        work, queue, slot, words, share < end, boxes
                    )
            window, before = next_window, next_before
        else:
            # No later than behind this tile the next item is told of: whoever loads values asks for it
            # after as many.
            told = kv_end - gl.maximum(gl.minimum(k_ring.ring.stages, kv_end - kv_begin), 1)
            rotation, border = work.first_rotation(kv_end - 1, kv_len)
            next_words = words
            for _run in range(work.runs(rotation, kv_begin, kv_len)):
                # Read off the item once more: the loop has no registers to spare.
                if work.packed > 0:
                    row_begin, q_begin = pick(words, ROW_BEGIN), pick(words, Q_BEGIN)
                    q_len = pick(words, Q_LEN)
                    turn = _fetch_queries(
                        work, q_ring, q_desc, turn, rotation, kv_head, row_begin, q_begin, q_len
                    )
                run_begin = gl.maximum(border, pick(words, KV_BEGIN))
                for i in range(gl.maximum(kv_end - run_begin, 1)):
                    tile = kv_end - 1 - i
                    if tile >= run_begin:  # an item without keys has a turn all the same
                        fill, number, window, before = _load_next(
                            work, k_desc, v_desc, k_ring, v_ring, fill, table, tile, number,
                            window, before, first_key, kv_len, kv_head,
                        )  # fmt: skip
                    if tile == told:
                        share, item, following, next_words = work.next_item(
                            share, item, following, drawn_from, end
                        )
                        slot = _tell(queue, slot, next_words, share < end)
                kv_end = run_begin
                rotation, border = work.next_rotation(rotation, border)
            words = next_words
            window, before = _look_up(work, words, boxes)
    work.finish()


@gluon.jit
def _place_in(work, queue, slot, boxes: gl.constexpr):
    """`_place` of an item whose message has arrived."""
    q_len = queue.field_of_warp(slot, QUERIES)
    kv_len = queue.field_of_warp(slot, KEYS)
    row_begin = queue.field_of_warp(slot, FIRST_ROW)
    last = queue.field_of_warp(slot, LAST)
    request = queue.field_of_warp(slot, OF_REQUEST)
    return _place(work, request, last, row_begin, q_len, kv_len, boxes)


@gluon.jit
def _next_values(work, queue, slot, boxes: gl.constexpr):
    """Waits for the message of the next item, and starts to look up its pages."""
    queue.arrived(slot)
    table, first_key, number = _place_in(work, queue, slot, boxes)
    return _windows(work, table, first_key, number, queue.field_of_warp(slot, KEYS))


@gluon.jit
def load_values(work, queue, q_desc, v_desc, q_ring, v_ring):
    """Loads the values of every item that `load_items` tells of, and its queries where they have one
    stage: keys then need not wait until those of the item before are done with."""
    boxes: gl.constexpr = v_ring.pages
    fill = first_fill()
    slot = first_fill()
    turn = first_fill()
    window, before = _next_values(work, queue, slot, boxes)
    more = queue.field_of_warp(slot, MORE)
    while more > 0:
        if work.passing:
            first_to_leave(gl.where(queue.field_of_warp(slot, JOINED_BY) == READ_AGAIN, 0, 1))
        tiles = queue.field_of_warp(slot, TILES)
        last = queue.field_of_warp(slot, LAST)
        kv_head = queue.field_of_warp(slot, HEAD)
        kv_len = queue.field_of_warp(slot, KEYS)
        table, first_key, number = _place_in(work, queue, slot, boxes)
        if work.packed > 0 and work.q_with_values:
            row_begin = queue.field_of_warp(slot, FIRST_ROW)
            q_begin = queue.field_of_warp(slot, TOKEN)
            q_len = queue.field_of_warp(slot, QUERIES)
            turn = _fetch_queries(work, q_ring, q_desc, turn, 0, kv_head, row_begin, q_begin, q_len)
        queue.release(slot)
        slot = queue.after(slot)
        next_window, next_before = window, before
        for i in range(gl.maximum(tiles, 1)):
            if i < tiles:
                found, number, window, before = _find(
                    work, table, last - i, number, window, before, first_key, kv_len, boxes
                )
                seen = (first_key, kv_len, kv_head)
                _load_tile(work, v_ring, fill, v_desc, found, last - i, *seen, work.v_pitch, boxes)
                fill = v_ring.after(fill)
            if i == gl.maximum(gl.minimum(v_ring.ring.stages, tiles), 1) - 1:
                next_window, next_before = _next_values(work, queue, slot, boxes)
        window, before = next_window, next_before
        more = queue.field_of_warp(slot, MORE)
