"""A ring of operands that the CTAs of a cluster fill together: half of the right operand each.

    ring = new_cluster_ring(...)               # by the four warps of a launch
    join_cluster()                             # by every warp of every role, before the ring is used
    at = first_fill()                          at = first_fill()

    # producer, of four warps                  # each of the two consumers
    at = ring.load(at, row, column, 0, n)      for i in range(n):
    ring.drain(at)                                 ring.arrived(at)
                                                   acc = multiply(ring.a(at), ring.whole_b(at), acc)
                                                   acc = wait(0, deps=[acc])
                                                   ring.release(at)
                                                   at = ring.after(at)

Both CTAs multiply rows of their own with the same columns at the same time. Each loads its rows and
half of the columns, and the copy engine writes that half to both CTAs' shared memory: a
multiprocessor asks for fewer lines of the L2 cache, which bounds a step where rows begin inside lines.

Triton 3.6 has neither clusters nor multicast, so the barriers and copies are assembly: barriers lie in
shared memory that is declared here, tiles where Triton puts them (a test reads that from what it
compiles). A stage is free when the consumers of both CTAs have released it.
"""
# mypy: disable-error-code="no-untyped-def"

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from rooftile.kernels.gluon.tile.record import record
from rooftile.kernels.gluon.tile.ring import Fill

EMPTY = gl.constexpr(256)  # bytes from the first barrier of full stages to the first of empty ones
UNUSED = gl.constexpr(1020)  # bytes to what nobody reads
_BARRIER_BYTES = 1024  # as much as keeps what Triton puts after it where swizzles need it
BARRIER_BYTES = gl.constexpr(_BARRIER_BYTES)


@gluon.constexpr_function
def _start_asm(stages, arrivals, consumers, parts, traded):
    """Address of the barriers, which are initialised by one thread, behind a branch: a predicate for each
    takes ptxas a loop of some 50 clocks each."""
    counts = {8 * i: 1 for i in range(stages)} | {256 + 8 * i: arrivals for i in range(stages)}
    if parts > 1:  # those of cluster_sum.py
        counts |= {512: consumers * parts} | {520 + 8 * i: 1 for i in range(consumers)}
    return " ".join(
        [
            f".shared .align {_BARRIER_BYTES} .b8 cluster_barriers[{_BARRIER_BYTES + traded}];",
            "mov.u32 $0, cluster_barriers;",
            "{ .reg .pred others; .reg .b32 thread; mov.u32 thread, %tid.x;",
            "setp.ne.u32 others, thread, 0; @others bra END;",
            *(f"mbarrier.init.shared::cta.b64 [$0+{at}], {n};" for at, n in counts.items()),
            "END: fence.mbarrier_init.release.cluster; }",
        ]
    )


@gluon.constexpr_function
def _load_asm(
    kernel, a_map, b_map, a_bytes, b_bytes, depth, sharers, across, stages, passing
):  # fmt: skip
    """All steps of a tile, by one thread in a loop of its own: what every thread of a warp might do takes
    ptxas twice as many instructions a copy, and 280 clocks a step.

    $1: the first full barrier, $2, $3: where the operands of the first stage go, $4: along K, $5, $6: row and
    column, $7, $8: bits of the CTAs that get the columns, and the rows, $9, $10: stage and phase, $11: steps.
    a_map, b_map: numbers of the kernel's parameters. a_bytes, b_bytes: of a stage. depth: its elements along K.
    """
    copy = "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
    hint, policy = (".L2::cache_hint", ", policy") if passing else ("", "")
    together = f"{copy}.multicast::cluster"
    copy_a, a_targets = (together, ", beside") if across > 1 else (copy, "")
    copy_b, targets = (together, ", all") if sharers > 1 else (copy, "")
    lines = [
        "{ .reg .pred mine, first, more, done, last; .reg .b64 a_map, b_map, policy;",
        ".reg .b32 warp, stage, phase, left, k, full, a, b; .reg .b16 all, beside;",
        "mov.u32 warp, %tid.x; and.b32 warp, warp, 96; setp.eq.u32 first, warp, 0;",
        "elect.sync _|mine, -1; and.pred mine, mine, first;",
        "mov.b32 left, $11; setp.gt.s32 more, left, 0; and.pred mine, mine, more;",
        f"mov.b64 a_map, {kernel}_param_{a_map}; cvta.param.u64 a_map, a_map;",
        f"mov.b64 b_map, {kernel}_param_{b_map}; cvta.param.u64 b_map, b_map;",
        "mov.b32 k, $4; mov.b32 stage, $9; xor.b32 phase, $10, 1;",
        "shl.b32 full, stage, 3; add.u32 full, full, $1;",
        f"mad.lo.u32 a, stage, {a_bytes}, $2; mad.lo.u32 b, stage, {b_bytes}, $3;",
    ]
    if passing:
        lines += ["createpolicy.fractional.L2::evict_first.b64 policy, 1.0;"]
    if across > 1:
        lines += ["cvt.u16.u32 beside, $8;"]
    if sharers > 1:
        lines += ["cvt.u16.u32 all, $7;"]
    lines += [
        "@!mine bra END;",
        "STEP: mbarrier.try_wait.parity.shared::cta.b64 done, [full+256], phase; @!done bra STEP;",
        f"mbarrier.arrive.expect_tx.shared::cta.b64 _, [full], {a_bytes + b_bytes};",
        f"{copy_a}{hint} [a], [a_map, {{k, $5}}], [full]{a_targets}{policy};",
        f"{copy_b}{hint} [b], [b_map, {{k, $6}}], [full]{targets}{policy};",
        f"add.u32 k, k, {depth}; add.u32 full, full, 8; add.u32 stage, stage, 1;",
        f"add.u32 a, a, {a_bytes}; add.u32 b, b, {b_bytes}; setp.eq.u32 last, stage, {stages};",
        "@last mov.u32 a, $2; @last mov.u32 b, $3; @last mov.u32 full, $1;",
        "@last mov.u32 stage, 0; @last xor.b32 phase, phase, 1;",
        "sub.s32 left, left, 1; setp.gt.s32 more, left, 0; @more bra STEP;",
        "END: } mov.b32 $0, $4;",
    ]
    return " ".join(lines)


