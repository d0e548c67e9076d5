"""Load, compute, finish: the loops of a persistent, warp-specialised kernel around your tiles.

    @record
    class Work:                      # what the kernel computes, tile by tile
        num_tiles: gl.tensor
        ring: Ring                   # its stages are filled once a step
        def steps(self, t): ...      # how many steps tile t takes, at least 1
        def load(self, descs, turn, fill, t, i): ...        # producer: acquire a stage, start copies
        def start(self, t, group): ...                      # consumer: the state before step 0
        def compute(self, state, turn, fill, t, i, group)   # arrived, multiply, wait, release
        def finish(self, state, descs, turn, t, group)      # store the tile

    @gluon.jit
    def kernel(a_desc, c_desc, num_tiles):
        work = Work(num_tiles, new_ring(a_desc, 64, 64, 4, 2))
        load_compute_finish(work, (a_desc, c_desc), 2, 232)

The methods are `@gluon.jit` and `group`, a consumer's number, is a constexpr. `fill` is where the
ring stands; `turn` is that of a second ring of one stage that is filled once a tile, at step 0,
where there is one. CTAs take tiles t, t + number of CTAs, ...: launch no more than run at a time.
One producer warp runs ahead of the consumers, into the next tile too, as far as the rings have
stages; consumers are warpgroups of four warps, which all see the same tiles and steps. (The pattern
is ThunderKittens': Spector et al. 2024, section 4.)
"""
# mypy: disable-error-code="no-untyped-def"

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from rooftile.kernels.gluon.tile.ring import Fill, first_fill
from rooftile.kernels.gluon.tile.roles import specialize
from rooftile.kernels.triton_version import tma_store_wait

PRODUCER_REGISTERS = gl.constexpr(24)


@gluon.jit
def _load_tiles(work, descs):
    turn = first_fill()
    fill = first_fill()
    t = gl.program_id(0)
    while t < work.num_tiles:
        for i in range(work.steps(t)):
            work.load(descs, turn, fill, t, i)
            fill = work.ring.after(fill)
        turn = Fill(turn.stage, turn.phase ^ 1)
        t += gl.num_programs(0)


@gluon.jit
def _compute_tiles(work, descs, group: gl.constexpr):
    turn = first_fill()
    fill = first_fill()
    t = gl.program_id(0)
    while t < work.num_tiles:
        state = work.start(t, group)
        for i in range(work.steps(t)):
            state = work.compute(state, turn, fill, t, i, group)
            fill = work.ring.after(fill)
        work.finish(state, descs, turn, t, group)
        turn = Fill(turn.stage, turn.phase ^ 1)
        t += gl.num_programs(0)
    tma_store_wait(0)


@gluon.jit
def load_compute_finish(work, descs, consumers: gl.constexpr, registers: gl.constexpr):
    """Splits the CTA into roles and runs the loops; the kernel is launched with four warps.

    descs: tuple of the descriptors that the methods use. consumers: 1 to 3 warpgroups of
    `registers` registers a thread (232 for two, 160 for three: 65,536 are shared by all).
    """
    gl.static_assert(consumers >= 1 and consumers <= 3, "1 to 3 consumers")
    fence_async_shared()
    specialize(
        _compute_tiles,
        (work, descs),
        consumers,
        registers,
        [(_load_tiles, (work, descs))],
        PRODUCER_REGISTERS,
        False,
    )
