"""A consumer warpgroup: multiplies the segments of its CTA's share, publishes or finishes tiles."""
# mypy: disable-error-code="no-untyped-def"

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from rooftile.kernels.gluon.gemm.epilogue import halves, store_tile
from rooftile.kernels.gluon.gemm.fixup import await_parts, give_back, publish, store_part
from rooftile.kernels.gluon.gemm.problem import GROUPS
from rooftile.kernels.gluon.tile.cluster import join_cluster
from rooftile.kernels.gluon.tile.mma import accumulator_layout, multiply, wait
from rooftile.kernels.gluon.tile.ring import first_fill
from rooftile.kernels.triton_version import tma_store_wait

QUIET_STEPS = gl.constexpr(4)  # after a part was written, before it is published


@gluon.jit
def left_of(problem, ring, at, group: gl.constexpr, R: gl.constexpr):
    """This warpgroup's rows of the left operand, [R, block_k]."""
    tile = ring.a(at)
    if problem.a_by_rows:
        return tile.slice(group * R, R, 0) if problem.split_rows else tile
    else:
        tile = tile.slice(group * R, R, 1) if problem.split_rows else tile
        return tile.permute((1, 0))


@gluon.jit
def right_of(problem, ring, at, group: gl.constexpr, C: gl.constexpr):
    """This warpgroup's columns of the right operand, [block_k, C]."""
    if problem.b_by_rows:
        box: gl.constexpr = 0 if problem.split_rows else group
        return ring.b(at, box)
    else:
        tile = ring.whole_b(at)
        tile = tile if problem.split_rows else tile.slice(group * C, C, 0)
        return tile.permute((1, 0))


@gluon.jit
def multiply_on(
    problem, ring, acc, previous, fill, first, last, group: gl.constexpr, R: gl.constexpr,
    C: gl.constexpr,
):  # fmt: skip
    """acc plus steps first .. last - 1; the last product is still in flight."""
    for _ in range(first, last):
        ring.arrived(fill)
        left = left_of(problem, ring, fill, group, R)
        acc = multiply(left, right_of(problem, ring, fill, group, C), acc)
        acc = wait(1, deps=[acc])
        ring.release(previous)
        previous = fill
        fill = ring.after(fill)
    return acc, previous, fill


@gluon.jit
def _finish(
    problem, acc, others, out_desc, out_tiles, group: gl.constexpr, row0, column0,
    streamed: gl.constexpr, R: gl.constexpr, C: gl.constexpr, buffers: gl.constexpr,
    bits: gl.constexpr,
):  # fmt: skip
    """Stores a tile; streamed: after the parts of `others` have been added."""
    if problem.gated:
        gate, value = halves(acc, R, C, bits)
    else:
        gate = acc
        value = acc
    out_columns: gl.constexpr = C // (2 if problem.gated else 1)
    store_tile(
        problem, gate, value, others, out_desc, out_tiles, group, row0, column0, 0, R * C,
        not streamed, R, out_columns, buffers, bits,
    )  # fmt: skip


@gluon.jit
def multiply_share(
    problem,
    shares,
    ring,
    out_desc,
    out_tiles,
    group: gl.constexpr,
    buffers: gl.constexpr,
):
    groups: gl.constexpr = GROUPS
    R: gl.constexpr = problem.block_m // (groups if problem.split_rows else 1)
    C: gl.constexpr = problem.block_n // (1 if problem.split_rows else groups)
    bits: gl.constexpr = 8 * ring.a_tiles.dtype.itemsize
    ACC: gl.constexpr = accumulator_layout(C, bits)
    out_columns: gl.constexpr = C // (2 if problem.gated else 1)
    out_block: gl.constexpr = problem.block_n // (2 if problem.gated else 1)
    if problem.joined:
        join_cluster()
    fill = first_fill()
    cta = gl.program_id(0)
    begin, end, whole = shares.first()
    written = cta < 0  # a part, of which nobody knows yet
    while (end > begin) | (whole < shares.num_tiles):
        tile, first, last, end, whole = shares.take(begin, end, whole)
        acc = gl.zeros([R, C], gl.float32, ACC)
        ring.arrived(fill)
        left = left_of(problem, ring, fill, group, R)
        acc = multiply(left, right_of(problem, ring, fill, group, C), acc, use_acc=False)
        acc = wait(1, deps=[acc])
        previous = fill
        fill = ring.after(fill)
        step = first + 1
        # Apart, because the one is known when the kernel is compiled.
        if shares.streamed:  # noqa: SIM102
            if written:
                # The memory has taken the part by now, or will soon: nothing stands still for it.
                quiet = gl.minimum(last, step + QUIET_STEPS)
                acc, previous, fill = multiply_on(
                    problem, ring, acc, previous, fill, step, quiet, group, R, C
                )
                step = quiet
                publish(problem, cta, group)
                written = cta < 0
        acc, previous, fill = multiply_on(
            problem, ring, acc, previous, fill, step, last, group, R, C
        )
        acc = wait(0, deps=[acc])
        ring.release(previous)

        tile_m, tile_n = shares.corner(tile)
        row0 = (tile_m * problem.sharers + cta % problem.sharers) * problem.block_m
        column0 = tile_n * out_block
        if problem.split_rows:
            row0 += group * R
        else:
            column0 += group * out_columns
        if shares.apart:
            row0 += shares.part() * (shares.tiles_m * problem.sharers * problem.block_m)
        if shares.streamed:
            rows_left = problem.m - row0
            if last < shares.iterations.value:
                store_part(problem, acc, cta, group, rows_left, R, C, ACC)
                written = cta >= 0
                if (end <= begin) & (whole >= shares.num_tiles):
                    publish(problem, cta, group)
            else:
                start = tile * shares.iterations.value
                edge = start + first
                others = 0
                while edge > start:  # the parts before mine, backwards along K
                    others += 1
                    edge = shares.bound(shares.cta() - others)
                await_parts(problem, cta, others, group)
                _finish(
                    problem, acc, others, out_desc, out_tiles, group, row0, column0, True, R, C,
                    buffers, bits,
                )  # fmt: skip
                give_back(problem, cta, others, group)
        else:
            _finish(
                problem, acc, 0, out_desc, out_tiles, group, row0, column0, False, R, C, buffers,
                bits,
            )  # fmt: skip
    tma_store_wait(0)
