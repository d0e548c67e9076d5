"""The producer's role: one warp that walks the CTA's items and loads their keys and values."""
# mypy: disable-error-code="no-untyped-def,assignment"

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from rooftile.kernels.gluon.paged.work import (
    ITEM_WORDS,
    KV_BEGIN,
    KV_END,
    KV_HEAD,
    KV_LEN,
    MERGE,
    PARTIAL_ROW,
    Q_BEGIN,
    Q_LEN,
    REQUEST,
    ROW_BEGIN,
    ROW_END,
)
from rooftile.kernels.gluon.tile.mma import GROUP_ROWS
from rooftile.kernels.gluon.tile.pages import packed_corner
from rooftile.kernels.gluon.tile.ring import first_fill


@gluon.jit
def _valid_rows(work, key, first_key, kv_len, rows: gl.constexpr):
    """How many of the keys from `key` on a box takes; none where it holds no key in sight."""
    valid = gl.minimum(gl.maximum(kv_len - key, 0), rows)
    if work.has_left:
        valid = gl.where(key + rows <= first_key, 0, valid)
    return valid


@gluon.jit
def _look_up(work, table, tile, first_key, kv_len, pages: gl.constexpr):
    """The pages of the boxes of a KV tile, as a tuple; entries without a key in sight are not read."""
    rows: gl.constexpr = work.block // pages
    found = ()
    for p in gl.static_range(pages):
        needed = _valid_rows(work, tile * work.block + p * rows, first_key, kv_len, rows) > 0
        entry = tile * pages + p if pages > 1 else tile // (work.page_size // work.block)
        found = found + (gl.load(table + entry, mask=needed, other=0),)  # noqa: RUF005
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
            ring.load(fill, p, desc, found[p] * pitch + inside, kv_head, rows)
    else:
        for p in gl.static_range(pages):
            valid = _valid_rows(work, tile * work.block + p * rows, first_key, kv_len, rows)
            ring.load(fill, p, desc, found[p] * pitch + inside, kv_head, valid)


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
def _load_next(
    work, k_desc, v_desc, k_ring, v_ring, fill, found, table, tile, first_tile, first_key, kv_len,
    kv_head, pages: gl.constexpr,
):  # fmt: skip
    """Loads a KV tile, whose pages are found; returns the fill and the pages of the one before it."""
    # The next tile's pages are looked up while this one's stages are waited for.
    before = _look_up(work, table, gl.maximum(tile - 1, first_tile), first_key, kv_len, pages)
    seen = (first_key, kv_len, kv_head)
    _load_tile(work, k_ring, fill, k_desc, found, tile, *seen, work.k_pitch, pages)
    _load_tile(work, v_ring, fill, v_desc, found, tile, *seen, work.v_pitch, pages)
    return k_ring.after(fill), before


@gluon.jit
def load_items(work, queue, q_desc, k_desc, v_desc, q_ring, k_ring, v_ring):
    """Tells the consumers what each item is, and loads it, last keys first."""
    pages: gl.constexpr = k_ring.pages
    fill = first_fill()
    slot = first_fill()
    turn = first_fill()
    item, count = work.items()
    for _ in range(count):
        request = gl.load(item + REQUEST)
        kv_head = gl.load(item + KV_HEAD)
        row_begin = gl.load(item + ROW_BEGIN)
        row_end = gl.load(item + ROW_END)
        kv_begin = gl.load(item + KV_BEGIN)
        kv_end = gl.load(item + KV_END)
        partial_row = gl.load(item + PARTIAL_ROW)
        merge = gl.load(item + MERGE)
        q_begin = gl.load(item + Q_BEGIN)
        q_len = gl.load(item + Q_LEN)
        kv_len = gl.load(item + KV_LEN)
        item += ITEM_WORDS
        tiles = kv_end - kv_begin
        table = work.page_table + gl.cast(request, gl.int64) * work.table_stride
        first_key = 0
        if work.has_left:
            first_key = kv_len - q_len + row_begin // work.group_size - work.left
        found = _look_up(work, table, gl.maximum(kv_end - 1, 0), first_key, kv_len, pages)
        queue.send(
            slot,
            (
                1,
                tiles,
                kv_end - 1,
                kv_head,
                row_begin,
                row_end,
                partial_row,
                q_begin,
                q_len,
                kv_len,
                merge,
            ),
        )
        slot = queue.after(slot)
        seen = (first_key, kv_len, kv_head)
        if work.rotations == 1:
            if work.packed > 0:
                turn = _fetch_queries(
                    work, q_ring, q_desc, turn, 0, kv_head, row_begin, q_begin, q_len
                )
            for i in range(tiles):
                fill, found = _load_next(
                    work, k_desc, v_desc, k_ring, v_ring, fill, found, table, kv_end - 1 - i,
                    kv_begin, *seen, pages,
                )  # fmt: skip
        else:
            rotation, border = work.first_rotation(kv_end - 1, kv_len)
            for _run in range(work.runs(rotation, kv_begin, kv_len)):
                if work.packed > 0:
                    turn = _fetch_queries(
                        work, q_ring, q_desc, turn, rotation, kv_head, row_begin, q_begin, q_len
                    )
                run_begin = gl.maximum(border, kv_begin)
                for i in range(kv_end - run_begin):
                    fill, found = _load_next(
                        work, k_desc, v_desc, k_ring, v_ring, fill, found, table, kv_end - 1 - i,
                        kv_begin, *seen, pages,
                    )  # fmt: skip
                kv_end = run_begin
                rotation, border = work.next_rotation(rotation, border)
    queue.send(slot, (0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0))
