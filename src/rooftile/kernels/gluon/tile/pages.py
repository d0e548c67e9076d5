"""Tiles of keys gathered from pages by the copy engine, several boxes to a stage.

A pool of pages [num_pages, heads, page_size, dim] is a ragged tensor (rows.py) in which every page
is a sequence: a box is a page's rows, or a part of them, and 128 bytes of columns, and the copy
engine fills with zeros what lies past the last valid row. So a tile of keys never holds what an
unused slot of a page holds, and a page that is not wanted is a box of zeros that reads no memory.

    ring = new_page_ring(desc, 64, 128, stages=6, consumers=1)

    # producer                                            # consumer, as with any Ring
    ring.acquire(at)                                      ring.arrived(at)
    for p in gl.static_range(ring.pages):                 s = multiply(q, ring.tile(at)...)
        row = page_id * page_rows + row_in_page           ring.release(at)
        ring.load(at, p, desc, row, head, valid_rows)

The boxes of a stage lie in shared memory as the swizzled layout of the whole tile wants them:
128 bytes of columns at a time, and within these the rows of page after page.
"""
# mypy: disable-error-code="no-untyped-def"

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from rooftile.kernels.gluon.launch import Box
from rooftile.kernels.gluon.tile.record import record
from rooftile.kernels.gluon.tile.ring import Ring
from rooftile.kernels.gluon.tile.rows import (
    RAGGED_END,
    describe_ragged,
    is_addressable,
    shared_layout,
)
from rooftile.kernels.triton_version import tma_load, tma_store

BOX_BYTES = 128  # columns of a box: the width of the swizzle


@record
class PageRing:
    """A ring whose stages are filled by several boxes; see the module for its use."""

    ring: Ring
    boxes: gl.shared_memory_descriptor  # [stages * halves * pages, *box of the descriptor]
    pages: gl.constexpr  # boxes along the keys
    halves: gl.constexpr  # boxes along the columns
    box_columns: gl.constexpr
    columns: gl.constexpr  # of a tile
    bytes: gl.constexpr  # of a stage

    @gluon.jit
    def start(self, i: gl.constexpr, consumers: gl.constexpr):
        """Initialises the barriers of stage i, if there is one."""
        self.ring.start(i, consumers)

    @gluon.jit
    def after(self, at):
        return self.ring.after(at)

    @gluon.jit
    def acquire(self, at):
        """Producer: waits until the stage of this fill is free, and announces its bytes."""
        self.ring.acquire(at)
        mbarrier.expect(self.ring.full.index(at.stage), self.bytes)

    @gluon.jit
    def load(self, at, page, desc, row, head, valid):
        """Producer: starts the copy of the stage's box number `page` along the keys.

        row: the page's first row, counted from the pool's first in rows of one head.
        valid: rows that are copied; the others become zeros. 0: nothing is read.
        """
        self.fetch(at, page, desc, (RAGGED_END, row + valid, head, RAGGED_END - valid))

    @gluon.jit
    def fetch(self, at, page, desc, corner):
        """Producer: starts the copy of box number `page`; corner: without the column."""
        full = self.ring.full.index(at.stage)
        for half in gl.static_range(self.halves):
            target = self.boxes.index((at.stage * self.halves + half) * self.pages + page)
            tma_load(desc, corner + (half * self.box_columns,), full, target)  # noqa: RUF005

    @gluon.jit
    def put(self, stage, desc, corner):
        """Consumer: starts the copy of a tile of one box along the rows out of a stage."""
        for half in gl.static_range(self.halves):
            box = self.boxes.index(stage * self.halves + half)
            tma_store(desc, corner + (half * self.box_columns,), box)  # noqa: RUF005

    @gluon.jit
    def arrived(self, at, pred=True):
        self.ring.arrived(at, pred)

    @gluon.jit
    def tile(self, at):
        return self.ring.tile(at)

    @gluon.jit
    def release(self, at):
        """Consumer: this fill will not be read again."""
        self.ring.release(at)

    @gluon.jit
    def release_where(self, at, pred):
        """`release`, if pred is true, of a ring whose stages a warpgroup releases as one."""
        mbarrier.arrive(self.ring.empty.index(at.stage), count=1, pred=pred)


