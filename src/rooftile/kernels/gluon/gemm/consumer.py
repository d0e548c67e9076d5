"""A consumer warpgroup: multiplies the segments of its CTA's share, publishes or finishes tiles."""
# mypy: disable-error-code="no-untyped-def"

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from rooftile.kernels.gluon.gemm.accumulator import add_step, first_columns, no_sums, settle
from rooftile.kernels.gluon.gemm.epilogue import halves, store_tile
from rooftile.kernels.gluon.gemm.fixup import await_parts, give_back, publish, store_part
from rooftile.kernels.gluon.gemm.problem import GROUPS
from rooftile.kernels.gluon.tile.cluster import join_cluster
from rooftile.kernels.gluon.tile.mma import accumulator_layout
from rooftile.kernels.gluon.tile.ring import first_fill
from rooftile.kernels.triton_version import tma_store_wait

QUIET_STEPS = gl.constexpr(4)  # after a part was written, before it is published


@gluon.jit
def multiply_on(
    problem, ring, acc, previous, fill, first, last, group: gl.constexpr, R: gl.constexpr,
    C: gl.constexpr,
):  # fmt: skip
    """acc plus steps first .. last - 1; the last step is still in flight."""
    for _ in range(first, last):
        ring.arrived(fill)
        acc = add_step(problem, ring, acc, fill, group, R, C)
        acc = settle(acc, 1, C)
        ring.release(previous)
        previous = fill
        fill = ring.after(fill)
    return acc, previous, fill


@gluon.jit
def _store_one(
    problem, acc, others, out_desc, out_tiles, group: gl.constexpr, row0, column0,
    streamed: gl.constexpr, R: gl.constexpr, C: gl.constexpr, buffers: gl.constexpr,
    bits: gl.constexpr,
):  # fmt: skip
    """Stores a tile that is one accumulator, of which half may be a gate."""
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
def _finish(
    problem, acc, others, out_desc, out_tiles, group: gl.constexpr, row0, column0,
    streamed: gl.constexpr, R: gl.constexpr, C: gl.constexpr, buffers: gl.constexpr,
    bits: gl.constexpr,
):  # fmt: skip
    """Stores a tile; streamed: after the parts of `others` have been added."""
    first: gl.constexpr = first_columns(C)
    if first < C:
        rest: gl.constexpr = C - first
        store_tile(
            problem, acc[0], acc[0], others, out_desc, out_tiles, group, row0, column0, 0, R * C,
            not streamed, R, first, buffers, bits,
        )  # fmt: skip
        store_tile(
            problem, acc[1], acc[1], others, out_desc, out_tiles, group, row0, column0, first,
            R * C, not streamed, R, rest, buffers, bits,
        )  # fmt: skip
    else:
        _store_one(
            problem, acc, others, out_desc, out_tiles, group, row0, column0, streamed, R, C,
            buffers, bits,
        )  # fmt: skip


@gluon.jit
def _write_part(
    problem, acc, cta, group: gl.constexpr, rows_left, R: gl.constexpr, C: gl.constexpr,
    bits: gl.constexpr,
):  # fmt: skip
    """Writes this CTA's part of a tile."""
    first: gl.constexpr = first_columns(C)
    layout: gl.constexpr = accumulator_layout(first, bits)
    if first < C:
        rest: gl.constexpr = C - first
        right: gl.constexpr = accumulator_layout(rest, bits)
        store_part(problem, acc[0], cta, group, rows_left, R * C, 0, R, first, layout)
        store_part(problem, acc[1], cta, group, rows_left, R * C, first, R, rest, right)
    else:
        store_part(problem, acc, cta, group, rows_left, R * C, 0, R, C, layout)


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
        acc = no_sums(R, C, bits)
        ring.arrived(fill)
        acc = add_step(problem, ring, acc, fill, group, R, C, False)
        acc = settle(acc, 1, C)
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
        acc = settle(acc, 0, C)
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
                _write_part(problem, acc, cta, group, rows_left, R, C, bits)
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
