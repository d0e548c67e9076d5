"""The roles: a warp that loads, last keys first, and warpgroups of 64 query rows that attend.

Where the walk crosses a chunk's border, the producer sends the next rotation of the queries behind the
first keys that meet it, and the consumers give the one before back and go on with the same softmax.
"""
# mypy: disable-error-code="no-untyped-def"

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from rooftile.kernels.gluon.attention.consumer import hide, next_block
from rooftile.kernels.gluon.dual_chunk.again import attend_again
from rooftile.kernels.gluon.dual_chunk.problem import (
    BLOCKS,
    HEAD,
    KV_LEN,
    Q_LEN,
    Q_START,
    ROW0,
)
from rooftile.kernels.gluon.tile.barrier import pass_turn, start_turns, take_turn
from rooftile.kernels.gluon.tile.mask import whole_range
from rooftile.kernels.gluon.tile.mma import (
    GROUP_ROWS,
    accumulator_layout,
    columns_of,
    left_operand_layout,
    multiply,
    narrow,
    rows_of,
    wait,
)
from rooftile.kernels.gluon.tile.ring import first_fill
from rooftile.kernels.gluon.tile.roles import warpgroup
from rooftile.kernels.gluon.tile.rows import coordinates
from rooftile.kernels.gluon.tile.said import any_of
from rooftile.kernels.gluon.tile.softmax import (
    OnlineSoftmax,
    overflowed,
    soft_cap,
    start_softmax,
)
from rooftile.kernels.triton_version import tma_store, tma_store_wait


@gluon.jit
def _load_queries(problem, descs, q_ring, turn, rotation, head, start, length, row0):
    """The tile of each warpgroup; returns the turn that follows."""
    for group in gl.static_range(problem.groups):
        fill = problem.q_fill(turn, group)
        at = coordinates(True, 0, head, start, length, row0 + group * GROUP_ROWS)
        q_ring.acquire(fill)
        if rotation == 0:
            q_ring.load(fill, descs[0], at)
        elif rotation == 1:
            q_ring.load(fill, descs[1], at)
        else:
            q_ring.load(fill, descs[2], at)
    return problem.next_q(turn)


@gluon.jit
def load_tiles(
    problem, queue, intra_desc, succ_desc, inter_desc, k_desc, v_desc, q_ring, k_ring, v_ring
):
    """The producer warp: tells the consumers what each tile is, and loads it."""
    descs = (intra_desc, succ_desc, inter_desc)
    q_turn = first_fill()
    fill = first_fill()
    slot = first_fill()
    t = gl.program_id(0)
    last_tile = problem.num_tiles - 1
    head, row0, q_start, q_len, kv_start, kv_len = problem.tile(gl.minimum(t, last_tile))
    while t < problem.num_tiles:
        blocks = problem.blocks(row0, q_len, kv_len)
        kv_head = head // problem.group_size
        rotation, border = problem.first_rotation(blocks - 1, kv_len)
        due = problem.due(blocks - 1, border)
        q_turn = _load_queries(problem, descs, q_ring, q_turn, rotation, head, q_start, q_len, row0)
        queue.send(slot, (blocks, head, row0, q_start, q_len, kv_len))
        slot = queue.after(slot)
        for i in range(blocks):
            n = blocks - 1 - i
            at = coordinates(True, 0, kv_head, kv_start, kv_len, n * problem.block)
            k_ring.acquire(fill)
            k_ring.load(fill, k_desc, at)
            if n == due:
                first = border - 1
                rotation, border = problem.next_rotation(rotation, border)
                due = problem.due(first, border)
                q_turn = _load_queries(
                    problem, descs, q_ring, q_turn, rotation, head, q_start, q_len, row0
                )
            v_ring.acquire(fill)
            v_ring.load(fill, v_desc, at)
            fill = k_ring.after(fill)
            if i == 0:  # which tile follows is found out behind what the consumers wait for
                t = queue.draw(t)
        head, row0, q_start, q_len, kv_start, kv_len = problem.tile(gl.minimum(t, last_tile))
    queue.finish()
    queue.send(slot, (0, 0, 0, 0, 0, 0))


