"""A consumer warpgroup: multiplies the segments of its CTA's share, publishes or finishes tiles."""
# mypy: disable-error-code="no-untyped-def"

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from rooftile.kernels.gluon.gemm.accumulator import (
    add_step,
    columns_of_sums,
    is_odd_width,
    no_pieces,
    no_sums,
    settle,
)
from rooftile.kernels.gluon.gemm.epilogue import halves, parts_of, store_tile
from rooftile.kernels.gluon.gemm.fixup import await_parts, give_back, publish, store_part
from rooftile.kernels.gluon.gemm.problem import GROUPS
from rooftile.kernels.gluon.gemm.turns import first_turn, multiply_in_turn, trade
from rooftile.kernels.gluon.tile.cluster import join_cluster
from rooftile.kernels.gluon.tile.mma import GROUP_ROWS, accumulator_layout
from rooftile.kernels.gluon.tile.ring import first_fill
from rooftile.kernels.triton_version import tma_store_wait
from rooftile.planning.tile_width import power_below

_power_below = gluon.constexpr_function(power_below)
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
        acc = settle(acc, 1, R, C)
        ring.release(previous)
        previous = fill
        fill = ring.after(fill)
    return acc, previous, fill


@gluon.constexpr_function
def _first_column(chunk, columns, width):
    """Of a chunk; the last one ends with the tile, and stores some columns once more."""
    return min(chunk * width, columns - width)


@gluon.jit
def _finish(
    problem, acc, others, out_desc, out_tiles, group: gl.constexpr, row0, column0,
    streamed: gl.constexpr, R: gl.constexpr, C: gl.constexpr, buffers: gl.constexpr,
    bits: gl.constexpr,
):  # fmt: skip
    """Stores a tile; streamed: after the parts of `others` have been added."""
    if is_odd_width(C):
        width: gl.constexpr = out_desc.block_shape[0 if problem.transposed else 1]
        rows: gl.constexpr = GROUP_ROWS
        for block in gl.static_range(R // rows):
            for i in gl.static_range(parts_of(C, width)):
                x = columns_of_sums(acc, block * C + _first_column(i, C, width), width)
                store_tile(
                    problem, x, x, others, out_desc, out_tiles, group, row0 + block * rows, column0,
                    _first_column(i, C, width), rows * C, not streamed, rows, width, buffers, bits,
                )  # fmt: skip
    else:
        if problem.gated:
            gate, value = halves(acc, R, C, bits)
        else:
            gate = acc
            value = acc
        store_tile(
            problem, gate, value, others, out_desc, out_tiles, group, row0, column0, 0, R * C,
            not streamed, R, C // (2 if problem.gated else 1), buffers, bits,
        )  # fmt: skip


@gluon.jit
def _write_columns(
    problem, acc, cta, group: gl.constexpr, rows_left, first: gl.constexpr, R: gl.constexpr,
    C: gl.constexpr, bits: gl.constexpr,
):  # fmt: skip
    """Writes columns from `first` on of this CTA's part of a tile, a power of two at a time."""
    if first < C:
        width: gl.constexpr = _power_below(C - first)
        x = columns_of_sums(acc, first, width)
        layout: gl.constexpr = accumulator_layout(width, bits)
        store_part(problem, x, cta, group, rows_left, R * C, first, R, width, layout)
        _write_columns(problem, acc, cta, group, rows_left, first + width, R, C, bits)


@gluon.jit
def _write_part(
    problem, acc, cta, group: gl.constexpr, rows_left, R: gl.constexpr, C: gl.constexpr,
    bits: gl.constexpr,
):  # fmt: skip
    """Writes this CTA's part of a tile."""
    if is_odd_width(C):
        gl.static_assert(R == GROUP_ROWS)
        _write_columns(problem, acc, cta, group, rows_left, 0, R, C, bits)
    else:
        layout: gl.constexpr = accumulator_layout(C, bits)
        store_part(problem, acc, cta, group, rows_left, R * C, 0, R, C, layout)


@gluon.jit
def sums_in_turn(ring, acc, group: gl.constexpr, columns: gl.constexpr):
    """This warpgroup's columns of a tile, of which both have multiplied all `columns` in turn, as pieces or
    as one accumulator."""
    C: gl.constexpr = columns // GROUPS
    acc = trade(ring, acc, group, columns)
    if is_odd_width(C):
        return acc
    else:
        return columns_of_sums(acc, 0, C)


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
    turn = first_turn(group)
    cta = gl.program_id(0)
    begin, end, whole = shares.first()
    written = cta < 0  # a part, of which nobody knows yet
    while (end > begin) | (whole < shares.num_tiles):
        tile, first, last, end, whole = shares.take(begin, end, whole)
        if problem.in_turn:
            all_columns: gl.constexpr = problem.block_n
            pieces = no_pieces(all_columns)
            step = first
            if shares.streamed:  # noqa: SIM102
                if written:
                    quiet = gl.minimum(last, step + QUIET_STEPS)
                    pieces, turn = multiply_in_turn(
                        ring, pieces, turn, quiet - step, group, all_columns
                    )
                    step = quiet
                    publish(problem, cta, group)
                    written = cta < 0
            pieces, turn = multiply_in_turn(ring, pieces, turn, last - step, group, all_columns)
            acc = sums_in_turn(ring, pieces, group, all_columns)
        else:
            acc = no_sums(R, C, bits)
            ring.arrived(fill)
            acc = add_step(problem, ring, acc, fill, group, R, C, False)
            acc = settle(acc, 1, R, C)
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
            acc = settle(acc, 0, R, C)
            ring.release(previous)

        tile_m, tile_n = shares.corner(tile)
        row0 = (tile_m * problem.sharers + cta % problem.sharers) * problem.block_m
        column0 = (tile_n * problem.across + cta // problem.sharers % problem.across) * out_block
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
    if is_odd_width(C) or problem.in_turn:  # noqa: SIM102
        if shares.num_tiles < 0:  # never
            ring.keep()
    tma_store_wait(0)
