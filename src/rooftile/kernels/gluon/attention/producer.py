"""The producer's role: one warp that tells the consumers what each tile is, and loads it."""
# mypy: disable-error-code="no-untyped-def"

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from rooftile.kernels.gluon.tile.mma import GROUP_ROWS
from rooftile.kernels.gluon.tile.ring import first_fill
from rooftile.kernels.gluon.tile.rows import coordinates


@gluon.jit
def load_tiles(problem, queue, q_desc, k_desc, v_desc, q_ring, k_ring, v_ring):
    """The producer warp: tells the consumers what each tile is, and loads it."""
    q_turn = first_fill()
    fill = first_fill()
    slot = first_fill()
    t = gl.program_id(0)
    while t < problem.num_tiles:
        following = queue.draw(t)
        batch, head, row0, q_start, q_len, kv_start, kv_len = problem.tile(t)
        first, blocks = problem.keys(row0, q_len, kv_len)
        queue.send(slot, (blocks, batch, head, row0, q_start, q_len, kv_len, first))
        kv_head = head // problem.group_size
        for group in gl.static_range(problem.groups):
            q_fill = problem.q_fill(q_turn, group)
            q_ring.acquire(q_fill)
            at = coordinates(problem.ragged, batch, head, q_start, q_len, row0 + group * GROUP_ROWS)
            q_ring.load(q_fill, q_desc, at)
        q_turn = problem.next_q(q_turn)
        for i in range(blocks):
            column0 = (first + blocks - 1 - i) * problem.block
            at = coordinates(problem.ragged, batch, kv_head, kv_start, kv_len, column0)
            k_ring.acquire(fill)
            k_ring.load(fill, k_desc, at)
            v_ring.acquire(fill)
            v_ring.load(fill, v_desc, at)
            fill = k_ring.after(fill)
        t = following
        slot = queue.after(slot)
    queue.finish()
    queue.send(slot, (0, 0, 0, 0, 0, 0, 0, 0))
