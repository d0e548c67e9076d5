"""The consumers' role: a warpgroup that multiplies 64 query rows and takes their softmax."""
# mypy: disable-error-code="no-untyped-def"

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from rooftile.kernels.gluon.attention.again import attend_again, box_for
from rooftile.kernels.gluon.attention.problem import (
    BATCH,
    BLOCKS,
    FIRST,
    HEAD,
    KV_LEN,
    PLACE,
    Q_LEN,
    Q_START,
    ROW0,
)
from rooftile.kernels.gluon.attention.scores import (
    adjusted,
    first_softmax,
    hide,
    modified,
)
from rooftile.kernels.gluon.attention.shares import finish_item
from rooftile.kernels.gluon.tile.barrier import pass_turn, start_turns, take_turn
from rooftile.kernels.gluon.tile.halves import (
    add_output,
    finish_output,
    multiply_used,
    output_layout,
    scale_output,
    settle_output,
    store_output,
    zero_output,
)
from rooftile.kernels.gluon.tile.mask import whole_range
from rooftile.kernels.gluon.tile.mma import (
    GROUP_ROWS,
    accumulator_layout,
    columns_of,
    left_operand_layout,
    narrow,
    rows_of,
    wait,
)
from rooftile.kernels.gluon.tile.opaque import opaque, unset
from rooftile.kernels.gluon.tile.ring import first_fill
from rooftile.kernels.gluon.tile.roles import warpgroup
from rooftile.kernels.gluon.tile.rows import coordinates
from rooftile.kernels.gluon.tile.said import any_of, any_said, say
from rooftile.kernels.gluon.tile.softmax import (
    LOG2_E,
    OnlineSoftmax,
    in_parts,
    overflowed,
)
from rooftile.kernels.triton_version import tma_store, tma_store_wait


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
    group,  # of the consumers, which take turns
    S: gl.constexpr,
    O: gl.constexpr,  # noqa: E741
    slope=None,  # of the head's ALiBi in log2 units, None: it has none
    has_mods: gl.constexpr = False,
    sequence=0,
    head=0,
    anchored: gl.constexpr = False,
    anchor=0,
    k_used: gl.constexpr = None,  # columns that are not zeros that fill a tile up, None: all
    v_used: gl.constexpr = None,
    spared: gl.constexpr = False,  # (anchored) blocks low .. high - 1 need no mask at all
    in_one: gl.constexpr = False,  # see tile/mask.py: hide
):
    """Softmax of a block, while the block before is multiplied with V."""
    block: gl.constexpr = problem.block
    v_dim: gl.constexpr = v_ring.columns
    of_k: gl.constexpr = k_ring.columns if k_used is None else k_used
    of_v: gl.constexpr = v_dim if v_used is None else v_used
    take_turn(group, problem.turns)
    s = gl.zeros([GROUP_ROWS, block], gl.float32, S)
    s = multiply_used(q, k_ring.tile(fill), s, of_k)
    v_ring.arrived(v_fill)
    o = add_output(o, weights, v_ring.tile(v_fill), of_v)
    pass_turn(group, problem.turns)
    s = wait(1, deps=[s])
    k_ring.release(fill)
    s, factor = adjusted(problem, s, slope, rows + offset, n * block + columns)
    if has_mods:
        keys = n * block + columns
        s = modified(problem, s, factor, sequence, head, rows, keys, kv_len - offset, kv_len)
        factor = 1.0
    careful = False
    if anchored:
        if problem.has_left or problem.has_right:
            careful = (n < low) | (n >= anchor)
        alpha = unset(rows)  # read where this block is careful, and set there
        if careful:
            if spared:
                if (n < low) | (n >= high):
                    s = hide(problem, s, rows, n * block, columns, offset, kv_len, in_one)
            else:
                s = hide(problem, s, rows, n * block, columns, offset, kv_len, in_one)
            alpha, softmax = softmax.anchor(s, factor)
        p, softmax = softmax.weigh(s, factor, problem.software_share)
    else:
        # Only the first block, which is not this one, can run over the end of the keys.
        if (problem.has_left or problem.has_right) and ((n < low) | (n >= high)):
            s = hide(problem, s, rows, n * block, columns, offset, kv_len, in_one)
        p, alpha, softmax = softmax.step(s, factor, problem.lazy, problem.software_share)
    # Waiting for the next K here ends the basic block: ptxas would otherwise hoist the wait below
    # above the exponentials, and nothing would overlap.
    next_fill = k_ring.after(fill)
    k_ring.arrived(next_fill, pred=more)
    # p passes through the wait so that it is computed before it; it is narrowed after, when the
    # registers of the old weights are free.
    o, weights, p, alpha, total = settle_output(o, weights, p, alpha, softmax.total, v_dim, of_v)
    softmax = OnlineSoftmax(softmax.maximum, total)
    v_ring.release(v_fill)
    if anchored:
        if careful:
            o = scale_output(o, alpha, v_dim, of_v, False)
    else:
        o = scale_output(o, alpha, v_dim, of_v, problem.lazy)
    weights = gl.convert_layout(narrow(p, weights.dtype), left_operand_layout(O))
    return o, weights, softmax, next_fill


