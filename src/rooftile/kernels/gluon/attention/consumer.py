"""The consumers' role: a warpgroup that multiplies 64 query rows and takes their softmax."""
# mypy: disable-error-code="no-untyped-def"

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

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
from rooftile.kernels.gluon.tile.barrier import pass_turn, start_turns, take_turn
from rooftile.kernels.gluon.tile.mask import visible, whole_range
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
from rooftile.kernels.gluon.tile.rows import coordinates
from rooftile.kernels.gluon.tile.softmax import (
    LOG2_E,
    OnlineSoftmax,
    in_parts,
    rescale,
    soft_cap,
    start_softmax,
    start_softmax_at_sink,
)
from rooftile.kernels.triton_version import tma_store, tma_store_wait


@gluon.jit
def hide(problem, s, rows, columns, offset, kv_len):
    """Scores with what a query does not see at -inf."""
    seen = visible(
        rows,
        columns,
        offset,
        kv_len,
        problem.left,
        problem.right,
        problem.has_left,
        problem.has_right,
    )
    return gl.where(seen, s, float("-inf"))


@gluon.jit
def _by_distance(s, factor, slope, positions, columns):
    """Scores in log2 units, lowered in proportion to the distance of query and key (ALiBi)."""
    distance = gl.expand_dims(positions.to(gl.float32), 1) - gl.expand_dims(
        columns.to(gl.float32), 0
    )
    return s * factor - slope * gl.maximum(distance, -distance)


@gluon.jit
def next_block(
    problem,
    q,  # shared tile [64, k_dim]
    k_ring,
    v_ring,
    fill,  # of this block's K and V
    v_fill,  # of the block before
    more,  # whether a block follows
    o,  # [64, v_dim] float32, the blocks up to two before
    weights,  # [64, block], of the block before
    softmax,
    rows,
    columns,
    n,  # which block of keys
    low,  # blocks low .. high - 1 need no mask
    high,
    offset,
    kv_len,
    group: gl.constexpr,
    S: gl.constexpr,
    O: gl.constexpr,  # noqa: E741
    slope=None,  # of the head's ALiBi in log2 units, None: it has none
):
    """Softmax of a block, while the block before is multiplied with V."""
    block: gl.constexpr = problem.block
    v_dim: gl.constexpr = v_ring.columns
    factor = problem.factor
    take_turn(group, problem.turns)
    s = gl.zeros([GROUP_ROWS, block], gl.float32, S)
    s = multiply(q, k_ring.tile(fill).permute((1, 0)), s, use_acc=False)
    v_ring.arrived(v_fill)
    o = multiply(weights, v_ring.tile(v_fill), o)
    pass_turn(group, problem.turns)
    s = wait(1, deps=[s])
    k_ring.release(fill)
    if problem.has_softcap:
        s = soft_cap(s, problem.factor, problem.softcap)
        factor = 1.0  # soft_cap gives log2 units
    if slope is not None:
        s = _by_distance(s, factor, slope, rows + offset, n * block + columns)
        factor = 1.0
    # Only the first block, which is not this one, can run over the end of the keys.
    if (problem.has_left or problem.has_right) and ((n < low) | (n >= high)):
        s = hide(problem, s, rows, n * block + columns, offset, kv_len)
    p, alpha, softmax = softmax.step(s, factor, problem.lazy, problem.software_share)
    # Waiting for the next K here ends the basic block: ptxas would otherwise hoist the wait below
    # above the exponentials, and nothing would overlap.
    next_fill = k_ring.after(fill)
    k_ring.arrived(next_fill, pred=more)
    # p passes through the wait so that it is computed before it; it is narrowed after, when the
    # registers of the old weights are free.
    o, weights, p, alpha, total = wait(0, deps=[o, weights, p, alpha, softmax.total])
    softmax = OnlineSoftmax(softmax.maximum, total)
    v_ring.release(v_fill)
    o = rescale(o, gl.convert_layout(alpha, rows_of(O)), v_dim, problem.lazy)
    weights = gl.convert_layout(narrow(p, weights.dtype), left_operand_layout(O))
    return o, weights, softmax, next_fill


