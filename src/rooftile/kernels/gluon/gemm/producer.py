"""The producer warp: loads the operands of every step of its CTA's share."""
# mypy: disable-error-code="no-untyped-def"

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from rooftile.kernels.gluon.tile.cluster import join_cluster
from rooftile.kernels.gluon.tile.dependent import await_kernels_before
from rooftile.kernels.gluon.tile.ring import first_fill


@gluon.jit
def _load_a(problem, ring, fill, a_desc, row0, k0):
    if problem.a_by_rows:
        ring.load_a(fill, a_desc, (row0, k0))
    else:
        ring.load_a(fill, a_desc, (k0, row0))


@gluon.jit
def _load_b(problem, ring, fill, b_desc, column0, k0):
    box_columns: gl.constexpr = problem.block_n // problem.b_boxes
    for box in gl.static_range(problem.b_boxes):
        if problem.gated:  # gate and value in turn, for each warpgroup's columns
            column = column0 + (box // 2) * box_columns
            if box % 2 == 1:
                column += problem.n // 2
        else:
            column = column0 + box * box_columns
        if problem.b_by_rows:
            ring.load_b(fill, box, b_desc, (k0, column))
        else:
            ring.load_b(fill, box, b_desc, (column, k0))


@gluon.jit
def load_operands(problem, shares, ring, a_desc, b_desc):
    out_columns: gl.constexpr = problem.block_n // (2 if problem.gated else 1)
    fill = first_fill()
    begin, end, whole = shares.first()
    early = begin * 0  # steps whose weights are loaded before the kernels before have ended
    if problem.ahead:
        tile, first, last, _, _ = shares.take(begin, end, whole)
        tile_n = shares.corner(tile)[1]
        early = gl.minimum(last - first, ring.stages)
        at = fill
        for i in range(first, first + early):
            ring.acquire(at)
            _load_b(problem, ring, at, b_desc, tile_n * out_columns, i * problem.block_k)
            at = ring.after(at)
    await_kernels_before()
    while (end > begin) | (whole < shares.num_tiles):
        tile, first, last, end, whole = shares.take(begin, end, whole)
        tile_m, tile_n = shares.corner(tile)
        row0 = tile_m * problem.block_m
        column0 = tile_n * out_columns
        if problem.ahead:
            for i in range(first, first + early):
                _load_a(problem, ring, fill, a_desc, row0, i * problem.block_k)
                fill = ring.after(fill)
        for i in range(first + early, last):
            k0 = i * problem.block_k
            ring.acquire(fill)
            _load_a(problem, ring, fill, a_desc, row0, k0)
            _load_b(problem, ring, fill, b_desc, column0, k0)
            fill = ring.after(fill)
        early = begin * 0


@gluon.jit
def first_loads(problem, shares, ring):
    """What a CTA's producer loads first: its segment, the corner of its tile, and what is left then."""
    if problem.split > 1:
        tile, first, last = shares.part_of_cluster()
        begin, end, whole = 0 * tile, 0 * tile, shares.num_tiles
        more = tile < shares.num_tiles
    else:
        begin, end, whole = shares.first()
        more = (end > begin) | (whole < shares.num_tiles)
        tile, first, last, end, whole = shares.take(begin, end, whole)
    tile_m, tile_n = shares.corner(tile)
    if not shares.streamed:
        ring.now(tile_m ^ tile_n)
    return begin, end, whole, more, tile_m, tile_n, first, last


@gluon.jit
def load_operands_together(
    problem, shares, ring, begin, end, whole, more, tile_m, tile_n, first, last
):
    """The same by the CTAs of a cluster, of operands whose contiguous dimension is k.

    begin, ...: `first_loads`, which is known before others are waited for.
    """
    fill = first_fill()
    rank = gl.program_id(0) % problem.sharers
    beside = gl.program_id(0) // problem.sharers % problem.across
    if problem.joined:
        join_cluster()
    await_kernels_before()
    while more:
        row0 = (tile_m * problem.sharers + rank) * problem.block_m
        column0 = (tile_n * problem.across + beside) * problem.block_n
        fill = ring.load(fill, row0, column0, first, last)
        more = (end > begin) | (whole < shares.num_tiles)
        if problem.split == 1:
            tile, first, last, end, whole = shares.take(begin, end, whole)
            tile_m, tile_n = shares.corner(tile)
    ring.drain(fill)