@gluon.jit
def _not_mine(problem, row0, last, blocks, offset, kv_len):
    """How many of a tile's first blocks, which hold the last keys, no row of a warpgroup sees: they
    are there for the other warpgroups."""
    if problem.has_right and not problem.has_left and problem.block <= GROUP_ROWS:
        first, mine = problem.keys_of(row0, GROUP_ROWS, kv_len - offset, kv_len)
        # Of a part that it does not see at all it takes the last block: nothing of it is visible.
        return gl.minimum(gl.maximum(last + 1 - first - mine, 0), blocks - 1)
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
    group,
    S: gl.constexpr,
    O: gl.constexpr,  # noqa: E741
    sequence=0,
    head=0,
    anchor=0,  # blocks low .. anchor - 1 are weighed under the maximum of those before
    in_one: gl.constexpr = False,  # see tile/mask.py: hide
):
    """All blocks of a tile, the softmax of one under the product of the one before.

    Returns the output with its last product still in flight, the weights and V that it reads, the
    softmax, and the fill that follows.
    """
    block: gl.constexpr = problem.block
    v_dim: gl.constexpr = v_ring.columns
    skipped = _not_mine(problem, row0, last, blocks, offset, kv_len)
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
    s = multiply_used(q, k_ring.tile(fill), s, problem.k_used)
    pass_turn(group, problem.turns)
    s = wait(0, deps=[s])
    k_ring.release(fill)
    s, factor = adjusted(problem, s, slope, rows + offset, last * block + columns)
    if problem.mods.any:
        keys = last * block + columns
        s = modified(problem, s, factor, sequence, head, rows, keys, kv_len - offset, kv_len)
        factor = 1.0
    if (last < low) | (last >= high):
        s = hide(problem, s, rows, last * block, columns, offset, kv_len, in_one)
    p, _alpha, softmax = softmax.step(s, factor, problem.lazy, problem.software_share)
    weights = gl.convert_layout(narrow(p, dtype), left_operand_layout(O))
    o = zero_output(v_dim, problem.v_used)
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
            problem.mods.any,
            sequence,
            head,
            problem.anchored,
            anchor,
            problem.k_used,
            problem.v_used,
            spared=True,
            in_one=in_one,
        )
        v_fill = at

    v_ring.arrived(v_fill)
    o = add_output(o, weights, v_ring.tile(v_fill), problem.v_used)
    return o, weights, v_fill, softmax, fill