@gluon.jit
def _not_mine(problem, row0, last, offset, kv_len):
    """How many of a tile's first blocks, which hold the last keys, no row of a warpgroup sees: they
    are there for the other warpgroups."""
    if problem.has_right and not problem.has_left and problem.block <= GROUP_ROWS:
        first, mine = problem.keys_of(row0, GROUP_ROWS, kv_len - offset, kv_len)
        return last + 1 - first - mine
    else:
        return 0


@gluon.jit
def _skip(k_ring, v_ring, fill):
    k_ring.arrived(fill)
    k_ring.release(fill)
    v_ring.arrived(fill)
    v_ring.release(fill)
    return k_ring.after(fill)


@gluon.jit
def attend_overlapped(
    problem,
    q,
    k_ring,
    v_ring,
    fill,  # of the tile's first K and V
    blocks,
    last,  # number of the first block, which holds the last of the keys
    softmax,
    rows,
    columns,
    low,
    high,
    offset,
    kv_len,
    row0,
    slope,
    dtype: gl.constexpr,
    group: gl.constexpr,
    S: gl.constexpr,
    O: gl.constexpr,  # noqa: E741
):
    """All blocks of a tile, the softmax of one under the product of the one before.

    Returns the output with its last product still in flight, the weights and V that it reads, the
    softmax, and the fill that follows.
    """
    block: gl.constexpr = problem.block
    v_dim: gl.constexpr = v_ring.columns
    skipped = _not_mine(problem, row0, last, offset, kv_len)
    for _ in range(skipped):
        take_turn(group, problem.turns)
        pass_turn(group, problem.turns)
        fill = _skip(k_ring, v_ring, fill)
    last -= skipped
    blocks -= skipped
    # The first block: nothing to overlap it with.
    k_ring.arrived(fill)
    take_turn(group, problem.turns)
    s = gl.zeros([GROUP_ROWS, block], gl.float32, S)
    s = multiply(q, k_ring.tile(fill).permute((1, 0)), s, use_acc=False)
    pass_turn(group, problem.turns)
    s = wait(0, deps=[s])
    k_ring.release(fill)
    factor = problem.factor
    if problem.has_softcap:
        s = soft_cap(s, problem.factor, problem.softcap)
        factor = 1.0
    if slope is not None:
        s = _by_distance(s, factor, slope, rows + offset, last * block + columns)
        factor = 1.0
    if (last < low) | (last >= high):
        s = hide(problem, s, rows, last * block + columns, offset, kv_len)
    p, _alpha, softmax = softmax.step(s, factor, problem.lazy, problem.software_share)
    weights = gl.convert_layout(narrow(p, dtype), left_operand_layout(O))
    o = gl.zeros([GROUP_ROWS, v_dim], gl.float32, O)
    v_fill = fill
    fill = k_ring.after(fill)
    k_ring.arrived(fill, pred=blocks > 1)

    for i in range(1, blocks):
        at = fill
        o, weights, softmax, fill = next_block(
            problem,
            q,
            k_ring,
            v_ring,
            fill,
            v_fill,
            i + 1 < blocks,
            o,
            weights,
            softmax,
            rows,
            columns,
            last - i,
            low,
            high,
            offset,
            kv_len,
            group,
            S,
            O,
            slope,
        )
        v_fill = at

    v_ring.arrived(v_fill)
    o = multiply(weights, v_ring.tile(v_fill), o)
    return o, weights, v_fill, softmax, fill


@gluon.jit
def _in_order(
    problem,
    q,
    k_ring,
    v_ring,
    fill,
    blocks,
    last,
    softmax,
    rows,
    columns,
    low,
    high,
    offset,
    kv_len,
    row0,
    slope,
    dtype: gl.constexpr,
    S: gl.constexpr,
    O: gl.constexpr,  # noqa: E741
):
    """As `attend_overlapped`, one step after the other: few registers, so that four warpgroups share an
    SM, and they overlap each other."""
    block: gl.constexpr = problem.block
    v_dim: gl.constexpr = v_ring.columns
    skipped = _not_mine(problem, row0, last, offset, kv_len)
    for _ in range(skipped):
        fill = _skip(k_ring, v_ring, fill)
    o = gl.zeros([GROUP_ROWS, v_dim], gl.float32, O)
    for i in range(skipped, blocks):
        n = last - i
        k_ring.arrived(fill)
        s = gl.zeros([GROUP_ROWS, block], gl.float32, S)
        s = multiply(q, k_ring.tile(fill).permute((1, 0)), s, use_acc=False)
        s = wait(0, deps=[s])
        k_ring.release(fill)
        factor = problem.factor
        if problem.has_softcap:
            s = soft_cap(s, problem.factor, problem.softcap)
            factor = 1.0
        if slope is not None:
            s = _by_distance(s, factor, slope, rows + offset, n * block + columns)
            factor = 1.0
        if (n < low) | (n >= high):
            s = hide(problem, s, rows, n * block + columns, offset, kv_len)
        p, alpha, softmax = softmax.step(s, factor, problem.lazy, problem.software_share)
        o = rescale(o, gl.convert_layout(alpha, rows_of(O)), v_dim, problem.lazy)
        weights = gl.convert_layout(narrow(p, dtype), left_operand_layout(O))
        v_ring.arrived(fill)
        o = multiply(weights, v_ring.tile(fill), o)
        o, weights = wait(0, deps=[o, weights])
        v_ring.release(fill)
        fill = k_ring.after(fill)
    return o, softmax, fill


