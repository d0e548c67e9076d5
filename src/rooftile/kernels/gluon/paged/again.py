"""An item once more, by its consumer alone, where weights under an anchored maximum grew too large."""
# mypy: disable-error-code="no-untyped-def"

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from rooftile.kernels.gluon.attention.scores import hide
from rooftile.kernels.gluon.paged.rows import loading_layout
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
from rooftile.kernels.gluon.tile.softmax import soft_cap, start_softmax, start_softmax_at_sink
from rooftile.kernels.triton_version import tma_store_wait


@gluon.jit
def _gather(work, box, pages, table, key0, first_key, kv_len, head_at, pitch, stride, width):
    """Keys or values key0 .. key0 + 63 of a head into shared memory; those out of sight as zeros."""
    L: gl.constexpr = loading_layout(box.shape[1])
    key = key0 + gl.arange(0, GROUP_ROWS, gl.SliceLayout(1, L))
    column = gl.arange(0, box.shape[1], gl.SliceLayout(0, L))
    seen = (key < kv_len) & (key >= first_key)
    page = gl.load(table + key // work.page_size, mask=seen, other=0)
    row = (page.to(gl.int64) * pitch + key % work.page_size) * stride
    at = pages + head_at + gl.expand_dims(row, 1) + gl.expand_dims(column, 0)
    there = gl.expand_dims(seen, 1) & gl.expand_dims(column < width, 0)
    found = gl.load(gl.multiple_of(at, [1, 8]), mask=there, other=0.0)
    gl.thread_barrier()  # every warp has read what the box held
    box.store(found)
    fence_async_shared()
    gl.thread_barrier()


@gluon.jit
def attend_again(
    work,
    q,  # shared tile [64, k_dim]
    box,  # shared tile [64, dim] for keys and for values in turn, where the output goes later
    request,
    last,  # the item's last KV tile
    tiles,
    first_row,
    end_row,
    part,
    kv_head,
    q_len,
    kv_len,
    dtype: gl.constexpr,
    v_dim: gl.constexpr,
):
    """Output [64, v_dim] and softmax of 64 packed rows under a running maximum, one block of 64 keys
    after the other. Nothing overlaps: it is for scores that rise by more than 2^64 (44 in natural
    units) above those of the item's last keys."""
    S: gl.constexpr = accumulator_layout(GROUP_ROWS)
    O: gl.constexpr = accumulator_layout(v_dim)  # noqa: E741
    columns = gl.arange(0, GROUP_ROWS, columns_of(S))
    rows = first_row + gl.arange(0, GROUP_ROWS, rows_of(S))
    heads = work.heads_of_group()
    table = work.page_table + gl.cast(request, gl.int64) * work.table_stride
    first_key = 0
    if work.has_left:
        first_key = kv_len - q_len + first_row // heads - work.left
    if work.has_sink:
        head = kv_head * heads + rows % heads
        sinks = gl.load(work.sink + head, mask=(rows < end_row) & (part < 0), other=float("-inf"))
        softmax = start_softmax_at_sink(sinks, GROUP_ROWS, rows_of(S))
    else:
        softmax = start_softmax(GROUP_ROWS, rows_of(S))
    o = gl.zeros([GROUP_ROWS, v_dim], gl.float32, O)
    tma_store_wait(0)  # the output of the item before has left the box
    k_head = gl.cast(kv_head, gl.int64) * work.k_head_stride
    v_head = gl.cast(kv_head, gl.int64) * work.v_head_stride
    end = gl.minimum((last + 1) * work.block, kv_len)
    for key0 in range((last + 1 - tiles) * work.block, end, GROUP_ROWS):
        _gather(
            work, box, work.k_pages, table, key0, first_key, kv_len, k_head, work.k_pitch,
            work.k_stride, work.k_width_of_8 * 8,
        )  # fmt: skip
        s = gl.zeros([GROUP_ROWS, GROUP_ROWS], gl.float32, S)
        s = multiply(q, box.permute((1, 0)), s, use_acc=False)
        s = wait(0, deps=[s])
        factor = work.factor
        if work.has_softcap:
            s = soft_cap(s, work.factor, work.softcap)
            factor = 1.0
        s = hide(work, s, rows // heads, key0, columns, kv_len - q_len, kv_len)
        p, alpha, softmax = softmax.step(s, factor, False, 0)
        o = o * gl.expand_dims(gl.convert_layout(alpha, rows_of(O)), 1)
        weights = gl.convert_layout(narrow(p, dtype), left_operand_layout(O))
        _gather(
            work, box, work.v_pages, table, key0, first_key, kv_len, v_head, work.v_pitch,
            work.v_stride, work.v_width_of_8 * 8,
        )  # fmt: skip
        o = multiply(weights, box, o)
        o, weights = wait(0, deps=[o, weights])
    return o, softmax.maximum, softmax.total