@gluon.jit
def attend_in_order(
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
    sequence,
    head,
    anchor,  # blocks low .. anchor - 1 are weighed under the maximum of those before
    dtype: gl.constexpr,
    S: gl.constexpr,
    O: gl.constexpr,  # noqa: E741
    skips: gl.constexpr = True,  # blocks that only other warpgroups see
    o=None,  # of blocks before, None: there are none
    spared: gl.constexpr = False,  # (anchored) blocks low .. high - 1 need no mask at all
    in_one: gl.constexpr = False,  # see tile/mask.py: hide
):
    """As `attend_overlapped`, one step after the other: few registers, so that four warpgroups share an
    SM, and they overlap each other."""
    block: gl.constexpr = problem.block
    v_dim: gl.constexpr = v_ring.columns
    skipped = 0
    if skips:
        skipped = _not_mine(problem, row0, last, blocks, offset, kv_len)
    for _ in range(skipped):
        fill = _skip(k_ring, v_ring, fill)
    if o is None:
        o = zero_output(v_dim, problem.v_used)
    for i in range(skipped, blocks):
        n = last - i
        k_ring.arrived(fill)
        s = gl.zeros([GROUP_ROWS, block], gl.float32, S)
        s = multiply_used(q, k_ring.tile(fill), s, problem.k_used)
        s = wait(0, deps=[s])
        k_ring.release(fill)
        s, factor = adjusted(problem, s, slope, rows + offset, n * block + columns)
        if problem.mods.any:
            keys = n * block + columns
            s = modified(problem, s, factor, sequence, head, rows, keys, kv_len - offset, kv_len)
            factor = 1.0
        if problem.anchored:
            if (n < low) | (n >= anchor):
                if spared:
                    if (n < low) | (n >= high):
                        s = hide(problem, s, rows, n * block, columns, offset, kv_len, in_one)
                else:
                    s = hide(problem, s, rows, n * block, columns, offset, kv_len, in_one)
                alpha, softmax = softmax.anchor(s, factor)
                o = scale_output(o, alpha, v_dim, problem.v_used, False)
            p, softmax = softmax.weigh(s, factor, problem.software_share)
        else:
            if (n < low) | (n >= high):
                s = hide(problem, s, rows, n * block, columns, offset, kv_len, in_one)
            p, alpha, softmax = softmax.step(s, factor, problem.lazy, problem.software_share)
            o = scale_output(o, alpha, v_dim, problem.v_used, problem.lazy)
        weights = gl.convert_layout(narrow(p, dtype), left_operand_layout(O))
        v_ring.arrived(fill)
        o = add_output(o, weights, v_ring.tile(fill), problem.v_used)
        o = finish_output(o, weights, v_dim, problem.v_used)
        v_ring.release(fill)
        fill = k_ring.after(fill)
    return o, softmax, fill


@gluon.jit
def _message(queue, slot):
    """What the producer says of a tile besides its number of blocks."""
    return (
        queue.field(slot, HEAD),
        queue.field(slot, ROW0),
        queue.field(slot, Q_LEN),
        queue.field(slot, KV_LEN),
        queue.field(slot, FIRST),
    )


@gluon.jit
def _write_tile(problem, o_desc, out, o):
    """Normalised output of a warpgroup's rows into the shared box `out`."""
    store_output(out.reshape([GROUP_ROWS, out.shape[-1]]), o, o_desc.dtype, problem.v_used)
    fence_async_shared()


@gluon.jit
def _store_tile(problem, queue, slot, o_desc, out, row0):
    """A warpgroup's rows from the shared box `out`."""
    batch = 0
    if not problem.ragged:
        batch = queue.field(slot, BATCH)
    head = queue.field(slot, HEAD)
    q_start = queue.field(slot, Q_START)
    q_len = queue.field(slot, Q_LEN)
    tma_store(o_desc, coordinates(problem.ragged, batch, head, q_start, q_len, row0), out)


@gluon.jit
def _store_lse(problem, queue, slot, lse, rows):
    batch = 0
    if not problem.ragged:
        batch = queue.field(slot, BATCH)
    q_start = queue.field(slot, Q_START)
    token = (batch * problem.q_len + q_start + rows).to(gl.int64)
    at_lse = problem.lse + token * opaque(problem.num_heads) + queue.field(slot, HEAD)
    gl.store(at_lse, lse, mask=rows < queue.field(slot, Q_LEN))


