"""A ring of shared-memory stages that a producer fills by TMA and consumers empty, in order.

    ring = new_ring(desc, 64, 128, stages=2, consumers=2)
    at = first_fill()                          at = first_fill()

    # producer                                 # each of the two consumers
    for i in range(n):                         for i in range(n):
        ring.acquire(at)                           ring.arrived(at)
        ring.load(at, desc, [row(i), 0])           acc = multiply(a, ring.tile(at), acc)
        at = ring.after(at)                        acc = wait(0, deps=[acc])
                                                   ring.release(at)
                                                   at = ring.after(at)

A `Fill` says which stage comes next and in which phase its barriers are; each role keeps its own
and carries it from tile to tile of a persistent loop.
"""
# mypy: disable-error-code="no-untyped-def"

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from rooftile.kernels.gluon.tile.record import record
from rooftile.kernels.triton_version import tma_load


@record
class Fill:
    """One filling of one stage. Two numbers are kept rather than one count, since this costs the
    loops of a kernel two instructions instead of ten."""

    stage: gl.tensor
    phase: gl.tensor


@gluon.constexpr_function
def _shape(stages, box, columns):
    return [stages, *box[:-1], columns]


@gluon.jit
def _along_columns(coordinates, column: gl.constexpr):
    """Coordinates of 4 or 5 dimensions with another column."""
    if len(coordinates) == 4:
        return coordinates[0], coordinates[1], coordinates[2], column
    else:
        return coordinates[0], coordinates[1], coordinates[2], coordinates[3], column


@gluon.jit
def first_fill():
    return Fill(gl.to_tensor(0), gl.to_tensor(0))


@gluon.jit
def start_empty(barrier, consumers: gl.constexpr, by_threads: gl.constexpr):
    """Initialises the barrier of what `consumers`, of four warps each, give back by `arrive_empty`."""
    mbarrier.init(barrier, count=consumers * 128 if by_threads else consumers)


@gluon.jit
def arrive_empty(barrier, by_threads: gl.constexpr):
    """A consumer gives something back, thread by thread or as a warpgroup."""
    if by_threads:
        # The arrival of the copies that a thread has started, which are none. For an ordinary one a
        # thread speaks for its warpgroup, and Triton has all of them meet before and after.
        async_copy.mbarrier_arrive(barrier, increment_count=False)
    else:
        mbarrier.arrive(barrier, count=1)


@record
class Ring:
    """Stages of one tile shape with their barriers; see the module for its use."""

    buffers: gl.shared_memory_descriptor  # [stages, *box of the descriptor]
    full: gl.shared_memory_descriptor  # [stages, 1] barriers: the fill has landed
    empty: gl.shared_memory_descriptor  # [stages, 1] barriers: every consumer is done
    stages: gl.constexpr
    rows: gl.constexpr
    columns: gl.constexpr
    by_threads: gl.constexpr  # every thread releases stages for itself, see `arrive_empty`

    @gluon.jit
    def start(self, i: gl.constexpr, consumers: gl.constexpr, loaded: gl.constexpr = 0):
        """Initialises the barriers of stage i, if there is one; consumers: of four warps.

        loaded: how many stages have been loaded already, and have half of their barriers.
        """
        if i < self.stages:
            if i >= loaded:
                self.start_full(i)
            start_empty(self.empty.index(i), consumers, self.by_threads)

    @gluon.jit
    def start_full(self, i: gl.constexpr):
        """Initialises what a load into stage i needs: it may start before the rest."""
        mbarrier.init(self.full.index(i), count=1)

    @gluon.jit
    def after(self, at):
        """The fill that follows `at`."""
        if self.stages == 1:
            return Fill(at.stage, at.phase ^ 1)
        elif self.stages == 2:
            return Fill(at.stage ^ 1, at.phase ^ at.stage)
        else:
            last = at.stage == self.stages - 1
            return Fill(gl.where(last, 0, at.stage + 1), gl.where(last, at.phase ^ 1, at.phase))

    @gluon.jit
    def acquire(self, at):
        """Producer: waits until the stage of this fill is free."""
        mbarrier.wait(self.empty.index(at.stage), at.phase ^ 1)

    @gluon.jit
    def load(self, at, desc, coordinates, used: gl.constexpr = None):
        """Producer: starts the copy of one box into the acquired stage.

        Boxes of 64 columns of a wider stage are copied one after the other, as many as hold the first
        `used` columns; the stage's other columns keep what they hold.
        """
        full = self.full.index(at.stage)
        stage = self.buffers.index(at.stage)
        width: gl.constexpr = desc.block_shape[len(desc.block_shape) - 1]
        if width == self.columns:
            mbarrier.expect(full, desc.block_type.nbytes)
            tma_load(desc, coordinates, full, stage)
        else:
            mbarrier.expect(full, desc.block_type.nbytes * (used // width))
            for i in gl.static_range(used // width):
                box = stage.slice(i * width, width, len(desc.block_shape) - 1)
                tma_load(desc, _along_columns(coordinates, i * width), full, box)

    @gluon.jit
    def arrived(self, at, pred=True):
        """Consumer: waits until this fill has landed (does nothing where pred is false)."""
        mbarrier.wait(self.full.index(at.stage), at.phase, pred=pred)

    @gluon.jit
    def tile(self, at):
        """The [rows, columns] shared tile of this fill."""
        return self.buffers.index(at.stage).reshape([self.rows, self.columns])

    @gluon.jit
    def box(self, at):
        """The same memory in the descriptor's shape, as a TMA store takes it."""
        return self.buffers.index(at.stage)

    @gluon.jit
    def release(self, at):
        """Consumer: this fill will not be read again."""
        arrive_empty(self.empty.index(at.stage), self.by_threads)


@gluon.jit
def new_ring(
    desc,
    rows: gl.constexpr,
    columns: gl.constexpr,
    stages: gl.constexpr,
    consumers: gl.constexpr,
):
    """Allocates a ring for boxes of `desc` and initialises its barriers.

    rows, columns: the box without its leading dimensions of size 1.
    consumers: how many releases free a stage. A fence must follow before roles split.
    """
    ring = allocate_ring(desc, rows, columns, stages)
    for i in gl.static_range(stages):
        ring.start(i, consumers)
    return ring


@gluon.jit
def allocate_ring(
    desc,
    rows: gl.constexpr,
    columns: gl.constexpr,
    stages: gl.constexpr,
    by_threads: gl.constexpr = False,
):
    """A ring whose barriers are not initialised: Triton lets a CTA wait between two of one
    allocation, so a kernel of many rings starts sooner if it starts their stages side by side."""
    shape: gl.constexpr = _shape(stages, desc.block_shape, columns)
    buffers = gl.allocate_shared_memory(desc.dtype, shape, desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [stages, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [stages, 1], mbarrier.MBarrierLayout())
    return Ring(buffers, full, empty, stages, rows, columns, by_threads)
