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
    """Address of the barriers, which thread 0 has initialised."""
    lines = [
        f".shared .align {_BARRIER_BYTES} .b8 cluster_barriers[{_BARRIER_BYTES}];",
        "mov.u32 $0, cluster_barriers;",
        "{ .reg .pred first; .reg .b32 thread; mov.u32 thread, %tid.x;",
        "setp.eq.u32 first, thread, 0;",
    ]
    for i in range(stages):
        lines += [
            f"@first mbarrier.init.shared::cta.b64 [$0+{8 * i}], 1;",
            f"@first mbarrier.init.shared::cta.b64 [$0+{256 + 8 * i}], {arrivals};",
        ]
    # Those of cluster_sum.py.
    lines += [f"@first mbarrier.init.shared::cta.b64 [$0+512], {consumers * parts};"]
    for i in range(consumers):
        lines += [f"@first mbarrier.init.shared::cta.b64 [$0+{520 + 8 * i}], 1;"]
    lines += ["fence.mbarrier_init.release.cluster; }"]
    return " ".join(lines)


@gluon.constexpr_function
def _load_asm(kernel, a_map, b_map, size, sharers, passing, boxes, box_rows, box_bytes):
    """$1: full barrier, $2, $3: where the operands go, $4: along K, $5, $6: row and column, $7: bits of
    the CTAs that get the columns, which are so many boxes, one after the other."""
    copy = "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
    hint, policy = (".L2::cache_hint", ", policy") if passing else ("", "")
    copy_b, targets = (f"{copy}.multicast::cluster", ", all") if sharers > 1 else (copy, "")
    # The first box is $3 and $6 themselves.
    rest_of_b = [
        f"add.u32 column, $6, {i * box_rows}; "
        f"@mine {copy_b}{hint} [$3+{i * box_bytes}], [map, {{$4, column}}], [$1]{targets}{policy};"
        for i in range(1, boxes)
    ]
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
            f"@mine {copy}{hint} [$2], [map, {{$4, $5}}], [$1]{policy};",
            f"mov.b64 map, {kernel}_param_{b_map}; cvta.param.u64 map, map;",
            "{ .reg .b16 all; .reg .b32 column;",
            "cvt.u16.u32 all, $7;" if sharers > 1 else "",
            f"@mine {copy_b}{hint} [$3], [map, {{$4, $6}}], [$1]{targets}{policy};",
            *rest_of_b,
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
    b_tiles: gl.shared_memory_descriptor  # [stages * pieces, columns of a piece, block_k]
    barriers: gl.tensor  # their address, the first one of full stages
    tiles: gl.tensor  # address that Triton counts from
    stages: gl.constexpr
    sharers: gl.constexpr  # CTAs that load columns together
    cluster: gl.constexpr  # CTAs of a cluster, a multiple
    kernel: gl.constexpr  # name of the kernel that has the maps
    a_map: gl.constexpr  # numbers of its parameters
    b_map: gl.constexpr
    a_at: gl.constexpr  # bytes from `tiles` on
    b_at: gl.constexpr
    passing: gl.constexpr  # lines of operands are the first to leave the L2 cache
    pieces: gl.constexpr  # of a power of two of columns each, that a stage of the right operand has

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
    def load(self, at, row, column, k0):
        """Producer: starts the copies of this CTA's rows, and of its half of the columns to all."""
        rank = gl.program_id(0) % self.sharers
        all_of_them = ((1 << self.sharers) - 1) << self.first_sharer()
        columns: gl.constexpr = self.b_tiles.shape[1] * self.pieces
        a_bytes: gl.constexpr = (
            self.a_tiles.shape[1] * self.a_tiles.shape[2] * self.a_tiles.dtype.itemsize
        )
        b_bytes: gl.constexpr = columns * self.b_tiles.shape[2] * self.b_tiles.dtype.itemsize
        half: gl.constexpr = columns // self.sharers
        full = self.barriers + at.stage * 8
        a = self.tiles + self.a_at + at.stage * a_bytes
        b = self.tiles + self.b_at + at.stage * b_bytes + rank * (b_bytes // self.sharers)
        box: gl.constexpr = half // self.pieces
        gl.inline_asm_elementwise(
            _load_asm(
                self.kernel,
                self.a_map,
                self.b_map,
                a_bytes + b_bytes,
                self.sharers,
                self.passing,
                self.pieces,
                box,
                b_bytes // columns * box,
            ),
            "=r,r,r,r,r,r,r,r",
            [full, a, b, k0, row, column + rank * half, all_of_them],
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
        """The right operand of this fill, where it is one piece."""
        return self.b_tiles.index(at.stage)

    @gluon.jit
    def columns_of_b(self, at, first: gl.constexpr, columns: gl.constexpr):
        """Columns first .. first + columns - 1 of the right operand, whole pieces of it."""
        piece: gl.constexpr = self.b_tiles.shape[1]
        tile = self.b_tiles.index(at.stage * self.pieces + first // piece)
        if columns == piece:
            return tile
        else:  # pieces lie side by side
            shape: gl.constexpr = (columns, self.b_tiles.shape[2])
            return tile._reinterpret(self.b_tiles.dtype, shape, self.b_tiles.layout)

    @gluon.jit
    def release(self, at):
        """Consumer: this fill will not be read again."""
        arrive_there(self.barriers + EMPTY + at.stage * 8, self.first_sharer(), self.sharers, 1)


@gluon.jit
def new_cluster_ring(
    a_desc,
    b_desc,  # boxes of a sharer's columns, of one piece
    stages: gl.constexpr,
    sharers: gl.constexpr,
    cluster: gl.constexpr,
    consumers: gl.constexpr,  # of a CTA
    kernel: gl.constexpr,
    a_map: gl.constexpr,
    b_map: gl.constexpr,
    a_at: gl.constexpr,
    b_at: gl.constexpr,
    passing: gl.constexpr,
    pieces: gl.constexpr = 1,
):
    """Allocates the ring and initialises its barriers; `join_cluster` must follow in every role."""
    rows: gl.constexpr = a_desc.block_shape[0]
    columns: gl.constexpr = b_desc.block_shape[0] * sharers
    depth: gl.constexpr = a_desc.block_shape[1]
    a_tiles = gl.allocate_shared_memory(a_desc.dtype, [stages, rows, depth], a_desc.layout)
    b_tiles = gl.allocate_shared_memory(
        b_desc.dtype, [stages * pieces, columns, depth], b_desc.layout
    )
    barriers = gl.inline_asm_elementwise(
        _start_asm(stages, consumers * sharers, consumers, cluster // sharers), "=r,r", [gl.program_id(0)], dtype=gl.int32,
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
        cluster,
        kernel,
        a_map,
        b_map,
        a_at,
        b_at,
        passing,
        pieces,
    )
