"""The kernel: every warp multiplies, and one of their threads starts the copies of the next tile."""
# mypy: disable-error-code="no-untyped-def"

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from rooftile.kernels.gluon.attention.short.order import Order
from rooftile.kernels.gluon.tile.dependent import await_kernels_before, let_dependents_start
from rooftile.kernels.gluon.tile.divisor import Divisor
from rooftile.kernels.gluon.tile.maps import prefetch_maps
from rooftile.kernels.gluon.tile.mask import visible
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
from rooftile.kernels.gluon.tile.opaque import opaque
from rooftile.kernels.gluon.tile.softmax import start_softmax
from rooftile.kernels.triton_version import tma_load, tma_store, tma_store_wait

_UNSPECIALISED = [
    *("lse", "num_tiles", "q_tiles", "q_tiles_factor", "q_tiles_shift"),
    *("num_heads", "num_heads_factor", "num_heads_shift"),
    *("group_size", "group_factor", "group_shift"),
    *("q_len", "kv_len", "right", "with_lse"),
]


@gluon.jit
def _load_scores(q_desc, k_desc, batch, head, kv_head, row0, q_tile, k_tile, full, more):
    """Queries and keys, which are waited for together."""
    mbarrier.expect(full, q_desc.block_type.nbytes + k_desc.block_type.nbytes, pred=more)
    tma_load(k_desc, (batch, kv_head, 0, 0), full, k_tile, pred=more)
    tma_load(q_desc, (batch, head, row0, 0), full, q_tile, pred=more)


@gluon.jit
def _load_values(v_desc, batch, kv_head, v_tile, full, more):
    mbarrier.expect(full, v_desc.block_type.nbytes, pred=more)
    tma_load(v_desc, (batch, kv_head, 0, 0), full, v_tile, pred=more)


@gluon.jit(do_not_specialize=_UNSPECIALISED)
def short_attention_kernel(
    q_desc,
    k_desc,
    v_desc,
    o_desc,
    lse,  # pointer, [batch, q_len, heads] float32
    num_tiles,
    q_tiles,  # of a head
    q_tiles_factor,
    q_tiles_shift,
    num_heads,
    num_heads_factor,
    num_heads_shift,
    group_size,  # query heads per key-value head
    group_factor,
    group_shift,
    q_len,
    kv_len,  # at most `keys`
    right,
    with_lse,  # 0: nobody reads it
    factor,  # raw scores to log2 units
    dim: gl.constexpr,
    keys: gl.constexpr,
    has_right: gl.constexpr,
):
    """Forward attention of tiles of 64 rows by all keys. For four warps."""
    dtype: gl.constexpr = q_desc.dtype
    S: gl.constexpr = accumulator_layout(keys)
    O: gl.constexpr = accumulator_layout(dim)  # noqa: E741
    let_dependents_start()
    # Of Q, K, V and the output; a descriptor is a map and two numbers for each of 4 dimensions.
    prefetch_maps("short_attention_kernel", (0, 9, 18, 27))
    q_tile = gl.allocate_shared_memory(dtype, q_desc.block_shape, q_desc.layout)
    k_tile = gl.allocate_shared_memory(dtype, k_desc.block_shape, k_desc.layout)
    v_tile = gl.allocate_shared_memory(dtype, v_desc.block_shape, v_desc.layout)
    o_tile = gl.allocate_shared_memory(dtype, o_desc.block_shape, o_desc.layout)
    s_full = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout()).index(0)
    v_full = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout()).index(0)
    mbarrier.init(s_full, count=1)
    mbarrier.init(v_full, count=1)
    fence_async_shared()
    await_kernels_before()

    order = Order(
        num_tiles,
        Divisor(q_tiles, q_tiles_factor, q_tiles_shift),
        Divisor(num_heads, num_heads_factor, num_heads_shift),
        GROUP_ROWS,
    )
    of_heads = Divisor(group_size, group_factor, group_shift)
    batch, head, row0, more = order.tile(0)
    kv_head = of_heads.divide(head)
    _load_scores(q_desc, k_desc, batch, head, kv_head, row0, q_tile, k_tile, s_full, more)
    _load_values(v_desc, batch, kv_head, v_tile, v_full, more)

    columns = gl.arange(0, keys, columns_of(S))
    q = q_tile.reshape([GROUP_ROWS, dim])
    k = k_tile.reshape([keys, dim])
    v = v_tile.reshape([keys, dim])
    offset = kv_len - q_len
    i = 0
    while more:
        next_batch, next_head, next_row0, more = order.tile(i + 1)
        next_kv_head = of_heads.divide(next_head)
        row = row0 + gl.arange(0, GROUP_ROWS, rows_of(S))
        mbarrier.wait(s_full, i & 1)
        s = gl.zeros([GROUP_ROWS, keys], gl.float32, S)
        s = multiply(q, k.permute((1, 0)), s, use_acc=False)
        s = wait(0, deps=[s])
        gl.thread_barrier()  # every warp has read them
        _load_scores(
            *(q_desc, k_desc, next_batch, next_head, next_kv_head, next_row0),
            *(q_tile, k_tile, s_full, more),
        )
        end = kv_len
        if has_right:
            end = gl.minimum(end, row0 + offset + right + 1)
        if end < keys:
            # Else what a mask compares for every element stays in registers from tile to tile.
            column = columns + opaque(0)
            seen = visible(row, column, offset, kv_len, -1, right, False, has_right)
            s = gl.where(seen, s, float("-inf"))
        _alpha, softmax = start_softmax(GROUP_ROWS, rows_of(S)).anchor(s, factor)
        p, softmax = softmax.weigh(s, factor, 0)
        weights = gl.convert_layout(narrow(p, dtype), left_operand_layout(O))
        mbarrier.wait(v_full, i & 1)
        o = multiply(weights, v, gl.zeros([GROUP_ROWS, dim], gl.float32, O), use_acc=False)
        o, weights = wait(0, deps=[o, weights])
        gl.thread_barrier()
        _load_values(v_desc, next_batch, next_kv_head, v_tile, v_full, more)
        o = o * gl.expand_dims(gl.convert_layout(softmax.reciprocal(), rows_of(O)), 1)
        tma_store_wait(0)
        o_tile.reshape([GROUP_ROWS, dim]).store(o.to(dtype))
        fence_async_shared()
        tma_store(o_desc, (batch, head, row0, 0), o_tile)
        if with_lse > 0:
            token = (batch * q_len + row).to(gl.int64)
            gl.store(lse + token * num_heads + head, softmax.lse(), mask=row < q_len)
        batch = next_batch
        head = next_head
        row0 = next_row0
        i += 1
    tma_store_wait(0)