@gluon.jit
def _once_more(
    problem,
    shares,
    queue,
    slot,
    k_again_desc,
    v_again_desc,
    landed,
    q,
    out,  # shared box, where the output goes later
    row0,
    slope,
    dtype: gl.constexpr,
    v_dim: gl.constexpr,
    at_sink,
    S: gl.constexpr,
):
    """Output and softmax of a warpgroup's rows whose sums became too large under an anchored maximum.
    Keys and values are read again instead of kept: the loops have no registers to spare."""
    o, maximum, total = attend_again(
        problem,
        k_again_desc,
        v_again_desc,
        landed,
        q,
        box_for(out, k_again_desc),
        queue.field(slot, BATCH),
        queue.field(slot, HEAD),
        row0,
        queue.field(slot, Q_LEN),
        queue.field(slot, KV_LEN),
        slope,
        dtype,
        v_dim,
        shares.split,
        queue.field(slot, FIRST),
        queue.field(slot, BLOCKS),
        at_sink,
    )
    return o, OnlineSoftmax(
        gl.convert_layout(maximum, rows_of(S)), gl.convert_layout(total, rows_of(S))
    )


@gluon.jit
def attend(
    problem,
    shares,
    with_lse,
    queue,
    o_desc,
    k_again_desc,  # of keys and of values, for a second pass over a tile
    v_again_desc,
    landed,  # [groups, 1] barriers of that pass
    q_ring,
    k_ring,
    v_ring,
    o_tiles,
    group: gl.constexpr,
):
    """One consumer warpgroup: rows group * 64 .. group * 64 + 63 of every tile."""
    number = warpgroup(group, problem.groups)
    start_turns(number, problem.turns)
    # Apart: translated once for all groups, also where each has a copy of its own. Translation is the largest
    # part of what Python does for a kernel.
    _attend(
        problem,
        shares,
        with_lse,
        queue,
        o_desc,
        k_again_desc,
        v_again_desc,
        landed,
        q_ring,
        k_ring,
        v_ring,
        o_tiles,
        number,
    )


