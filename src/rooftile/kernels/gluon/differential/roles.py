"""The roles: a warpgroup for each softmax of a pair, and a warp that loads.

Both warpgroups have the same 64 query rows of a pair; each multiplies its own queries with its own
keys, and both read the same values. The second hands lam times its output to the first through shared
memory, rounded to the dtype of the result, as two calls would.
"""
# mypy: disable-error-code="no-untyped-def"

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from rooftile.kernels.gluon.attention.again import attend_again
from rooftile.kernels.gluon.attention.consumer import attend_overlapped
from rooftile.kernels.gluon.attention.problem import (
    BATCH,
    BLOCKS,
    FIRST,
    HEAD,
    KV_LEN,
    Q_LEN,
    Q_START,
    ROW0,
)
from rooftile.kernels.gluon.tile.barrier import start_turns
from rooftile.kernels.gluon.tile.mask import whole_range
from rooftile.kernels.gluon.tile.mma import (
    GROUP_ROWS,
    accumulator_layout,
    columns_of,
    rows_of,
    wait,
)
from rooftile.kernels.gluon.tile.record import record
from rooftile.kernels.gluon.tile.ring import first_fill
from rooftile.kernels.gluon.tile.rows import coordinates
from rooftile.kernels.gluon.tile.softmax import OnlineSoftmax, any_overflowed, start_softmax
from rooftile.kernels.triton_version import tma_store, tma_store_wait


@record
class Pair:
    """What the halves of a pair share beside the problem."""

    lse1: gl.tensor  # pointers, [tokens, pairs] or [batch, q_len, pairs] float32
    lse2: gl.tensor
    lam: gl.tensor  # pointer, float32
    lam_batch_stride: gl.tensor
    lam_stride: gl.tensor  # of tokens
    lam_pair_stride: gl.tensor
    o_tile: gl.shared_memory_descriptor  # box of the output: first lam times the second output
    hand_over: gl.shared_memory_descriptor  # [2, 1] barriers: o_tile is free, it is written
    landed: gl.shared_memory_descriptor  # [2, 1] barriers of a second pass over a tile
    shared_keys: gl.constexpr


@gluon.jit
def _load_keys(
    problem, pair, k1_desc, k2_desc, v_desc, k1_ring, k2_ring, v_ring, fill, batch, head, start,
    length, row,
):  # fmt: skip
    at = coordinates(problem.ragged, batch, head, start, length, row)
    k1_ring.acquire(fill)
    k1_ring.load(fill, k1_desc, at)
    if not pair.shared_keys:
        k2_ring.acquire(fill)
        k2_ring.load(fill, k2_desc, at)
    v_ring.acquire(fill)
    v_ring.load(fill, v_desc, at)


@gluon.jit
def load_pairs(
    problem, pair, queue, q1_desc, q2_desc, k1_desc, k2_desc, v_desc, q1_ring, q2_ring, k1_ring,
    k2_ring, v_ring,
):  # fmt: skip
    """The producer warp: tells the consumers what each tile is, and loads it, last keys first."""
    q_turn = first_fill()
    fill = first_fill()
    slot = first_fill()
    t = gl.program_id(0)
    last = problem.num_tiles - 1
    batch, head, row0, q_start, q_len, kv_start, kv_len = problem.tile(gl.minimum(t, last))
    while t < problem.num_tiles:
        first, blocks = problem.keys(row0, q_len, kv_len)
        kv_head = head // problem.group_size
        place = kv_start if problem.ragged else batch
        queue.send(slot, (blocks, place, head, row0, q_start, q_len, kv_len, first))
        at = coordinates(problem.ragged, batch, head, q_start, q_len, row0)
        q1_ring.acquire(q_turn)
        q1_ring.load(q_turn, q1_desc, at)
        q2_ring.acquire(q_turn)
        q2_ring.load(q_turn, q2_desc, at)
        q_turn = problem.next_q(q_turn)
        row = (first + blocks - 1) * problem.block
        for i in range(blocks):
            _load_keys(
                problem, pair, k1_desc, k2_desc, v_desc, k1_ring, k2_ring, v_ring, fill, batch,
                kv_head, kv_start, kv_len, row,
            )  # fmt: skip
            fill = v_ring.after(fill)
            row -= problem.block
            if i == 0:  # which tile follows is found out behind what the consumers wait for
                t = queue.draw(t)
        slot = queue.after(slot)
        batch, head, row0, q_start, q_len, kv_start, kv_len = problem.tile(gl.minimum(t, last))
    queue.finish()
    queue.send(slot, (0, 0, 0, 0, 0, 0, 0, 0))