@gluon.jit
def attend(
    problem,
    queue,
    o_desc,
    intra_desc,
    succ_desc,
    inter_desc,
    k64_desc,  # of keys and of values in boxes of 64 rows, for a second pass over a tile
    v64_desc,
    landed,  # [groups, 1] barriers of that pass
    said,  # [groups, 4] int32: whether a warp has rows that are to be computed again
    q_ring,
    k_ring,
    v_ring,
    o_tiles,
    of_group: gl.constexpr,
):
    """One consumer warpgroup: rows group * 64 .. group * 64 + 63 of every tile."""
    group = warpgroup(of_group, problem.groups)
    block: gl.constexpr = problem.block
    v_dim: gl.constexpr = v_ring.columns
    dtype: gl.constexpr = o_desc.dtype
    S: gl.constexpr = accumulator_layout(block)
    O: gl.constexpr = accumulator_layout(v_dim)  # noqa: E741
    columns = gl.arange(0, block, columns_of(S))

    start_turns(group, problem.turns)
    q_turn = first_fill()
    fill = first_fill()
    slot = first_fill()
    queue.arrived(slot)
    blocks = queue.field(slot, BLOCKS)
    while blocks > 0:
        row0 = queue.field(slot, ROW0) + group * GROUP_ROWS
        q_len = queue.field(slot, Q_LEN)
        kv_len = queue.field(slot, KV_LEN)
        last = blocks - 1
        offset = kv_len - q_len
        rows = row0 + gl.arange(0, GROUP_ROWS, rows_of(S))
        rotation, border = problem.first_rotation(last, kv_len)
        low, high = whole_range(row0, offset, kv_len, 0, 0, GROUP_ROWS, block, False, True)
        anchor = gl.maximum(gl.minimum(kv_len, row0 + offset + 1) - 1, 0) // block
        q_fill = problem.q_fill(q_turn, group)
        q_ring.arrived(q_fill)
        q_turn = problem.next_q(q_turn)
        # The first block, the last of the keys: nothing to overlap it with.
        k_ring.arrived(fill)
        take_turn(group, problem.turns)
        s = gl.zeros([GROUP_ROWS, block], gl.float32, S)
        s = multiply(q_ring.tile(q_fill), k_ring.tile(fill).permute((1, 0)), s, use_acc=False)
        pass_turn(group, problem.turns)
        s = wait(0, deps=[s])
        k_ring.release(fill)
        factor = problem.factor
        if problem.has_softcap:
            s = soft_cap(s, problem.factor, problem.softcap)
            factor = 1.0
        if (last < low) | (last >= high):
            s = hide(problem, s, rows, last * block, columns, offset, kv_len)
        softmax = start_softmax(GROUP_ROWS, rows_of(S))
        p, _alpha, softmax = softmax.step(s, factor, problem.lazy, problem.software_share)
        weights = gl.convert_layout(narrow(p, dtype), left_operand_layout(O))
        o = gl.zeros([GROUP_ROWS, v_dim], gl.float32, O)
        v_fill = fill
        fill = k_ring.after(fill)
        k_ring.arrived(fill, pred=blocks > 1)
        # A loop for each rotation of the queries: its blocks cost what plain attention's do.
        n = last - 1
        for run in range(problem.runs(rotation, kv_len)):
            if run > 0:
                rotation, border = problem.next_rotation(rotation, border)
                q_ring.release(q_fill)
                q_fill = problem.q_fill(q_turn, group)
                q_ring.arrived(q_fill)
                q_turn = problem.next_q(q_turn)
            q = q_ring.tile(q_fill)
            run_begin = gl.maximum(border, 0)
            for i in range(n + 1 - run_begin):
                at = fill
                o, weights, softmax, fill = next_block(
                    problem,
                    q,
                    k_ring,
                    v_ring,
                    fill,
                    v_fill,
                    n - i > 0,
                    o,
                    weights,
                    softmax,
                    rows,
                    columns,
                    n - i,
                    low,
                    high,
                    offset,
                    kv_len,
                    group,
                    S,
                    O,
                    anchored=problem.anchored,
                    anchor=anchor,
                )
                v_fill = at
            n = run_begin - 1
        v_ring.arrived(v_fill)
        o = multiply(weights, v_ring.tile(v_fill), o)
        o, weights = wait(0, deps=[o, weights])
        v_ring.release(v_fill)
        # Read once more instead of kept: the loop has no registers to spare.
        head = queue.field(slot, HEAD)
        row0 = queue.field(slot, ROW0) + group * GROUP_ROWS
        q_start = queue.field(slot, Q_START)
        q_len = queue.field(slot, Q_LEN)
        kv_len = queue.field(slot, KV_LEN)
        rows = row0 + gl.arange(0, GROUP_ROWS, rows_of(S))
        if problem.anchored:  # noqa: SIM102, known at compile time
            if any_of(said.index(group), overflowed(softmax.total)):
                o, maximum, total = attend_again(
                    problem,
                    intra_desc,
                    succ_desc,
                    inter_desc,
                    k64_desc,
                    v64_desc,
                    landed.index(group),
                    q_ring.tile(q_fill),
                    q_ring.box(q_fill),
                    o_tiles.index(group),
                    head,
                    row0,
                    q_start,
                    q_len,
                    kv_len,
                    dtype,
                    v_dim,
                )
                softmax = OnlineSoftmax(
                    gl.convert_layout(maximum, rows_of(S)), gl.convert_layout(total, rows_of(S))
                )
        if problem.own_output:
            q_ring.release(q_fill)
            out = o_tiles.index(group)
        else:
            out = q_ring.box(q_fill)
        tma_store_wait(0)
        o = o * gl.expand_dims(gl.convert_layout(softmax.reciprocal(), rows_of(O)), 1)
        out.reshape([GROUP_ROWS, v_dim]).store(o.to(dtype))
        fence_async_shared()
        tma_store(o_desc, coordinates(True, 0, head, q_start, q_len, row0), out)
        token = (q_start + rows).to(gl.int64)
        gl.store(problem.lse + token * problem.num_heads + head, softmax.lse(), mask=rows < q_len)
        if not problem.own_output:
            tma_store_wait(0)
            q_ring.release(q_fill)
        queue.release(slot)
        slot = queue.after(slot)
        queue.arrived(slot)
        blocks = queue.field(slot, BLOCKS)
    tma_store_wait(0)
