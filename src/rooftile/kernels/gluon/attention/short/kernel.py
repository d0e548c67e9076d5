"""The kernel: every warp multiplies, and one of their threads starts the copies of what comes next."""
# mypy: disable-error-code="no-untyped-def"

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from rooftile.kernels.gluon.attention.short.order import Order, first_block
from rooftile.kernels.gluon.tile.dependent import await_kernels_before, let_dependents_start
from rooftile.kernels.gluon.tile.divisor import Divisor
from rooftile.kernels.gluon.tile.maps import prefetch_maps
from rooftile.kernels.gluon.tile.mask import visible, whole_range
from rooftile.kernels.gluon.tile.mma import (
    columns_of,
    left_operand_layout,
    multiply,
    narrow,
    rows_of,
    wait,
)
from rooftile.kernels.gluon.tile.softmax import rescale, start_softmax
from rooftile.kernels.triton_version import tma_load, tma_store, tma_store_wait

_UNSPECIALISED = [
    *("out", "lse", "num_tiles", "q_tiles", "q_tiles_factor", "q_tiles_shift", "num_heads"),
    *("num_heads_factor", "num_heads_shift", "group_size", "group_factor", "group_shift"),
    *("q_len", "kv_len", "right"),
]


@gluon.constexpr_function
def _accumulator(warps, columns):
    """Layout of an accumulator of 16 rows a warp."""
    return gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[warps, 1], instr_shape=[16, columns, 16]
    )


@gluon.constexpr_function
def _rowwise(warps, columns):
    """Of an output tile on its way to memory: four threads have 32 neighbouring columns of a row, and
    write whole sectors of it."""
    further = [32 << i for i in range(8) if 32 << i < columns]
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], *([0, column] for column in further), [8, 0]],
        lane_bases=[[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16 << i, 0] for i in range(warps.bit_length() - 1)],
        block_bases=[],
        shape=[16 * warps, columns],
    )


@gluon.jit
def _load_keys(at, desc, tiles, full, stage, block: gl.constexpr, more=True):
    """Starts the copy of keys or values into a stage that every warp has read."""
    more = (at.n >= 0) & more
    mbarrier.expect(full.index(stage), desc.block_type.nbytes, pred=more)
    place = (at.batch, at.head, at.n * block, 0)
    tma_load(desc, place, full.index(stage), tiles.index(stage), pred=more)


@gluon.jit
def _load_q(order, i, desc, tile, full):
    batch, head, row0, blocks = order.tile(i)
    mbarrier.expect(full, desc.block_type.nbytes, pred=blocks > 0)
    tma_load(desc, (batch, head, row0, 0), full, tile, pred=blocks > 0)


@gluon.jit
def _store(out, o, token, q_len, num_heads, head, row0, dim: gl.constexpr, warps: gl.constexpr):
    """Writes an output tile from registers; token: of the sequence's first query."""
    R: gl.constexpr = _rowwise(warps, dim)
    row = row0 + gl.arange(0, 16 * warps, rows_of(R))
    first = ((token + row).to(gl.int64) * num_heads + head) * dim
    at = out + gl.expand_dims(first, 1) + gl.expand_dims(gl.arange(0, dim, columns_of(R)), 0)
    at = gl.max_contiguous(gl.multiple_of(at, [1, 16]), [1, 8])
    gl.store(at, gl.convert_layout(o, R), mask=gl.expand_dims(row < q_len, 1))


