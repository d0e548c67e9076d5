"""A tile whose steps along K the CTAs of a cluster share, and whose sum they exchange.

Every CTA has a part of the tile's steps. When all have multiplied theirs, each sends slices of its
sums, some columns each, into the shared memory of the CTAs that finish these: what took a part through
the L2 cache, a flag and its poll takes one trip across the cluster. The memory is that of the ring,
whose stages nobody needs any more. Parts are added in the order of K.
"""
# mypy: disable-error-code="no-untyped-def"

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from rooftile.kernels.gluon.gemm.accumulator import left_of, no_pieces, right_of
from rooftile.kernels.gluon.gemm.consumer import multiply_on, sums_in_turn
from rooftile.kernels.gluon.gemm.epilogue import halves, store_tile
from rooftile.kernels.gluon.gemm.problem import GROUPS
from rooftile.kernels.gluon.gemm.turns import first_turn, multiply_in_turn
from rooftile.kernels.gluon.tile.cluster import arrive_there, join_cluster, wait_at
from rooftile.kernels.gluon.tile.mma import (
    accumulator_layout,
    columns_of,
    multiply,
    rows_of,
    wait,
)
from rooftile.kernels.gluon.tile.ring import first_fill
from rooftile.kernels.triton_version import tma_store_wait

READY = gl.constexpr(512)  # bytes from the ring's first barrier: all CTAs' rings are free
ARRIVED = gl.constexpr(520)  # a warpgroup's slices are here


@gluon.constexpr_function
def _expect_asm(size):
    return (
        "{ .reg .pred first; .reg .b32 thread; mov.u32 thread, %tid.x; "
        "and.b32 thread, thread, 127; setp.eq.u32 first, thread, 0; "
        f"@first mbarrier.arrive.expect_tx.shared::cta.b64 _, [$1], {size}; }} mov.b32 $0, $1;"
    )


_THERE_ASM = gl.constexpr("mapa.shared::cluster.u32 $0, $1, $2;")
# Four elements at a time, those of a thread that follow each other.
_SEND_ASM = gl.constexpr(
    "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [$8], {$4, $5, $6, $7}, [$12];"
)
_READ_ASM = gl.constexpr("ld.shared.v4.f32 {$0, $1, $2, $3}, [$4];")