_WAIT_ASM = gl.constexpr(
    "{ .reg .pred done; WAIT: mbarrier.try_wait.parity.shared::cta.b64 done, [$1], $2; "
    "@!done bra.uni WAIT; } mov.b32 $0, $2;"
)
_ASK_ASM = gl.constexpr(
    "{ .reg .pred done; mbarrier.test_wait.parity.shared::cta.b64 done, [$1], $2; "
    "selp.b32 $0, 1, 0, done; }"
)
_ARRIVED_ASM = gl.constexpr(
    "{ .reg .pred done; setp.ne.b32 done, $3, 0; @done bra.uni DONE; "
    "WAIT: mbarrier.try_wait.parity.shared::cta.b64 done, [$1], $2; @!done bra.uni WAIT; "
    "DONE: } mov.b32 $0, $2;"
)
_JOIN_ASM = gl.constexpr(
    "barrier.cluster.arrive.relaxed.aligned; barrier.cluster.wait.acquire.aligned; mov.b32 $0, $1;"
)
_BASE_ASM = gl.constexpr("mov.b32 $0, global_smem;")


@gluon.constexpr_function
def _every(count, step):
    """Bits 0, step, 2 step, ..."""
    return sum(1 << (i * step) for i in range(count))


@gluon.constexpr_function
def _arrive_asm(count, step):
    """At the barrier $1 of `count` CTAs from number $2 on, every `step`th: a thread for each."""
    return (
        "{ .reg .pred mine; .reg .b32 thread, there; mov.u32 thread, %tid.x; "
        f"and.b32 thread, thread, 127; setp.lt.u32 mine, thread, {count}; "
        f"mad.lo.u32 there, thread, {step}, $2; "
        "@mine mapa.shared::cluster.u32 there, $1, there; "
        "@mine mbarrier.arrive.shared::cluster.b64 _, [there]; } mov.b32 $0, $1;"
    )