@gluon.jit(do_not_specialize=_UNSPECIALISED)
def short_attention_kernel(
    q_desc,
    k_desc,
    v_desc,
    o_desc,
    out,  # pointer, [batch, q_len, heads, dim]
    lse,  # pointer, [batch, q_len, heads] float32
    num_tiles,
    q_tiles,
    q_tiles_factor,
    q_tiles_shift,
    num_heads,
    num_heads_factor,
    num_heads_shift,
    group_size,
    group_factor,
    group_shift,
    q_len,
    kv_len,
    right,
    factor,
    dim: gl.constexpr,
    warps: gl.constexpr,
    block: gl.constexpr,
    stages: gl.constexpr,
    single: gl.constexpr,
    late: gl.constexpr,
    staged: gl.constexpr,
    has_right: gl.constexpr,
):
    """Forward attention of tiles of 16 rows a warp, one step after the other: CTAs that share an SM
    overlap each other. See config.Short for the constants."""
    rows: gl.constexpr = 16 * warps
    dtype: gl.constexpr = q_desc.dtype
    S: gl.constexpr = _accumulator(warps, block)
    O: gl.constexpr = _accumulator(warps, dim)  # noqa: E741
    let_dependents_start()
    # Of Q, K, V and the output; a descriptor is a map and two numbers for each of 4 dimensions.
    prefetch_maps("short_attention_kernel", (0, 9, 18, 27))
    q_tile = gl.allocate_shared_memory(dtype, q_desc.block_shape, q_desc.layout)
    k_tile = gl.allocate_shared_memory(dtype, [stages] + k_desc.block_shape, k_desc.layout)  # noqa: RUF005
    v_tile = gl.allocate_shared_memory(dtype, [stages] + v_desc.block_shape, v_desc.layout)  # noqa: RUF005
    if staged:
        o_tile = gl.allocate_shared_memory(dtype, o_desc.block_shape, o_desc.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout()).index(0)
    k_full = gl.allocate_shared_memory(gl.int64, [stages, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [stages, 1], mbarrier.MBarrierLayout())
    mbarrier.init(q_full, count=1)
    for i in gl.static_range(stages):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(v_full.index(i), count=1)
    fence_async_shared()
    await_kernels_before()

    order = Order(
        num_tiles,
        Divisor(q_tiles, q_tiles_factor, q_tiles_shift),
        Divisor(num_heads, num_heads_factor, num_heads_shift),
        Divisor(group_size, group_factor, group_shift),
        *(q_len, kv_len, right, rows, block, has_right),
    )
    ahead = first_block(order)
    _load_q(order, 0, q_desc, q_tile, q_full)
    for i in gl.static_range(stages):
        _load_keys(ahead, k_desc, k_tile, k_full, i, block)
        _load_keys(ahead, v_desc, v_tile, v_full, i, block)
        ahead = ahead.following(order)

    columns = gl.arange(0, block, columns_of(S))
    q = q_tile.reshape([rows, dim])
    offset = kv_len - q_len
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    read = gl.to_tensor(-1)  # the stage of the block before
    i = 0
    batch, head, row0, blocks = order.tile(i)
    while blocks > 0:
        row = row0 + gl.arange(0, rows, rows_of(S))
        low, high = whole_range(row0, offset, kv_len, -1, right, rows, block, False, has_right)
        softmax = start_softmax(rows, rows_of(S))
        o = gl.zeros([rows, dim], gl.float32, O)
        mbarrier.wait(q_full, i & 1)
        n = blocks - 1
        while n >= 0:
            gl.thread_barrier()  # every warp has read the block before
            mbarrier.wait(k_full.index(stage), phase)
            k = k_tile.index(stage).reshape([block, dim])
            s = gl.zeros([rows, block], gl.float32, S)
            s = multiply(q, k.permute((1, 0)), s, use_acc=False)
            if late:
                more = read >= 0
                place = gl.maximum(read, 0)
                _load_keys(ahead, k_desc, k_tile, k_full, place, block, more)
                _load_keys(ahead, v_desc, v_tile, v_full, place, block, more)
                gl.thread_barrier()
                if more:
                    ahead = ahead.following(order)
                read = stage
            s = wait(0, deps=[s])
            if not late:
                gl.thread_barrier()  # every warp has read the keys
                _load_keys(ahead, k_desc, k_tile, k_full, stage, block)
                if n == 0:
                    _load_q(order, i + 1, q_desc, q_tile, q_full)
            if (n < low) | (n >= high):
                keys = n * block + columns
                seen = visible(row, keys, offset, kv_len, -1, right, False, has_right)
                s = gl.where(seen, s, float("-inf"))
            if single:
                _alpha, softmax = softmax.anchor(s, factor)
                p, softmax = softmax.weigh(s, factor, 0)
            else:
                p, alpha, softmax = softmax.step(s, factor, True, 0)
                o = rescale(o, gl.convert_layout(alpha, rows_of(O)), dim, True)
            weights = gl.convert_layout(narrow(p, dtype), left_operand_layout(O))
            mbarrier.wait(v_full.index(stage), phase)
            v = v_tile.index(stage).reshape([block, dim])
            o = multiply(weights, v, o, use_acc=not single)
            o, weights = wait(0, deps=[o, weights])
            if not late:
                gl.thread_barrier()  # every warp has read the values
                _load_keys(ahead, v_desc, v_tile, v_full, stage, block)
                ahead = ahead.following(order)
            if stages == 1:
                phase ^= 1
            else:
                phase ^= stage
                stage ^= 1
            n -= 1
        if late:
            gl.thread_barrier()
            _load_q(order, i + 1, q_desc, q_tile, q_full)
        o = o * gl.expand_dims(gl.convert_layout(softmax.reciprocal(), rows_of(O)), 1)
        token = batch * q_len
        at_lse = lse + (token + row).to(gl.int64) * num_heads + head
        gl.store(at_lse, softmax.lse(), mask=row < q_len)
        if staged:
            tma_store_wait(0)
            o_tile.reshape([rows, dim]).store(o.to(dtype))
            fence_async_shared()
            tma_store(o_desc, (batch, head, row0, 0), o_tile)
        else:
            _store(out, narrow(o, dtype), token, q_len, num_heads, head, row0, dim, warps)
        i += 1
        batch, head, row0, blocks = order.tile(i)
    if staged:
        tma_store_wait(0)
