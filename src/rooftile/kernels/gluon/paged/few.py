"""The consumer for few packed rows: a warpgroup that multiplies K Q^T and V^T P^T.

With keys (and the columns of V) as the 64 rows of a product and the packed rows as its columns, 8
of them cost an eighth of what 64 rows cost, and K and V are left operands, which may come from
registers: 8-bit keys and values are widened on their way from shared memory to the matrix unit.

    s [block, rows] = K Q^T,  p = 2^(s - max),  o [v_dim, rows] += V^T p

8-bit pages: products are of float16. e4m3 is exact in it; queries are scaled by a power of two to
a largest value in [1, 2), which the scores undo; weights are at most 1.
"""
# mypy: disable-error-code="no-untyped-def"

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from rooftile.kernels.gluon.paged.join import arrive_last, join_parts, row_layout
from rooftile.kernels.gluon.paged.rows import clear_padding, store_rows
from rooftile.kernels.gluon.paged.work import (
    END_ROW,
    FIRST_PART,
    FIRST_ROW,
    HEAD,
    JOINED_BY,
    KEYS,
    LAST,
    MERGE_WORDS,
    MORE,
    PARTS,
    QUERIES,
    SLOT,
    TILES,
    TOKEN,
)
from rooftile.kernels.gluon.tile.mma import columns_of, left_operand_layout, multiply, rows_of, wait
from rooftile.kernels.gluon.tile.ring import first_fill
from rooftile.kernels.gluon.tile.softmax import LN_2, LOG2_E, NO_MAXIMUM, soft_cap


@gluon.constexpr_function
def _bits(n):
    return [1 << i for i in range(n.bit_length() - 1)]