@gluon.jit
def attend(problem, queue, o_desc, q_ring, k_ring, v_ring, o_tiles, group: gl.constexpr):
    """One consumer warpgroup: rows group * 64 .. group * 64 + 63 of every tile."""
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
        batch = queue.field(slot, BATCH)
        head = queue.field(slot, HEAD)
        row0 = queue.field(slot, ROW0) + group * GROUP_ROWS
        q_start = queue.field(slot, Q_START)
        q_len = queue.field(slot, Q_LEN)
        kv_len = queue.field(slot, KV_LEN)
        last = queue.field(slot, FIRST) + blocks - 1
        queue.release(slot)
        offset = kv_len - q_len
        rows = row0 + gl.arange(0, GROUP_ROWS, rows_of(S))
        if problem.has_sink:
            sink = gl.load(problem.sink + head)
            if kv_len < 0:  # padding after the last sequence
                sink = float("-inf")
            softmax = start_softmax_at_sink(sink, GROUP_ROWS, rows_of(S))
        else:
            softmax = start_softmax(GROUP_ROWS, rows_of(S))
        if problem.sums_in_parts:
            softmax = in_parts(softmax, GROUP_ROWS)

        slope = None
        if problem.has_alibi:
            slope = gl.load(problem.slopes + head) * LOG2_E
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
        q_fill = problem.q_fill(q_turn, group)
        q_ring.arrived(q_fill)
        q = q_ring.tile(q_fill)
        if problem.overlapped:
            o, weights, v_fill, softmax, fill = attend_overlapped(
                problem,
                q,
                k_ring,
                v_ring,
                fill,
                blocks,
                last,
                softmax,
                rows,
                columns,
                low,
                high,
                offset,
                kv_len,
                row0,
                slope,
                dtype,
                group,
                S,
                O,
            )
        else:
            o, softmax, fill = _in_order(
                problem,
                q,
                k_ring,
                v_ring,
                fill,
                blocks,
                last,
                softmax,
                rows,
                columns,
                low,
                high,
                offset,
                kv_len,
                row0,
                slope,
                dtype,
                S,
                O,
            )
        if problem.own_output:
            q_ring.release(q_fill)
            out = o_tiles.index(group)
        else:
            out = q_ring.box(q_fill)
        tma_store_wait(0)
        if problem.overlapped:
            o, weights = wait(0, deps=[o, weights])
            v_ring.release(v_fill)
        softmax = softmax.joined(rows_of(S))
        o = o * gl.expand_dims(gl.convert_layout(softmax.reciprocal(), rows_of(O)), 1)
        out.reshape([GROUP_ROWS, v_dim]).store(o.to(dtype))
        fence_async_shared()
        tma_store(o_desc, coordinates(problem.ragged, batch, head, q_start, q_len, row0), out)
        token = (batch * problem.q_len + q_start + rows).to(gl.int64)
        at_lse = problem.lse + token * problem.num_heads + head
        gl.store(at_lse, softmax.lse(), mask=rows < q_len)
        if not problem.own_output:
            tma_store_wait(0)
            q_ring.release(q_fill)
        q_turn = problem.next_q(q_turn)
        slot = queue.after(slot)
        queue.arrived(slot)
        blocks = queue.field(slot, BLOCKS)
    tma_store_wait(0)