@gluon.jit
def attend_half(
    problem, pair, queue, o_desc, k64_desc, v64_desc, q_ring, k_ring, v_ring, group: gl.constexpr
):
    """The consumer of a pair's first (group 0) or second softmax."""
    block: gl.constexpr = problem.block
    v_dim: gl.constexpr = v_ring.columns
    dtype: gl.constexpr = o_desc.dtype
    S: gl.constexpr = accumulator_layout(block)
    O: gl.constexpr = accumulator_layout(v_dim)  # noqa: E741
    columns = gl.arange(0, block, columns_of(S))
    out = pair.o_tile.reshape([GROUP_ROWS, v_dim])

    start_turns(group, problem.turns)
    q_turn = first_fill()
    fill = first_fill()
    slot = first_fill()
    phase = gl.to_tensor(0)
    queue.arrived(slot)
    blocks = queue.field(slot, BLOCKS)
    while blocks > 0:
        place = queue.field(slot, BATCH)
        head = queue.field(slot, HEAD)
        row0 = queue.field(slot, ROW0)
        q_start = queue.field(slot, Q_START)
        q_len = queue.field(slot, Q_LEN)
        kv_len = queue.field(slot, KV_LEN)
        last = queue.field(slot, FIRST) + blocks - 1
        queue.release(slot)
        offset = kv_len - q_len
        rows = row0 + gl.arange(0, GROUP_ROWS, rows_of(S))
        low, high = whole_range(
            row0,
            offset,
            kv_len,
            problem.left,
            problem.right,
            GROUP_ROWS,
            block,
            problem.has_left,
            problem.has_right,
        )
        end = kv_len
        if problem.has_right:
            end = gl.minimum(end, row0 + offset + problem.right + 1)
        anchor = gl.maximum(end - 1, 0) // block
        q_ring.arrived(q_turn)
        o, weights, v_fill, softmax, fill = attend_overlapped(
            problem,
            q_ring.tile(q_turn),
            k_ring,
            v_ring,
            fill,
            blocks,
            last,
            start_softmax(GROUP_ROWS, rows_of(S)),
            rows,
            columns,
            low,
            high,
            offset,
            kv_len,
            row0,
            None,
            dtype,
            group,
            S,
            O,
            anchor=anchor,
        )
        o, weights = wait(0, deps=[o, weights])
        v_ring.release(v_fill)
        batch = 0 if problem.ragged else place
        if group == 1:
            mbarrier.wait(pair.hand_over.index(0), phase)
        if problem.anchored:  # noqa: SIM102, known at compile time
            if any_overflowed(softmax.total):
                o, maximum, total = attend_again(
                    problem,
                    k64_desc,
                    v64_desc,
                    pair.landed.index(group),
                    q_ring.tile(q_turn),
                    pair.o_tile,
                    place,
                    head,
                    row0,
                    q_len,
                    kv_len,
                    None,
                    dtype,
                    v_dim,
                )
                softmax = OnlineSoftmax(
                    gl.convert_layout(maximum, rows_of(S)), gl.convert_layout(total, rows_of(S))
                )
        q_ring.release(q_turn)
        q_turn = problem.next_q(q_turn)
        token = (batch * problem.q_len + q_start + rows).to(gl.int64)
        at_lse = token * problem.num_heads + head
        scale = softmax.reciprocal()
        if group == 0:
            gl.store(pair.lse1 + at_lse, softmax.lse(), mask=rows < q_len)
            tma_store_wait(0)
            mbarrier.arrive(pair.hand_over.index(0), count=1)
        else:
            at = gl.cast(batch, gl.int64) * pair.lam_batch_stride + head * pair.lam_pair_stride
            at = at + (q_start + rows).to(gl.int64) * pair.lam_stride
            # Nothing is known of a padding token's lam, which may be NaN.
            share = gl.load(pair.lam + at, mask=(rows < q_len) & (softmax.total > 0.0), other=0.0)
            gl.store(pair.lse2 + at_lse, softmax.lse(), mask=rows < q_len)
            scale = scale * share
        o = o * gl.expand_dims(gl.convert_layout(scale, rows_of(O)), 1)
        if group == 0:
            mbarrier.wait(pair.hand_over.index(1), phase)
            o = o - out.load(O).to(gl.float32)
            out.store(o.to(dtype))
            fence_async_shared()
            at = coordinates(problem.ragged, batch, head, q_start, q_len, row0)
            tma_store(o_desc, at, pair.o_tile)
        else:
            out.store(o.to(dtype))
            gl.thread_barrier()
            mbarrier.arrive(pair.hand_over.index(1), count=1)
        phase = phase ^ 1
        slot = queue.after(slot)
        queue.arrived(slot)
        blocks = queue.field(slot, BLOCKS)
    tma_store_wait(0)