@gluon.constexpr_function
def _k_layout(block, dim):
    """8-bit keys [block, dim], 16 bytes a thread and row.

    In the left operand of a product a thread has, of 16 columns, 2c, 2c + 1, 2c + 8 and 2c + 9, c
    being its lane modulo 4. Which columns of K these are is free as long as Q^T has its rows in the
    same order (`_query_column`), so c's are 16 c .. 16 c + 15 of every 64.
    """
    registers = [[0, b] for b in _bits(16)] + [[8, 0]]
    registers += [[0, 64 * b] for b in _bits(dim // 64)] + [[64 * b, 0] for b in _bits(block // 64)]
    lanes = [[0, 16], [0, 32], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[16, 0], [32, 0]], [], [block, dim])


@gluon.constexpr_function
def _v_layout(block, dim):
    """8-bit values [block, dim], dim / 32 bytes of a key a thread.

    In the left operand V^T a thread has rows g and g + 8 of its warp's 16 of every 64, g being its
    lane / 4. Which columns of V these are is free as long as the output is read in the same order.
    """
    registers = [[0, b] for b in _bits(dim // 32)] + [[b, 0] for b in (1, 8)]
    registers += [[16 * b, 0] for b in _bits(block // 16)]
    of_g = dim // 32
    lanes = [[2, 0], [4, 0], [0, of_g], [0, 2 * of_g], [0, 4 * of_g]]
    return gl.DistributedLinearLayout(
        registers, lanes, [[0, 8 * of_g], [0, 16 * of_g]], [], [block, dim]
    )


@gluon.jit
def _widen_keys(k, S: gl.constexpr):
    """K [block, dim] in `_k_layout` as a left operand, columns in the order of `_query_column`."""
    block: gl.constexpr = k.shape[0]
    dim: gl.constexpr = k.shape[1]
    k = k.to(gl.float16).reshape([block, dim // 64, 4, 4, 2, 2])  # row, h, c, step, half, pair
    k = k.permute([0, 1, 3, 4, 2, 5]).reshape([block, dim])
    return gl.convert_layout(k, left_operand_layout(S))


@gluon.jit
def _query_column(column):
    """Which column of K and Q comes at `column` of what `_widen_keys` returns."""
    pair = column % 2
    c = column // 2 % 4
    half = column // 8 % 2
    step = column // 16 % 4
    return column // 64 * 64 + c * 16 + step * 4 + half * 2 + pair


@gluon.jit
def _widen_values(v, O: gl.constexpr):  # noqa: E741
    """V [block, dim] in `_v_layout` as the left operand V^T, its rows in an order of their own."""
    block: gl.constexpr = v.shape[0]
    dim: gl.constexpr = v.shape[1]
    v = v.to(gl.float16).permute([1, 0]).reshape([4, 8, dim // 64, 2, block])  # warp, g, rep, half
    v = v.permute([2, 0, 3, 1, 4]).reshape([dim, block])
    return gl.convert_layout(v, left_operand_layout(O))


@gluon.jit
def _value_columns(o):
    """o [dim, rows] with its rows in the order of V's columns again."""
    dim: gl.constexpr = o.shape[0]
    rows: gl.constexpr = o.shape[1]
    o = o.reshape([dim // 64, 4, 2, 8, rows]).permute([1, 3, 0, 2, 4])
    return o.reshape([dim, rows])


@gluon.constexpr_function
def _accumulator_layout(rows):
    return gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, rows, 16]
    )


@gluon.jit
def _load_queries(work, q_tile, item_row, end_row, token, kv_head):
    """Gathers packed rows into shared memory; returns what scores are to be multiplied by."""
    num_rows: gl.constexpr = q_tile.shape[0]
    k_dim: gl.constexpr = q_tile.shape[1]
    L: gl.constexpr = row_layout(k_dim)
    row = item_row + gl.arange(0, num_rows, gl.SliceLayout(1, L))
    column = gl.arange(0, k_dim, gl.SliceLayout(0, L))
    if work.quantised:
        column = _query_column(column)
    at_token = (token + row // work.heads_of_group()).to(gl.int64) * work.q_stride
    at_head = (kv_head * work.heads_of_group() + row % work.heads_of_group()) * work.q_head_stride
    at = work.q + gl.expand_dims(at_token + at_head, 1) + gl.expand_dims(column, 0)
    there = gl.expand_dims(row < end_row, 1) & gl.expand_dims(column < work.k_width_of_8 * 8, 0)
    if work.quantised:
        q = gl.load(at, mask=there, other=0.0).to(gl.float32)
        largest = gl.max(gl.maximum(q, -q), 1).to(gl.int32, bitcast=True) & 0x7F800000
        inverse = (0x7F000000 - largest).to(gl.float32, bitcast=True)  # 2^-n for 2^n
        q_tile.store((q * gl.expand_dims(inverse, 1)).to(gl.float16))
        unit = largest.to(gl.float32, bitcast=True) * gl.load(work.k_scale + kv_head)
    else:
        q_tile.store(gl.load(gl.multiple_of(at, [1, 8]), mask=there, other=0.0))
        unit = row * 0.0 + 1.0
    fence_async_shared()
    return unit


@gluon.jit
def _fold(
    work,
    q,  # shared tile [rows, k_dim]
    unit,  # [1, rows], what scores are to be multiplied by (8-bit pages)
    k_ring,
    v_ring,
    p_tiles,
    fill,
    turn,  # of p_tiles
    n,  # which tile of keys
    low,  # [rows], keys low .. high are visible to a row; tiles whole .. whole_end - 1 need no mask
    high,
    whole,
    whole_end,
    o,  # [v_dim, rows]
    total,  # [block, rows]
    maximum,  # [rows]
    before,
    S: gl.constexpr,
):
    """A tile of keys and values into the state; returns it, the fill and the turn that follow."""
    block: gl.constexpr = work.block
    dtype: gl.constexpr = p_tiles.dtype
    num_rows: gl.constexpr = p_tiles.shape[1]
    keys = gl.expand_dims(gl.arange(0, block, rows_of(S)), 1)
    q = q.permute((1, 0))
    k_ring.arrived(fill)
    s = gl.zeros([block, num_rows], gl.float32, S)
    if work.quantised:
        k = k_ring.tile(fill).load(_k_layout(block, k_ring.columns))
        k_ring.release(fill)
        wide = _widen_keys(k, S)
        s = multiply(wide, q, s, use_acc=False)
        v_ring.arrived(fill)
        v = v_ring.tile(fill).load(_v_layout(block, v_ring.columns))
        v_ring.release(fill)
        s, wide = wait(0, deps=[s, wide])
        s = s * unit
    else:
        s = multiply(k_ring.tile(fill), q, s, use_acc=False)
        s = wait(0, deps=[s])
        k_ring.release(fill)
    s = soft_cap(s, work.factor, work.softcap) if work.has_softcap else s * work.factor
    if (n < whole) | (n >= whole_end):
        key = n * block + keys
        seen = (key >= gl.expand_dims(low, 0)) & (key <= gl.expand_dims(high, 0))
        s = gl.where(seen, s, float("-inf"))
    highest = gl.maximum(gl.max(s, 0), maximum)
    p = gl.exp2(s - gl.expand_dims(highest, 0))
    shrink = gl.exp2(maximum - highest)
    before = before * shrink
    total = total * gl.expand_dims(shrink, 0) + p
    o = o * gl.expand_dims(shrink, 0)
    p_tile = p_tiles.index(turn)
    p_tile.store(p.to(dtype).permute((1, 0)))
    fence_async_shared()
    if work.quantised:
        wide = _widen_values(v, S)
        o = multiply(wide, p_tile.permute((1, 0)), o)
        o, wide = wait(0, deps=[o, wide])
    else:
        v_ring.arrived(fill)
        o = multiply(v_ring.tile(fill).permute((1, 0)), p_tile.permute((1, 0)), o)
        o = wait(0, deps=[o])
        v_ring.release(fill)
    return o, total, highest, before, k_ring.after(fill), turn ^ 1


@gluon.jit
def _attend(
    work,
    q_ring,
    q_gathered,
    p_tiles,
    k_ring,
    v_ring,
    fill,
    q_turn,
    turn,  # of p_tiles
    tiles,
    last,
    kv_head,
    item_row,
    end_row,
    part,
    token,
    q_len,
    kv_len,
    merge,
    group: gl.constexpr,
):
    """This group's rows of an item; returns the fill and the turns that follow."""
    block: gl.constexpr = work.block
    num_rows: gl.constexpr = p_tiles.shape[1]
    v_dim: gl.constexpr = v_ring.columns
    S: gl.constexpr = _accumulator_layout(num_rows)
    L: gl.constexpr = row_layout(v_dim)
    first_row = item_row + group * num_rows
    mine = q_gathered.index(group)
    words = work.plan + work.merges_at + merge * MERGE_WORDS
    first_part = gl.load(words + FIRST_PART, mask=merge >= 0, other=0)
    parts = gl.load(words + PARTS, mask=merge >= 0, other=0)
    q_fill = work.q_fill(q_turn, 0)
    rotation = 0
    border = 0
    if work.rotations > 1:
        rotation, border = work.first_rotation(last, kv_len)
    unit = 1.0
    if work.packed > 0:
        q_ring.arrived(q_fill)
    else:
        rotated = token + rotation * work.tokens
        unit = _load_queries(work, mine, first_row, end_row, rotated, kv_head)
        unit = gl.expand_dims(gl.convert_layout(unit, columns_of(S)), 0)
    rows = first_row + gl.arange(0, num_rows, columns_of(S))
    position = rows // work.heads_of_group() + (kv_len - q_len)
    low = position * 0
    high = position * 0 + (kv_len - 1)
    whole = 0
    whole_end = kv_len
    if work.has_right:
        high = gl.minimum(high, position + work.right)
        first = first_row // work.heads_of_group() + (kv_len - q_len)
        whole_end = gl.minimum(kv_len, first + work.right + 1)
    if work.has_left:
        low = position - work.left
        end = (end_row - 1) // work.heads_of_group() + (kv_len - q_len)
        whole = gl.cdiv(gl.maximum(end - work.left, 0), block)
    whole_end = gl.maximum(whole_end, 0) // block
    maximum = gl.full([num_rows], NO_MAXIMUM, gl.float32, columns_of(S))
    before = gl.full([num_rows], 0.0, gl.float32, columns_of(S))  # the sink's weight
    if work.has_sink:
        head = kv_head * work.heads_of_group() + rows % work.heads_of_group()
        there = (rows < end_row) & (part < 0)
        sink = gl.load(work.sink + head, mask=there, other=float("-inf")) * LOG2_E
        maximum = gl.maximum(sink, NO_MAXIMUM)
        before = gl.where(sink > NO_MAXIMUM, 1.0, 0.0)
    total = gl.zeros([block, num_rows], gl.float32, S)  # every thread's own keys
    o = gl.zeros([v_dim, num_rows], gl.float32, S)
    if work.rotations == 1:
        q = q_ring.tile(q_fill) if work.packed > 0 else mine
        for i in range(tiles):
            o, total, maximum, before, fill, turn = _fold(
                work, q, unit, k_ring, v_ring, p_tiles, fill, turn, last - i, low, high, whole,
                whole_end, o, total, maximum, before, S,
            )  # fmt: skip
    else:
        # A loop for each rotation of the queries: its tiles cost what they cost without.
        first_tile = last + 1 - tiles
        for run in range(work.runs(rotation, first_tile, kv_len)):
            if run > 0:
                rotation, border = work.next_rotation(rotation, border)
                if work.packed > 0:
                    q_ring.release(q_fill)
                    q_turn = work.next_q(q_turn)
                    q_fill = work.q_fill(q_turn, 0)
                    q_ring.arrived(q_fill)
                else:
                    rotated = token + rotation * work.tokens
                    _load_queries(work, mine, first_row, end_row, rotated, kv_head)
            q = q_ring.tile(q_fill) if work.packed > 0 else mine
            run_begin = gl.maximum(border, first_tile)
            for i in range(last + 1 - run_begin):
                o, total, maximum, before, fill, turn = _fold(
                    work, q, unit, k_ring, v_ring, p_tiles, fill, turn, last - i, low, high,
                    whole, whole_end, o, total, maximum, before, S,
                )  # fmt: skip
            last = run_begin - 1
    if work.packed > 0:
        q_ring.release(q_fill)
        q_turn = work.next_q(q_turn)
    weight = gl.sum(total, 0) + before
    seen_any = weight != 0.0
    lse = gl.where(seen_any, (maximum + gl.log2(weight)) * LN_2, float("-inf"))
    scale = 1.0 / gl.where(seen_any, weight, 1.0)
    if work.quantised:
        scale = scale * gl.load(work.v_scale + kv_head)
    o = o * gl.expand_dims(scale, 0)
    if work.quantised:
        o = _value_columns(o)
    o = gl.convert_layout(o.permute((1, 0)), L)
    store_rows(work, o, lse, item_row, rows, end_row, part, token, kv_head, L)
    if merge >= 0:  # noqa: SIM102, `and` would always count
        if arrive_last(work, merge, parts, group):
            first = first_part + group * num_rows
            ends = gl.minimum(end_row, first_row + num_rows)
            join_parts(work, first, parts, first_row, ends, token, kv_head, num_rows, v_dim)
    return fill, q_turn, turn


@gluon.jit
def attend_few(work, queue, q_ring, q_gathered, p_tiles, k_ring, v_ring, group: gl.constexpr):
    """A consumer of a CTA whose items have at most p_tiles.shape[1] packed rows for each of them.

    Queries are in q_ring where they are boxes, else each gathers its own into q_gathered.
    """
    num_rows: gl.constexpr = p_tiles.shape[1]
    if group == 0:
        clear_padding(work)

    fill = first_fill()
    slot = first_fill()
    q_turn = first_fill()
    turn = gl.to_tensor(2 * group)
    queue.arrived(slot)
    more = queue.field(slot, MORE)
    while more > 0:
        tiles = queue.field(slot, TILES)
        last = queue.field(slot, LAST)
        kv_head = queue.field(slot, HEAD)
        item_row = queue.field(slot, FIRST_ROW)
        end_row = queue.field(slot, END_ROW)
        part = queue.field(slot, SLOT)
        token = queue.field(slot, TOKEN)
        q_len = queue.field(slot, QUERIES)
        kv_len = queue.field(slot, KEYS)
        merge = queue.field(slot, JOINED_BY)
        queue.release(slot)
        has_rows = True if group == 0 else item_row + group * num_rows < end_row
        if has_rows:
            fill, q_turn, turn = _attend(
                work, q_ring, q_gathered, p_tiles, k_ring, v_ring, fill, q_turn, turn, tiles, last,
                kv_head, item_row, end_row, part, token, q_len, kv_len, merge, group,
            )  # fmt: skip
        else:
            for _ in range(tiles):
                k_ring.arrived(fill)
                k_ring.release(fill)
                v_ring.arrived(fill)
                v_ring.release(fill)
                fill = k_ring.after(fill)
        slot = queue.after(slot)
        queue.arrived(slot)
        more = queue.field(slot, MORE)
