"""The producer's role: one warp that tells the consumers what each tile is, and loads it."""
# mypy: disable-error-code="no-untyped-def"

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from rooftile.kernels.gluon.attention.shares import (
    FIRST_BLOCK,
    FOLLOWING,
    NUM_BLOCKS,
    TILE,
)
from rooftile.kernels.gluon.tile.mma import GROUP_ROWS
from rooftile.kernels.gluon.tile.ring import first_fill
from rooftile.kernels.gluon.tile.rows import coordinates


@gluon.jit
def _load_q(problem, q_desc, q_ring, q_turn, batch, head, q_start, q_len, row0):
    for group in gl.static_range(problem.groups):
        q_fill = problem.q_fill(q_turn, group)
        q_ring.acquire(q_fill)
        at = coordinates(problem.ragged, batch, head, q_start, q_len, row0 + group * GROUP_ROWS)
        q_ring.load(q_fill, q_desc, at, problem.k_used)


@gluon.jit
def _tile(problem, shares, t, last):
    """What tile t is, or that of the item at place t; beyond the last, something valid."""
    t = gl.minimum(t, last)
    if shares.split:
        t = shares.word(t, TILE, t)
    return problem.tile(t)


@gluon.jit
def _begin(
    problem,
    queue,
    q_desc,
    k_desc,
    v_desc,
    q_ring,
    k_ring,
    v_ring,
    slot,
    q_turn,
    fill,
    tile,
    kv_head,
    column0,  # the first of the tile's last keys
    message,
):
    """Loads a tile's queries, last keys and values, and tells of the tile; the fill that follows."""
    batch, head, row0, q_start, q_len, kv_start, kv_len = tile
    if problem.own_output:
        _load_q(problem, q_desc, q_ring, q_turn, batch, head, q_start, q_len, row0)
    at = coordinates(problem.ragged, batch, kv_head, kv_start, kv_len, column0)
    k_ring.acquire(fill)
    k_ring.load(fill, k_desc, at, problem.k_used)
    queue.send(slot, message)
    v_ring.acquire(fill)
    v_ring.load(fill, v_desc, at, problem.v_used)
    return k_ring.after(fill)


@gluon.jit
def load_tiles(problem, shares, queue, q_desc, k_desc, v_desc, q_ring, k_ring, v_ring):
    """The producer warp: tells the consumers what each tile is, and loads it.

    What the consumers wait for comes first: the first keys of a tile. Which tile follows is found
    out behind them (a draw from global memory and, where ragged, a read of it take a microsecond),
    while the consumers are busy.
    """
    q_turn = first_fill()
    fill = first_fill()
    slot = first_fill()
    t = gl.program_id(0)
    last = problem.num_tiles - 1
    tile = _tile(problem, shares, t, last)
    while t < problem.num_tiles:
        batch, head, row0, q_start, q_len, kv_start, kv_len = tile
        first, blocks = problem.keys(row0, q_len, kv_len)
        if shares.split:
            first = shares.word(t, FIRST_BLOCK, first)
            blocks = shares.word(t, NUM_BLOCKS, blocks)
        kv_head = head // problem.group_size
        column0 = (first + blocks - 1) * problem.block
        place = batch
        if problem.ragged and not problem.mods.any:
            place = kv_start
        if shares.split:
            message = (blocks, place, head, row0, q_start, q_len, kv_len, first, t)
        else:
            message = (blocks, place, head, row0, q_start, q_len, kv_len, first)  # type: ignore[assignment]
        if problem.loads_early:
            if t < gl.num_programs(0):
                queue.send(slot, message)
                fill = k_ring.after(fill)
            else:
                fill = _begin(
                    *(problem, queue, q_desc, k_desc, v_desc, q_ring, k_ring, v_ring),
                    *(slot, q_turn, fill, tile, kv_head, column0, message),
                )
        else:
            fill = _begin(
                *(problem, queue, q_desc, k_desc, v_desc, q_ring, k_ring, v_ring),
                *(slot, q_turn, fill, tile, kv_head, column0, message),
            )
        after = queue.draw(t)
        t = shares.word(t, FOLLOWING, after) if shares.split else after
        tile = _tile(problem, shares, t, last)
        if not problem.own_output:  # Q waits until the tile before has left its place
            _load_q(problem, q_desc, q_ring, q_turn, batch, head, q_start, q_len, row0)
        q_turn = problem.next_q(q_turn)
        for _ in range(1, blocks):
            column0 -= problem.block
            at = coordinates(problem.ragged, batch, kv_head, kv_start, kv_len, column0)
            k_ring.acquire(fill)
            k_ring.load(fill, k_desc, at, problem.k_used)
            v_ring.acquire(fill)
            v_ring.load(fill, v_desc, at, problem.v_used)
            fill = k_ring.after(fill)
        slot = queue.after(slot)
    queue.finish()
    if shares.split:
        queue.send(slot, (0, 0, 0, 0, 0, 0, 0, 0, 0))
    else:
        queue.send(slot, (0, 0, 0, 0, 0, 0, 0, 0))