@gluon.jit
def arrive_there(barrier, first, count: gl.constexpr, step: gl.constexpr):
    """By a warpgroup: arrives at the barrier of CTAs first, first + step, ... of the cluster."""
    gl.inline_asm_elementwise(
        _arrive_asm(count, step), "=r,r,r", [barrier, first], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def join_cluster():
    """Every warp of the cluster's CTAs has come here; what one has initialised the others see."""
    gl.inline_asm_elementwise(
        _JOIN_ASM, "=r,r", [gl.program_id(0)], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def wait_at(barrier, phase):
    gl.inline_asm_elementwise(
        _WAIT_ASM, "=r,r,r", [barrier, phase], dtype=gl.int32, is_pure=False, pack=1
    )


@record
class ClusterRing:
    """Stages with their barriers; see the module for its use."""

    a_tiles: gl.shared_memory_descriptor  # [stages, rows, block_k]
    # [stages, columns, block_k], or where columns are no power of two [stages * pieces, 8, block_k].
    b_tiles: gl.shared_memory_descriptor
    barriers: gl.tensor  # their address, the first one of full stages
    tiles: gl.tensor  # address that Triton counts from
    stages: gl.constexpr
    sharers: gl.constexpr  # CTAs that load columns together
    across: gl.constexpr  # CTAs that load rows together
    cluster: gl.constexpr  # CTAs of a cluster, a multiple
    kernel: gl.constexpr  # name of the kernel that has the maps
    a_map: gl.constexpr  # numbers of its parameters
    b_map: gl.constexpr
    a_at: gl.constexpr  # bytes from `tiles` on
    b_at: gl.constexpr
    passing: gl.constexpr  # lines of operands are the first to leave the L2 cache
    columns: gl.constexpr  # of a stage of the right operand
    row_bytes: gl.constexpr  # of a stage

    @gluon.jit
    def after(self, at):
        """The fill that follows `at`."""
        last = at.stage == self.stages - 1
        return Fill(gl.where(last, 0, at.stage + 1), gl.where(last, at.phase ^ 1, at.phase))

    @gluon.jit
    def after_two(self, at):
        """The second fill after `at`, of an even number of stages."""
        last = at.stage >= self.stages - 2
        return Fill(
            gl.where(last, at.stage - (self.stages - 2), at.stage + 2),
            gl.where(last, at.phase ^ 1, at.phase),
        )

    @gluon.jit
    def traded(self):
        """Address of memory that the consumers have for themselves."""
        return self.barriers + BARRIER_BYTES

    @gluon.jit
    def first_sharer(self):
        """Number in its cluster of the first CTA that loads columns together with this one."""
        return gl.program_id(0) % self.cluster // self.sharers * self.sharers

    @gluon.jit
    def acquire(self, at):
        """Producer: waits until the stage of this fill is free in all CTAs."""
        wait_at(self.barriers + EMPTY + at.stage * 8, at.phase ^ 1)

    @gluon.jit
    def now(self, x):
        """Has x computed before what follows: ptxas moves what it needs to where it needs it."""
        gl.inline_asm_elementwise(
            "st.shared.b32 [$2], $1; mov.b32 $0, $1;", "=r,r,r", [x, self.barriers + UNUSED],
            dtype=gl.int32, is_pure=False, pack=1,
        )  # fmt: skip

    @gluon.jit
    def keep(self):
        """Refers to the tiles, where nothing but assembly does, so that Triton has room for them."""
        layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
        depth: gl.constexpr = self.a_tiles.shape[2]
        nothing = gl.zeros([8, depth], self.a_tiles.dtype, layout)
        self.a_tiles.index(0).slice(0, 8, 0).store(nothing)
        self.b_tiles.index(0).slice(0, 8, 0).store(nothing)

    @gluon.jit
    def place_of_a(self, at):
        """Address of the left operand of this fill."""
        return self.tiles + self.a_at + at.stage * (self.a_tiles.shape[1] * self.row_bytes)

    @gluon.jit
    def place_of_b(self, at):
        """Address of the right operand of this fill."""
        return self.tiles + self.b_at + at.stage * (self.columns * self.row_bytes)

    @gluon.jit
    def load(self, at, row, column, first, last):
        """Producer: copies this CTA's rows, and its half of the columns to all, for steps first .. last - 1 along
        K, each as soon as its stage is free in all CTAs. Returns the fill after these."""
        rank = gl.program_id(0) % self.sharers
        all_of_them = ((1 << self.sharers) - 1) << self.first_sharer()
        half: gl.constexpr = self.columns // self.sharers
        beside = gl.program_id(0) // self.sharers % self.across
        those_beside = _every(self.across, self.sharers) << rank
        rows: gl.constexpr = self.a_tiles.shape[1] // self.across
        depth: gl.constexpr = self.a_tiles.shape[2]
        a = self.tiles + self.a_at + beside * (rows * self.row_bytes)
        b = self.tiles + self.b_at + rank * (half * self.row_bytes)
        steps = last - first
        gl.inline_asm_elementwise(
            _load_asm(
                self.kernel, self.a_map, self.b_map, self.a_tiles.shape[1] * self.row_bytes,
                self.columns * self.row_bytes, depth, self.sharers, self.across, self.stages,
                self.passing,
            ),
            "=r,r,r,r,r,r,r,r,r,r,r,r",
            [
                self.barriers, a, b, first * depth, row + beside * rows, column + rank * half,
                all_of_them, those_beside, at.stage, at.phase, steps,
            ],
            dtype=gl.int32,
            is_pure=False,
            pack=1,
        )  # fmt: skip
        turns = (at.stage + steps) // self.stages
        return Fill(at.stage + steps - turns * self.stages, at.phase ^ turns & 1)

    @gluon.jit
    def drain(self, at):
        """Producer, last: nobody will signal this CTA's barriers any more; `at`: the next fill."""
        for _ in gl.static_range(self.stages):
            self.acquire(at)
            at = self.after(at)

    @gluon.jit
    def arrived(self, at):
        """Consumer: waits until both operands have landed."""
        wait_at(self.barriers + at.stage * 8, at.phase)

    @gluon.jit
    def is_ready(self, at):
        """Consumer: 1 where both operands have landed, else 0; asked early, for `arrived_unless`."""
        return gl.inline_asm_elementwise(
            _ASK_ASM, "=r,r,r", [self.barriers + at.stage * 8, at.phase], dtype=gl.int32,
            is_pure=False, pack=1,
        )  # fmt: skip

    @gluon.jit
    def arrived_unless(self, ready, at):
        """Consumer: waits until both operands have landed, unless that is known."""
        gl.inline_asm_elementwise(
            _ARRIVED_ASM, "=r,r,r,r", [self.barriers + at.stage * 8, at.phase, ready],
            dtype=gl.int32, is_pure=False, pack=1,
        )  # fmt: skip

    @gluon.jit
    def a(self, at):
        """The left operand of this fill."""
        return self.a_tiles.index(at.stage)

    @gluon.jit
    def whole_b(self, at):
        """The right operand of this fill, where its columns are a power of two."""
        return self.b_tiles.index(at.stage)

    @gluon.jit
    def release(self, at):
        """Consumer: this fill will not be read again."""
        empty = self.barriers + EMPTY + at.stage * 8
        arrive_there(empty, self.first_sharer(), self.sharers, 1)
        if self.across > 1:  # which says so to this CTA once more
            arrive_there(empty, gl.program_id(0) % self.sharers, self.across, self.sharers)


@gluon.jit
def new_cluster_ring(
    a_desc,
    b_desc,  # boxes of a sharer's columns, or of eight where they are no power of two
    columns: gl.constexpr,
    stages: gl.constexpr,
    sharers: gl.constexpr,
    across: gl.constexpr,
    cluster: gl.constexpr,
    consumers: gl.constexpr,  # of a CTA
    kernel: gl.constexpr,
    a_map: gl.constexpr,
    b_map: gl.constexpr,
    a_at: gl.constexpr,
    b_at: gl.constexpr,
    passing: gl.constexpr,
    releasing: gl.constexpr,  # consumers of a CTA that release each stage
    traded: gl.constexpr,  # bytes, a multiple of 1024, that consumers have for themselves
):
    """Allocates the ring and initialises its barriers; `join_cluster` must follow in every role."""
    rows: gl.constexpr = a_desc.block_shape[0] * across
    releases: gl.constexpr = releasing * (sharers + (across if across > 1 else 0))
    parts: gl.constexpr = cluster // (sharers * across)
    depth: gl.constexpr = a_desc.block_shape[1]
    # Where a stage's columns are no power of two, it is several of Triton's tiles, side by side.
    tile: gl.constexpr = columns if columns & (columns - 1) == 0 else b_desc.block_shape[0]
    pieces: gl.constexpr = columns // tile
    a_tiles = gl.allocate_shared_memory(a_desc.dtype, [stages, rows, depth], a_desc.layout)
    b_tiles = gl.allocate_shared_memory(b_desc.dtype, [stages * pieces, tile, depth], b_desc.layout)
    barriers = gl.inline_asm_elementwise(
        _start_asm(stages, releases, consumers, parts, traded), "=r,r", [gl.program_id(0)], dtype=gl.int32,
        is_pure=False, pack=1,
    )  # fmt: skip
    tiles = gl.inline_asm_elementwise(
        _BASE_ASM, "=r,r", [gl.program_id(0)], dtype=gl.int32, is_pure=False, pack=1
    )
    return ClusterRing(
        a_tiles,
        b_tiles,
        barriers,
        tiles,
        stages,
        sharers,
        across,
        cluster,
        kernel,
        a_map,
        b_map,
        a_at,
        b_at,
        passing,
        columns,
        depth * a_desc.dtype.itemsize,
    )
