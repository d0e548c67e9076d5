"""Which tile a persistent CTA takes next, and how its producer tells the consumers.

    queue = new_queue(counter, fields=2, consumers=2, dynamic=True)
    # producer (one warp)                      # each of the two consumers (four warps)
    t, at = gl.program_id(0), first_fill()     at = first_fill()
    while t < num_tiles:                       queue.arrived(at)
        following = queue.draw(t)              while queue.field(at, 1) > 0:
        queue.send(at, (row(t), blocks(t)))        row = queue.field(at, 0)
        ...start the loads of tile t...            queue.release(at)
        t, at = following, queue.after(at)         ...compute...
    queue.finish()                                 at = queue.after(at)
    queue.send(at, (0, 0))                         queue.arrived(at)

The producer works out what a tile is, divisions and all, ahead of the consumers, who read the
numbers from one of four slots of shared memory. Tiles follow in turn, t by t + number of CTAs, or
are drawn from a counter in global memory that is zero at launch, and again at the end: with tiles
sorted longest first this keeps every SM busy to the end, whatever the tiles cost.
"""
# mypy: disable-error-code="no-untyped-def"

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from rooftile.kernels.gluon.tile.record import record
from rooftile.kernels.gluon.tile.ring import Fill, arrive_empty, start_empty

_SLOTS = gl.constexpr(4)


@record
class TileQueue:
    """The tiles of one CTA as messages of a few int32; see the module for its use."""

    counter: gl.tensor  # pointer to two int32: tiles drawn, CTAs that will draw no more
    slots: gl.shared_memory_descriptor  # [slots * fields, 1] int32
    full: gl.shared_memory_descriptor  # [slots, 1] barriers
    empty: gl.shared_memory_descriptor  # [slots, 1] barriers
    first_drawn: gl.tensor
    fields: gl.constexpr
    dynamic: gl.constexpr
    by_threads: gl.constexpr  # every thread releases a message for itself, see `arrive_empty`

    @gluon.jit
    def start(self, i: gl.constexpr, consumers: gl.constexpr):
        """Initialises the barriers of slot i, if there is one."""
        if i < _SLOTS:
            mbarrier.init(self.full.index(i), count=1)
            start_empty(self.empty.index(i), consumers, self.by_threads)

    @gluon.jit
    def after(self, at):
        """The slot that follows `at`."""
        last = at.stage == _SLOTS - 1
        return Fill(gl.where(last, 0, at.stage + 1), gl.where(last, at.phase ^ 1, at.phase))

    @gluon.jit
    def draw(self, t):
        """Producer: the tile that this CTA takes after t."""
        following = t + gl.num_programs(0)
        if self.dynamic:  # noqa: SIM102, known at compile time
            if following >= self.first_drawn:
                following = self.first_drawn + gl.atomic_add(self.counter, 1)
        return following

    @gluon.jit
    def finish(self):
        """Producer: nothing more will be drawn. The last CTA to say so leaves zeros behind."""
        if self.dynamic:  # noqa: SIM102, known at compile time
            if gl.atomic_add(self.counter + 1, 1) == gl.num_programs(0) - 1:
                gl.store(self.counter, 0)
                gl.store(self.counter + 1, 0)

    @gluon.jit
    def send(self, at, message):
        """Producer: hands a tuple of `fields` numbers to the consumers."""
        L: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
        mbarrier.wait(self.empty.index(at.stage), at.phase ^ 1)
        for i in gl.static_range(self.fields):
            slot = self.slots.index(at.stage * self.fields + i)
            slot.store(gl.full([1], 0, gl.int32, L) + message[i])
        mbarrier.arrive(self.full.index(at.stage), count=1)

    @gluon.jit
    def field(self, at, i: gl.constexpr):
        """Consumer: one number of a message that has arrived."""
        L: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
        return gl.sum(self.slots.index(at.stage * self.fields + i).load(L), 0)

    @gluon.jit
    def field_of_warp(self, at, i: gl.constexpr):
        """`field` for a role of one warp."""
        L: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
        return gl.sum(self.slots.index(at.stage * self.fields + i).load(L), 0)

    @gluon.jit
    def arrived(self, at):
        """Consumer: waits for a message."""
        mbarrier.wait(self.full.index(at.stage), at.phase)

    @gluon.jit
    def release(self, at):
        """Consumer: a message has been read."""
        arrive_empty(self.empty.index(at.stage), self.by_threads)


@gluon.jit
def new_queue(counter, fields: gl.constexpr, consumers: gl.constexpr, dynamic: gl.constexpr):
    """counter: pointer to two int32 that are 0 at launch (unused where not dynamic)."""
    queue = allocate_queue(counter, gl.num_programs(0), fields, dynamic)
    for i in gl.static_range(_SLOTS):
        queue.start(i, consumers)
    return queue


@gluon.jit
def allocate_queue(
    counter,
    first_drawn,
    fields: gl.constexpr,
    dynamic: gl.constexpr,
    by_threads: gl.constexpr = False,
):
    """A queue whose barriers are not initialised, see `allocate_ring`.

    first_drawn: tiles before it are taken in turn; a multiple of the number of CTAs.
    """
    layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    slots = gl.allocate_shared_memory(gl.int32, [_SLOTS * fields, 1], layout)
    full = gl.allocate_shared_memory(gl.int64, [_SLOTS, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [_SLOTS, 1], mbarrier.MBarrierLayout())
    return TileQueue(counter, slots, full, empty, first_drawn, fields, dynamic, by_threads)
