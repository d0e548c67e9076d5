"""A ring of operands that the CTAs of a cluster fill together: half of the right operand each.

    ring = new_cluster_ring(...)               # by the four warps of a launch
    join_cluster()                             # by every warp of every role, before the ring is used
    at = first_fill()                          at = first_fill()

    # producer, of four warps                  # each of the two consumers
    for i in range(n):                         for i in range(n):
        ring.acquire(at)                           ring.arrived(at)
        ring.load(at, row, column, i)              acc = multiply(ring.a(at), ring.whole_b(at), acc)
        at = ring.after(at)                        acc = wait(0, deps=[acc])
    ring.drain(at)                                 ring.release(at)
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
_BARRIER_BYTES = 1024  # as much as keeps what Triton puts after it where swizzles need it


@gluon.constexpr_function
def _start_asm(stages, arrivals, consumers, parts):
    """Address of the barriers, which are initialised: a few by each of four warps, since the threads of
    one take turns."""
    lines = [
        f".shared .align {_BARRIER_BYTES} .b8 cluster_barriers[{_BARRIER_BYTES}];",
        "mov.u32 $0, cluster_barriers;",
        "{ .reg .pred mine; .reg .b32 thread, stage, at; mov.u32 thread, %tid.x;",
        "and.b32 stage, thread, 31; shl.b32 stage, stage, 2; shr.u32 at, thread, 5;",
        f"add.u32 stage, stage, at; setp.lt.u32 mine, stage, {stages};",
        "shl.b32 at, stage, 3; add.u32 at, at, $0;",
        "@mine mbarrier.init.shared::cta.b64 [at], 1;",
        f"@mine mbarrier.init.shared::cta.b64 [at+256], {arrivals};",
    ]
    if parts > 1:  # those of cluster_sum.py
        lines += ["setp.eq.u32 mine, thread, 0;"]
        lines += [f"@mine mbarrier.init.shared::cta.b64 [$0+512], {consumers * parts};"]
        for i in range(consumers):
            lines += [f"@mine mbarrier.init.shared::cta.b64 [$0+{520 + 8 * i}], 1;"]
    lines += ["fence.mbarrier_init.release.cluster; }"]
    return " ".join(lines)


@gluon.constexpr_function
def _load_asm(kernel, a_map, b_map, size, sharers, across, passing):
    """$1: full barrier, $2, $3: where the operands go, $4: along K, $5, $6: row and column, $7, $8: bits of
    the CTAs that get the columns, and the rows."""
    copy = "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
    hint, policy = (".L2::cache_hint", ", policy") if passing else ("", "")
    together = f"{copy}.multicast::cluster"
    copy_a, a_targets = (together, ", beside") if across > 1 else (copy, "")
    copy_b, targets = (together, ", all") if sharers > 1 else (copy, "")
    return " ".join(
        [
            "{ .reg .pred mine, first; .reg .b32 warp; .reg .b64 map;",
            "mov.u32 warp, %tid.x; and.b32 warp, warp, 96; setp.eq.u32 first, warp, 0;",
            "elect.sync _|mine, -1; and.pred mine, mine, first;",
            ".reg .b64 policy; createpolicy.fractional.L2::evict_first.b64 policy, 1.0;"
            if passing
            else "",
            f"@mine mbarrier.arrive.expect_tx.shared::cta.b64 _, [$1], {size};",
            f"mov.b64 map, {kernel}_param_{a_map}; cvta.param.u64 map, map;",
            "{ .reg .b16 all, beside;",
            "cvt.u16.u32 beside, $8;" if across > 1 else "",
            f"@mine {copy_a}{hint} [$2], [map, {{$4, $5}}], [$1]{a_targets}{policy};",
            f"mov.b64 map, {kernel}_param_{b_map}; cvta.param.u64 map, map;",
            "cvt.u16.u32 all, $7;" if sharers > 1 else "",
            f"@mine {copy_b}{hint} [$3], [map, {{$4, $6}}], [$1]{targets}{policy};",
            "} } mov.b32 $0, $4;",
        ]
    )


_WAIT_ASM = gl.constexpr(
    "{ .reg .pred done; WAIT: mbarrier.try_wait.parity.shared::cta.b64 done, [$1], $2; "
    "@!done bra.uni WAIT; } mov.b32 $0, $2;"
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
    def first_sharer(self):
        """Number in its cluster of the first CTA that loads columns together with this one."""
        return gl.program_id(0) % self.cluster // self.sharers * self.sharers

    @gluon.jit
    def acquire(self, at):
        """Producer: waits until the stage of this fill is free in all CTAs."""
        wait_at(self.barriers + EMPTY + at.stage * 8, at.phase ^ 1)

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
    def load(self, at, row, column, k0):
        """Producer: starts the copies of this CTA's rows, and of its half of the columns to all."""
        rank = gl.program_id(0) % self.sharers
        all_of_them = ((1 << self.sharers) - 1) << self.first_sharer()
        half: gl.constexpr = self.columns // self.sharers
        beside = gl.program_id(0) // self.sharers % self.across
        those_beside = _every(self.across, self.sharers) << rank
        rows: gl.constexpr = self.a_tiles.shape[1] // self.across
        size: gl.constexpr = (self.a_tiles.shape[1] + self.columns) * self.row_bytes
        full = self.barriers + at.stage * 8
        a = self.place_of_a(at) + beside * (rows * self.row_bytes)
        b = self.place_of_b(at) + rank * (half * self.row_bytes)
        gl.inline_asm_elementwise(
            _load_asm(
                self.kernel, self.a_map, self.b_map, size, self.sharers, self.across, self.passing
            ),
            "=r,r,r,r,r,r,r,r,r",
            [full, a, b, k0, row + beside * rows, column + rank * half, all_of_them, those_beside],
            dtype=gl.int32,
            is_pure=False,
            pack=1,
        )

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
):
    """Allocates the ring and initialises its barriers; `join_cluster` must follow in every role."""
    rows: gl.constexpr = a_desc.block_shape[0] * across
    releases: gl.constexpr = consumers * (sharers + (across if across > 1 else 0))
    parts: gl.constexpr = cluster // (sharers * across)
    depth: gl.constexpr = a_desc.block_shape[1]
    # Where a stage's columns are no power of two, it is several of Triton's tiles, side by side.
    tile: gl.constexpr = columns if columns & (columns - 1) == 0 else b_desc.block_shape[0]
    pieces: gl.constexpr = columns // tile
    a_tiles = gl.allocate_shared_memory(a_desc.dtype, [stages, rows, depth], a_desc.layout)
    b_tiles = gl.allocate_shared_memory(b_desc.dtype, [stages * pieces, tile, depth], b_desc.layout)
    barriers = gl.inline_asm_elementwise(
        _start_asm(stages, releases, consumers, parts), "=r,r", [gl.program_id(0)], dtype=gl.int32,
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