@gluon.constexpr_function
def _rows_of_box(box):
    rows = 1
    for n in box[:-1]:
        rows *= n
    return rows


@gluon.jit
def new_page_ring(
    desc,
    rows: gl.constexpr,
    columns: gl.constexpr,
    stages: gl.constexpr,
    consumers: gl.constexpr,
    by_threads: gl.constexpr = False,
):
    """Allocates a ring of tiles [rows, columns] filled by boxes of `desc` (describe_pages).

    consumers: how many releases free a stage; by_threads: see `Ring.release`. A fence must follow before
    roles split.
    """
    ring = allocate_page_ring(desc, rows, columns, stages, by_threads)
    for i in gl.static_range(stages):
        ring.start(i, consumers)
    return ring


@gluon.jit
def allocate_page_ring(
    desc,
    rows: gl.constexpr,
    columns: gl.constexpr,
    stages: gl.constexpr,
    by_threads: gl.constexpr = False,
):
    """A ring whose barriers are not initialised, see `allocate_ring`."""
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([rows, columns], desc.dtype)
    buffers = gl.allocate_shared_memory(desc.dtype, [stages, rows, columns], layout)
    full = gl.allocate_shared_memory(gl.int64, [stages, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [stages, 1], mbarrier.MBarrierLayout())
    pages: gl.constexpr = rows // _rows_of_box(desc.block_shape)
    halves: gl.constexpr = columns // desc.block_shape[4]
    boxes = buffers._reinterpret(
        desc.dtype,
        [stages * halves * pages] + desc.block_shape,  # noqa: RUF005
        desc.layout,
    )
    ring = Ring(buffers, full, empty, stages, rows, columns, by_threads)
    size: gl.constexpr = pages * halves * desc.block_type.nbytes
    return PageRing(ring, boxes, pages, halves, desc.block_shape[4], columns, size)


def describe_pages(
    pages: Tensor,  # [num_pages, heads, page_size, dim]
    block: int,
) -> Box:
    """The descriptor of a pool for tiles of `block` keys; `page_pitch` must not be None."""
    columns = BOX_BYTES // pages.element_size()
    rows = pages[0].transpose(0, 1)  # of a page; all are alike
    return describe_ragged(rows, min(block, pages.shape[2]), columns)


def page_pitch(pages: Tensor) -> int | None:
    """Rows of one head from a page to the next, where the copy engine can walk the pool.

    pages: [num_pages, heads, page_size, dim], page_size > 1.
    """
    page_stride, _, stride, _ = pages.stride()
    steps = [x for x, size in zip(pages.stride(), pages.shape, strict=True) if size > 1][:-1]
    whole = all(x * pages.element_size() % 16 == 0 for x in steps)
    return (
        page_stride // stride
        if whole and is_addressable(pages) and page_stride % stride == 0
        else None
    )


def describe_packed(
    x: Tensor,  # [tokens, heads, dim]
    group_size: int,  # a power of two up to box_rows
    box_rows: int,
) -> Box:
    """The descriptor of packed rows: a box is box_rows / group_size tokens of group_size heads.

    A corner is `packed_corner`, and what lies past the end of a request is clipped.
    """
    ragged = describe_ragged(x, box_rows, BOX_BYTES // x.element_size())
    (wrap, start, heads, end, dim), (*_, head_stride, stride, one) = ragged.shape, ragged.strides
    box = (1, 1, box_rows // group_size, group_size, ragged.block_shape[-1])
    strides = (*ragged.strides[:2], stride, head_stride, one)
    return Box((wrap, start, end, heads, dim), strides, box, shared_layout(x.dtype, *box))


@gluon.jit
def packed_corner(head, start, length, token):
    """Where token `token` of a request begins: head: the first of the group; start: the request's
    first token, length: how many it has."""
    return (RAGGED_END, start + length, RAGGED_END - length + token, head)
