"""A ring whose stages hold both operands of one step along K, filled by TMA under one barrier.

    ring = new_operand_ring(a_desc, b_desc, a_rows=64, b_boxes=1, ...)
    at = first_fill()                          at = first_fill()

    # producer                                 # each of the two consumers
    for i in range(n):                         for i in range(n):
        ring.acquire(at)                           ring.arrived(at)
        ring.load_a(at, a_desc, [row, i])          acc = multiply(ring.a(at), ring.b(at, 0), acc)
        ring.load_b(at, 0, b_desc, [col, i])       acc = wait(0, deps=[acc])
        at = ring.after(at)                        ring.release(at)
                                                   at = ring.after(at)

The right operand may consist of several boxes.
"""
# mypy: disable-error-code="no-untyped-def"

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from rooftile.kernels.gluon.tile.record import record
from rooftile.kernels.gluon.tile.ring import Fill
from rooftile.kernels.triton_version import tma_load


@record
class OperandRing:
    """Stages with their barriers; see the module for its use."""

    a_tiles: gl.shared_memory_descriptor  # [stages, rows, columns]
    b_tiles: gl.shared_memory_descriptor  # [stages, boxes * rows, columns] or [stages * boxes, ...]
    full: gl.shared_memory_descriptor  # [stages, 1] barriers: all boxes have landed
    empty: gl.shared_memory_descriptor  # [stages, 1] barriers: every consumer is done
    stages: gl.constexpr
    bytes: gl.constexpr  # of a stage
    b_boxes: gl.constexpr
    b_rows: gl.constexpr  # of a box
    b_joined: gl.constexpr

    @gluon.jit
    def after(self, at):
        """The fill that follows `at`."""
        last = at.stage == self.stages - 1
        return Fill(gl.where(last, 0, at.stage + 1), gl.where(last, at.phase ^ 1, at.phase))

    @gluon.jit
    def acquire(self, at):
        """Producer: waits until the stage of this fill is free, and announces its bytes."""
        mbarrier.wait(self.empty.index(at.stage), at.phase ^ 1)
        mbarrier.expect(self.full.index(at.stage), self.bytes)

    @gluon.jit
    def load_a(self, at, desc, coordinates):
        """Producer: starts the copy of the left operand."""
        target = self.a_tiles.index(at.stage).slice(0, desc.block_shape[0], 0)
        tma_load(desc, coordinates, self.full.index(at.stage), target)

    @gluon.jit
    def load_b(self, at, box: gl.constexpr, desc, coordinates):
        """Producer: starts the copy of one box of the right operand."""
        tma_load(desc, coordinates, self.full.index(at.stage), self.b(at, box))

    @gluon.jit
    def arrived(self, at, pred=True):
        """Consumer: waits until both operands have landed (does nothing where pred is false)."""
        mbarrier.wait(self.full.index(at.stage), at.phase, pred=pred)

    @gluon.jit
    def a(self, at):
        """The left operand of this fill."""
        return self.a_tiles.index(at.stage)

    @gluon.jit
    def b(self, at, box: gl.constexpr):
        """One box of the right operand."""
        if self.b_joined:
            return self.b_tiles.index(at.stage).slice(box * self.b_rows, self.b_rows, 0)
        else:
            return self.b_tiles.index(at.stage * self.b_boxes + box)

    @gluon.jit
    def whole_b(self, at):
        """All boxes of the right operand, where they are joined."""
        return self.b_tiles.index(at.stage)

    @gluon.jit
    def release(self, at):
        """Consumer: this fill will not be read again."""
        mbarrier.arrive(self.empty.index(at.stage), count=1)


@gluon.jit
def new_operand_ring(
    a_desc,
    b_desc,
    a_rows: gl.constexpr,
    b_boxes: gl.constexpr,
    b_joined: gl.constexpr,
    stages: gl.constexpr,
    consumers: gl.constexpr,
):
    """Allocates a ring for boxes of two descriptors of two dimensions and initialises its barriers.

    a_rows: of the left operand's tile; the rows after those of its box stay as they are.
    b_joined: the boxes of the right operand follow each other along their rows, which must be of
        128 bytes at most, and can be read as one tile.
    consumers: how many releases free a stage. A fence must follow before roles split.
    """
    b_rows: gl.constexpr = b_desc.block_shape[0]
    b_shape: gl.constexpr = (
        [stages, b_boxes * b_rows, b_desc.block_shape[1]]
        if b_joined
        else [stages * b_boxes, b_rows, b_desc.block_shape[1]]
    )
    a_tiles = gl.allocate_shared_memory(
        a_desc.dtype,
        [stages, a_rows, a_desc.block_shape[1]],
        a_desc.layout,
    )
    b_tiles = gl.allocate_shared_memory(b_desc.dtype, b_shape, b_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [stages, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [stages, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(stages):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=consumers)
    size: gl.constexpr = a_desc.block_type.nbytes + b_boxes * b_desc.block_type.nbytes
    return OperandRing(a_tiles, b_tiles, full, empty, stages, size, b_boxes, b_rows, b_joined)