@gluon.jit
def _attend(
    problem,
    shares,
    with_lse,
    queue,
    o_desc,
    k_again_desc,
    v_again_desc,
    landed,
    q_ring,
    k_ring,
    v_ring,
    o_tiles,
    group,
):
    block: gl.constexpr = problem.block
    v_dim: gl.constexpr = v_ring.columns
    dtype: gl.constexpr = o_desc.dtype
    S: gl.constexpr = accumulator_layout(block)
    O: gl.constexpr = output_layout(v_dim, problem.v_used)  # noqa: E741
    columns = gl.arange(0, block, columns_of(S))

    q_turn = first_fill()
    fill = first_fill()
    slot = first_fill()
    queue.arrived(slot)
    blocks = queue.field(slot, BLOCKS)
    if problem.reads_ahead:
        head, first_row, q_len, kv_len, first = _message(queue, slot)
    while blocks > 0:
        if problem.reads_ahead:
            row0 = first_row + group * GROUP_ROWS
            last = first + blocks - 1
        else:
            head = queue.field(slot, HEAD)
            row0 = queue.field(slot, ROW0) + group * GROUP_ROWS
            q_len = queue.field(slot, Q_LEN)
            kv_len = queue.field(slot, KV_LEN)
            last = queue.field(slot, FIRST) + blocks - 1
        offset = kv_len - q_len
        rows = row0 + gl.arange(0, GROUP_ROWS, rows_of(S))
        at_sink = True
        if shares.split and problem.has_sink:
            at_sink = shares.has_first_keys(queue.field(slot, PLACE))
        softmax = first_softmax(problem, head, kv_len, rows_of(S), at_sink)
        if problem.sums_in_parts:
            softmax = in_parts(softmax, GROUP_ROWS)

        sequence = 0
        if problem.mods.any:
            sequence = queue.field(slot, BATCH)
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
        end = kv_len
        if problem.has_right:
            end = gl.minimum(end, row0 + offset + problem.right + 1)
        anchor = gl.maximum(end - 1, 0) // block
        if shares.split:  # a part's first keys may be seen whole
            anchor = gl.minimum(anchor, last)
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
                sequence,
                head,
                anchor,
                problem.hides_in_one,
            )
        else:
            o, softmax, fill = attend_in_order(
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
                sequence,
                head,
                anchor,
                dtype,
                S,
                O,
                spared=True,
                in_one=problem.hides_in_one,
            )
        if problem.reads_ahead:
            # Under the last product. The wait also ends the basic block: ptxas would otherwise put what
            # follows between the product's instructions, or before them.
            following = queue.after(slot)
            queue.arrived(following)
            next_blocks = queue.field(following, BLOCKS)
            head, first_row, q_len, kv_len, first = _message(queue, following)
        softmax = softmax.joined(rows_of(S))
        too_large = False
        # Where the output has a place of its own, warps say what they think of their rows and read what
        # others say behind the barrier before its copy: nothing waits, and no product is delayed.
        late: gl.constexpr = problem.anchored and problem.own_output and not shares.split
        if late:
            say(shares.said.index(group), overflowed(softmax.total))
        elif problem.anchored:
            too_large = any_of(shares.said.index(group), overflowed(softmax.total))
        if problem.reads_ahead:
            reciprocal = softmax.reciprocal()
        if problem.overlapped:
            o = finish_output(o, weights, v_dim, problem.v_used)
            v_ring.release(v_fill)
        if problem.anchored and not late:  # noqa: SIM102, known at compile time
            if too_large:
                o, softmax = _once_more(
                    problem,
                    shares,
                    queue,
                    slot,
                    k_again_desc,
                    v_again_desc,
                    landed.index(group),
                    q,
                    o_tiles.index(group),
                    row0,
                    slope,
                    dtype,
                    v_dim,
                    at_sink,
                    S,
                )
        if problem.own_output:
            if not late:
                q_ring.release(q_fill)
            out = o_tiles.index(group)
        else:
            out = q_ring.box(q_fill)
        if shares.split:
            lse = softmax.lse()
            o = scale_output(o, softmax.reciprocal(), v_dim, problem.v_used, False)
            place = queue.field(slot, PLACE)
            complete, o, lse = finish_item(shares, place, o, lse, group, problem.v_used, rows_of(S))
            if complete:
                tma_store_wait(0)
                _write_tile(problem, o_desc, out, o)
                _store_tile(problem, queue, slot, o_desc, out, row0)
                if with_lse > 0:
                    _store_lse(problem, queue, slot, lse, rows)
        else:
            tma_store_wait(0)
            if problem.anchored or not problem.reads_ahead:
                reciprocal = softmax.reciprocal()
            o = scale_output(o, reciprocal, v_dim, problem.v_used, False)
            _write_tile(problem, o_desc, out, o)
            if late:
                gl.thread_barrier()
                if any_said(shares.said.index(group)):
                    o, softmax = _once_more(
                        problem,
                        shares,
                        queue,
                        slot,
                        k_again_desc,
                        v_again_desc,
                        landed.index(group),
                        q,
                        out,
                        row0,
                        slope,
                        dtype,
                        v_dim,
                        at_sink,
                        S,
                    )
                    gl.thread_barrier()  # every warp has read what the place held
                    o = scale_output(o, softmax.reciprocal(), v_dim, problem.v_used, False)
                    _write_tile(problem, o_desc, out, o)
                    gl.thread_barrier()
            _store_tile(problem, queue, slot, o_desc, out, row0)
            if opaque(with_lse) > 0:
                _store_lse(problem, queue, slot, softmax.lse(), rows)
            if late:
                q_ring.release(q_fill)
        if not problem.own_output:
            tma_store_wait(0)
            q_ring.release(q_fill)
        q_turn = problem.next_q(q_turn)
        queue.release(slot)
        slot = queue.after(slot)
        if problem.reads_ahead:
            blocks = next_blocks
        else:
            queue.arrived(slot)
            blocks = queue.field(slot, BLOCKS)
    tma_store_wait(0)