@gluon.jit
def _there(address, rank):
    """The same address in CTA number `rank` of the cluster."""
    return gl.inline_asm_elementwise(
        _THERE_ASM, "=r,r,r", [address, rank], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _places(R: gl.constexpr, C: gl.constexpr, layout: gl.constexpr):
    """Bytes from the beginning of a slice [R, C] to where an element lies: four of a thread side by
    side, and a warp's in one piece. All four have the place of the first."""
    rows = gl.expand_dims(gl.arange(0, R, rows_of(layout)), 1)
    columns = gl.expand_dims(gl.arange(0, C, columns_of(layout)), 0)
    piece = rows // 16 * (C // 8) + columns // 8
    return (piece * 32 + rows % 8 * 4 + columns % 8 // 2) * 16


@gluon.jit
def _send(
    ring, acc, group: gl.constexpr, inbox, part, slice: gl.constexpr, slices: gl.constexpr,
    R: gl.constexpr, C: gl.constexpr, bits: gl.constexpr,
):  # fmt: skip
    """acc [R, C], `slices` slices from number `slice` on, to the CTAs that finish these.

    inbox: address of this warpgroup's sums, in every CTA. part: of K, this CTA's.
    """
    if slices > 1:
        half: gl.constexpr = slices // 2
        left, right = halves(acc, R, C, bits)
        _send(ring, left, group, inbox, part, slice, half, R, C // 2, bits)
        _send(ring, right, group, inbox, part, slice + half, half, R, C // 2, bits)
    else:
        rank = slice * ring.sharers + gl.program_id(0) % ring.sharers
        target = _there(inbox + part * (R * C * 4), rank)
        barrier = _there(ring.barriers + ARRIVED + 8 * group, rank)
        places = _places(R, C, accumulator_layout(C, bits))
        gl.inline_asm_elementwise(
            _SEND_ASM,
            "=r,=r,=r,=r,f,f,f,f,r,r,r,r,r,r,r,r",
            [acc, target + places, barrier + 0 * places],
            dtype=gl.int32,
            is_pure=False,
            pack=4,
        )


@gluon.jit
def _received(inbox, slices: gl.constexpr, R: gl.constexpr, C: gl.constexpr, bits: gl.constexpr):
    """The sum of this CTA's slice [R, C], of all parts."""
    layout: gl.constexpr = accumulator_layout(C, bits)
    places = _places(R, C, layout)
    total = gl.zeros([R, C], gl.float32, layout)
    for i in gl.static_range(slices):
        total += gl.inline_asm_elementwise(
            _READ_ASM,
            "=f,=f,=f,=f,r,r,r,r",
            [inbox + i * (R * C * 4) + places],
            dtype=gl.float32,
            is_pure=False,
            pack=4,
        )
    return total


@gluon.jit
def multiply_part(
    problem, shares, ring, out_desc, out_tiles, group: gl.constexpr, buffers: gl.constexpr
):
    """A consumer warpgroup of a CTA that has a part of a tile's steps."""
    groups: gl.constexpr = GROUPS
    split: gl.constexpr = problem.split
    R: gl.constexpr = problem.block_m // (groups if problem.split_rows else 1)
    C: gl.constexpr = problem.block_n // (1 if problem.split_rows else groups)
    bits: gl.constexpr = 8 * ring.a_tiles.dtype.itemsize
    join_cluster()
    arrived = ring.barriers + ARRIVED + 8 * group
    gl.inline_asm_elementwise(
        _expect_asm(R * C * 4), "=r,r", [arrived], dtype=gl.int32, is_pure=False, pack=1
    )
    tile, first, last = shares.part_of_cluster()
    if problem.in_turn:
        all_columns: gl.constexpr = problem.block_n
        acc, _ = multiply_in_turn(
            ring, no_pieces(all_columns), first_turn(group), last - first, group, all_columns
        )
        acc = sums_in_turn(ring, acc, group, all_columns)
    else:
        fill = first_fill()
        acc = gl.zeros([R, C], gl.float32, accumulator_layout(C, bits))
        ring.arrived(fill)
        left = left_of(problem, ring, fill, group, R)
        acc = multiply(left, right_of(problem, ring, fill, group, C), acc, use_acc=False)
        acc = wait(1, deps=[acc])
        previous = fill
        fill = ring.after(fill)
        acc, previous, fill = multiply_on(
            problem, ring, acc, previous, fill, first + 1, last, group, R, C
        )
        acc = wait(0, deps=[acc])
        ring.release(previous)

    cta = gl.program_id(0)
    sharer = cta % ring.sharers
    part = cta % ring.cluster // ring.sharers
    arrive_there(ring.barriers + READY, sharer, split, ring.sharers)
    wait_at(ring.barriers + READY, 0)
    inbox = ring.tiles + group * (R * C * 4)
    _send(ring, acc, group, inbox, part, 0, split, R, C, bits)
    wait_at(arrived, 0)
    columns: gl.constexpr = C // split
    total = _received(inbox, split, R, columns, bits)
    tile_m, tile_n = shares.corner(tile)
    row0 = (tile_m * ring.sharers + sharer) * problem.block_m
    column0 = tile_n * problem.block_n + part * columns
    if problem.split_rows:
        row0 += group * R
    else:
        column0 += group * C
    store_tile(
        problem, total, total, 0, out_desc, out_tiles, group, row0, column0, 0, R * columns,
        True, R, columns, buffers, bits,
    )  # fmt: skip
    if problem.in_turn:  # noqa: SIM102
        if shares.num_tiles < 0:  # never
            ring.keep()
    tma_store_wait(0)
