"""Dual chunk attention forward in portable Triton: one online softmax that changes its query operand.

Tiles of query rows begin anew at every chunk border, so a tile's keys fall into three runs: earlier
chunks, the chunk before, its own. Each run is met by its own rotation of the tile's queries, with
the same softmax going on. Runs begin and end anywhere: blocks are counted from a run's first key.
"""
# mypy: disable-error-code="no-untyped-def"

from contextlib import nullcontext
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from rooftile.kernels import Kernel
from rooftile.kernels.triton.attention_tiles import config_of
from rooftile.kernels.triton.descriptors import (
    describe,
    has_copy_engine,
    is_addressable,
    unit_stride,
)
from rooftile.kernels.triton.dual_chunk_paged import paged_dual_chunk_attention
from rooftile.kernels.triton.grid import grid_of, pair_id
from rooftile.kernels.triton.refusal import refusal

LOG2_E = 1.4426950408889634


@triton.jit
def _fold(
    state,  # (o [rows, v_tile], maximum [rows] in log2 units, total [rows])
    begin,
    end,  # keys; whole blocks where not masked
    q,  # [rows, k_tile]
    k,  # pointers to the sequence's first key, its head
    v,
    k_desc,  # descriptors [batch, heads, keys, dim], or None
    v_desc,
    k_stride,
    v_stride,
    at_batch,  # where the sequence begins in the descriptors
    kv_head,
    kv_start,
    last,  # [rows], the last key that each row sees
    factor,
    softcap,
    k_dim,
    v_dim,
    k_tile: tl.constexpr,
    v_tile: tl.constexpr,
    block: tl.constexpr,
    by_descriptor: tl.constexpr,
    masked: tl.constexpr,
    has_softcap: tl.constexpr,
    exact_dims: tl.constexpr,
    stages: tl.constexpr,
):
    """Folds keys begin .. end - 1 into the state."""
    o, maximum, total = state
    column = tl.arange(0, block)
    k_column = tl.arange(0, k_tile)
    v_column = tl.arange(0, v_tile)
    for start in tl.range(begin, end, block, num_stages=stages):
        columns = start + column
        if by_descriptor:
            k_block = k_desc.load([at_batch, kv_head, kv_start + start, 0])
            k_block = k_block.reshape([block, k_tile]).T
        else:
            k_at = k + tl.cast(start, tl.int64) * k_stride
            k_at = k_at + k_column[:, None] + column.to(tl.int64)[None, :] * k_stride
            if masked or not exact_dims:
                inside = (columns < end)[None, :] & (k_column < k_dim)[:, None]
                k_block = tl.load(k_at, mask=inside, other=0.0)
            else:
                k_block = tl.load(k_at)
        s = tl.dot(q, k_block, input_precision="ieee")
        if has_softcap:
            # softcap * log2 e * tanh(s * scale / softcap), from exp2
            s = softcap - 2.0 * softcap / (tl.exp2(s * (2.0 * 1.4426950408889634 * factor)) + 1.0)
        if masked:
            # A block may begin in this run and end in the next: what is loaded there is not seen.
            seen = columns[None, :] <= tl.minimum(last, end - 1)[:, None]
            s = tl.where(seen, s, float("-inf"))
        if has_softcap:
            new_maximum = tl.maximum(maximum, tl.max(s, 1))
            p = tl.exp2(s - new_maximum[:, None])
        else:
            # One multiplication and addition an element: the factor is positive.
            new_maximum = tl.maximum(maximum, tl.max(s, 1) * factor)
            p = tl.exp2(s * factor - new_maximum[:, None])
        alpha = tl.exp2(maximum - new_maximum)
        total = total * alpha + tl.sum(p, 1)
        o = o * alpha[:, None]
        if by_descriptor:
            v_block = v_desc.load([at_batch, kv_head, kv_start + start, 0]).reshape([block, v_tile])
        else:
            v_at = v + tl.cast(start, tl.int64) * v_stride
            v_at = v_at + v_column[None, :] + column.to(tl.int64)[:, None] * v_stride
            if masked or not exact_dims:
                inside = (columns < end)[:, None] & (v_column < v_dim)[None, :]
                v_block = tl.load(v_at, mask=inside, other=0.0)
            else:
                v_block = tl.load(v_at)
        o = tl.dot(p.to(v_block.dtype), v_block, o, input_precision="ieee")
        maximum = new_maximum
    return o, maximum, total


_UNSPECIALISED = ["q_len", "kv_len", "chunk_len", "group_size", "num_heads", "batch"]


@triton.jit(do_not_specialize=_UNSPECIALISED)
def dual_chunk_kernel(
    q_intra,
    q_succ,
    q_inter,
    k,
    v,
    k_desc,
    v_desc,
    out,
    lse,
    cu_seqlens_q,
    cu_seqlens_k,
    q_batch_stride,  # of all three queries
    q_stride,
    q_head_stride,
    k_batch_stride,
    k_stride,
    k_head_stride,
    v_batch_stride,
    v_stride,
    v_head_stride,
    batch,
    num_heads,
    group_size,
    q_len,  # of each sequence; tokens of all where ragged
    kv_len,
    chunk_len,
    factor,
    softcap,
    k_dim,
    v_dim,
    k_tile: tl.constexpr,
    v_tile: tl.constexpr,
    tile_rows: tl.constexpr,
    block: tl.constexpr,
    ragged: tl.constexpr,
    has_softcap: tl.constexpr,
    exact_dims: tl.constexpr,
    by_descriptor: tl.constexpr,
    stages: tl.constexpr,
):
    """Program (tile, pair of head and sequence); where ragged, one more sequence is the padding."""
    # The last tiles are the longest, so they go first.
    m = tl.num_programs(0) - 1 - tl.program_id(0)
    head, sequence = pair_id(num_heads, batch + 1 if ragged else batch)
    q_start = 0
    kv_start = 0
    at_batch = sequence
    out_start = sequence.to(tl.int64) * q_len
    v_column = tl.arange(0, v_tile)
    lane = tl.arange(0, tile_rows)
    if ragged:
        at_batch = 0
        q_start = tl.load(cu_seqlens_q + sequence).to(tl.int32)
        if sequence == batch:
            # Tokens after the last sequence: there may be more than the grid has tiles for.
            for row in range(q_start + m * tile_rows, q_len, tl.num_programs(0) * tile_rows):
                token = (row + lane).to(tl.int64)
                at = token * num_heads + head
                mask = (token < q_len)[:, None] & (v_column < v_dim)[None, :]
                zero = tl.zeros([tile_rows, v_tile], out.dtype.element_ty)
                tl.store(out + at[:, None] * v_dim + v_column[None, :], zero, mask)
                tl.store(lse + at, tl.full([tile_rows], float("-inf"), tl.float32), token < q_len)
            return
        kv_start = tl.load(cu_seqlens_k + sequence).to(tl.int32)
        k += kv_start.to(tl.int64) * k_stride
        v += kv_start.to(tl.int64) * v_stride
        out_start = q_start.to(tl.int64)
        q_len = tl.load(cu_seqlens_q + sequence + 1).to(tl.int32) - q_start
        kv_len = tl.load(cu_seqlens_k + sequence + 1).to(tl.int32) - kv_start
        q_batch_stride = 0
        k_batch_stride = 0
        v_batch_stride = 0
    # Rows before `first_rows` stand in the chunk of the first query; tiles of each chunk follow.
    offset = kv_len - q_len
    first_chunk = tl.maximum(offset, 0) // chunk_len
    first_rows = tl.minimum((first_chunk + 1) * chunk_len - offset, q_len)
    first_tiles = (first_rows + tile_rows - 1) // tile_rows
    chunk_tiles = (chunk_len + tile_rows - 1) // tile_rows
    later = tl.maximum(m - first_tiles, 0)
    chunk = first_chunk
    row0 = m * tile_rows
    row_end = first_rows
    if m >= first_tiles:
        chunk = first_chunk + 1 + later // chunk_tiles
        begins = chunk * chunk_len - offset
        row0 = begins + later % chunk_tiles * tile_rows
        row_end = tl.minimum(begins + chunk_len, q_len)
    if row0 >= row_end:
        return
    rows = row0 + lane
    k_column = tl.arange(0, k_tile)
    kv_head = head // group_size
    q_at = sequence.to(tl.int64) * q_batch_stride + head.to(tl.int64) * q_head_stride
    q_at = q_at + (q_start + rows).to(tl.int64)[:, None] * q_stride + k_column[None, :]
    q_mask = (rows < row_end)[:, None] & (k_column < k_dim)[None, :]
    k_at = k + sequence.to(tl.int64) * k_batch_stride + kv_head.to(tl.int64) * k_head_stride
    v_at = v + sequence.to(tl.int64) * v_batch_stride + kv_head.to(tl.int64) * v_head_stride

    own = chunk * chunk_len
    before = tl.maximum(own - chunk_len, 0)
    seen_end = tl.minimum(row0 + tile_rows, row_end) + offset
    state = (
        tl.zeros([tile_rows, v_tile], tl.float32),
        tl.full([tile_rows], -1.0e30, tl.float32),
        tl.zeros([tile_rows], tl.float32),
    )
    # A loop that stays one: its blocks' barriers, and the compiler's work, are there once.
    for part in tl.range(0, 3, num_stages=1):
        queries = q_inter
        begin = own * 0
        end = before
        whole = end
        last = rows * 0 + end
        if part == 1:
            queries = q_succ
            begin = before
            end = own
            whole = end
            last = rows * 0 + end
        elif part == 2:
            queries = q_intra
            begin = own
            end = seen_end
            # What the tile's first row sees, all of its rows see.
            whole = tl.maximum(tl.minimum(row0 + offset + 1, end), begin)
            last = rows + offset
        if begin < end:
            q_tile = tl.load(queries + q_at, mask=q_mask, other=0.0)
            whole = begin + (whole - begin) // block * block
            state = _fold(
                state, begin, whole, q_tile, k_at, v_at, k_desc, v_desc, k_stride, v_stride,
                at_batch, kv_head, kv_start, last, factor, softcap, k_dim, v_dim, k_tile, v_tile,
                block, by_descriptor, False, has_softcap, exact_dims, stages,
            )  # fmt: skip
            state = _fold(
                state, whole, end, q_tile, k_at, v_at, k_desc, v_desc, k_stride, v_stride,
                at_batch, kv_head, kv_start, last, factor, softcap, k_dim, v_dim, k_tile, v_tile,
                block, by_descriptor and not ragged, True, has_softcap, exact_dims, stages,
            )  # fmt: skip
    o, maximum, total = state

    o = o / tl.where(total != 0, total, 1.0)[:, None]
    log_sum = tl.where(total != 0, (maximum + tl.log2(total)) * 0.6931471805599453, float("-inf"))
    token = (out_start + rows) * num_heads + head
    out_mask = (rows < row_end)[:, None] & (v_column < v_dim)[None, :]
    at = out + token[:, None] * v_dim + v_column[None, :]
    tl.store(at, o.to(out.dtype.element_ty), out_mask)
    tl.store(lse + token, log_sum, mask=rows < row_end)


def dual_chunk_attention(
    q_intra: Tensor,  # [batch, q_len, num_q_heads, k_dim]
    q_succ: Tensor,  # [batch, q_len, num_q_heads, k_dim]
    q_inter: Tensor,  # [batch, q_len, num_q_heads, k_dim]
    k: Tensor,  # [batch, kv_len, num_kv_heads, k_dim]
    v: Tensor,  # [batch, kv_len, num_kv_heads, v_dim]
    chunk_len: int,
    softcap: float,
    scale: float,
) -> tuple[Tensor, Tensor]:  # [batch, q_len, num_q_heads, v_dim], [batch, q_len, num_q_heads]
    queries = (q_intra, q_succ, q_inter)
    return _launch(queries, k, v, None, q_intra.shape[1], chunk_len, softcap, scale)


def dual_chunk_attention_varlen(
    q_intra: Tensor,  # [tokens_q, num_q_heads, k_dim]
    q_succ: Tensor,  # [tokens_q, num_q_heads, k_dim]
    q_inter: Tensor,  # [tokens_q, num_q_heads, k_dim]
    k: Tensor,  # [tokens_k, num_kv_heads, k_dim]
    v: Tensor,  # [tokens_k, num_kv_heads, v_dim]
    cu_seqlens_q: Tensor,  # [batch + 1]
    cu_seqlens_k: Tensor,  # [batch + 1]
    max_q_len: int,
    max_kv_len: int,
    chunk_len: int,
    softcap: float,
    scale: float,
) -> tuple[Tensor, Tensor]:  # [tokens_q, num_q_heads, v_dim], [tokens_q, num_q_heads]
    queries = (q_intra[None], q_succ[None], q_inter[None])
    cu = (cu_seqlens_q, cu_seqlens_k)
    out, lse = _launch(queries, k[None], v[None], cu, max_q_len, chunk_len, softcap, scale)
    return out[0], lse[0]


def _launch(
    queries: tuple[Tensor, Tensor, Tensor],  # each [batch, q_len, num_q_heads, k_dim]
    k: Tensor,  # [batch, kv_len, num_kv_heads, k_dim]
    v: Tensor,  # [batch, kv_len, num_kv_heads, v_dim]
    cu_seqlens: tuple[Tensor, Tensor] | None,  # ragged: one batch of all tokens
    most_rows: int,  # of a sequence
    chunk_len: int,
    softcap: float,
    scale: float,
) -> tuple[Tensor, Tensor]:
    q = queries[0]
    out = q.new_empty(*q.shape[:-1], v.shape[-1])
    lse = q.new_empty(q.shape[:-1], dtype=torch.float32)
    if lse.numel() == 0:
        return out, lse
    if scale <= 0:  # the row maximum is taken of raw scores
        sign = -1 if scale < 0 else 0
        queries = (queries[0] * sign, queries[1] * sign, queries[2] * sign)
        scale = -scale or 1.0
    if len({x.stride() for x in queries}) > 1 or queries[0].stride(-1) != 1:
        queries = (queries[0].contiguous(), queries[1].contiguous(), queries[2].contiguous())
    k, v = unit_stride(k), unit_stride(v)
    num_heads, k_dim, v_dim = q.shape[2], q.shape[3], v.shape[3]
    k_tile, v_tile = (max(16, triton.next_power_of_2(n)) for n in (k_dim, v_dim))
    config = config_of(max(k_tile, v_tile), q.element_size())
    batch = q.shape[0] if cu_seqlens is None else cu_seqlens[0].shape[0] - 1
    # The first and the last chunk may be cut, each by itself.
    chunk_tiles = triton.cdiv(chunk_len, config.tile_rows)
    whole = most_rows // chunk_len * chunk_tiles
    tiles = min(
        whole + triton.cdiv(most_rows % chunk_len, config.tile_rows) + 2,
        whole + 2 * chunk_tiles,
        most_rows + 1,
    )
    by_descriptor = has_copy_engine(q.device) and is_addressable(k) and is_addressable(v)
    descriptors: tuple[Any, Any] = (None, None)
    if by_descriptor:
        descriptors = (describe(k, config.block, k_tile), describe(v, config.block, v_tile))
    grid = grid_of(max(tiles, 1), num_heads * (batch if cu_seqlens is None else batch + 1))
    with torch.cuda.device(q.device) if q.is_cuda else nullcontext():
        dual_chunk_kernel[grid](
            *(*queries, k, v, *descriptors, out, lse),
            *(cu_seqlens or (lse, lse)),
            *(stride for x in (queries[0], k, v) for stride in x.stride()[:3]),
            batch,
            num_heads,
            num_heads // k.shape[2],
            q.shape[1],
            k.shape[1],
            chunk_len,
            scale / softcap if softcap else scale * LOG2_E,
            softcap * LOG2_E,
            k_dim,
            v_dim,
            k_tile=k_tile,
            v_tile=v_tile,
            tile_rows=config.tile_rows,
            block=config.block,
            ragged=cu_seqlens is not None,
            has_softcap=softcap != 0,
            exact_dims=k_dim == k_tile and v_dim == v_tile,
            by_descriptor=by_descriptor,
            stages=config.num_stages,
            num_warps=config.num_warps,
            num_stages=config.num_stages,
        )
    return out, lse


def supports(call: Any) -> str | None:
    reason = refusal(call)
    if reason is not None:
        return reason
    for name, dim in (("k_dim", call.k_dim), ("v_dim", call.v_dim)):
        if dim > 256:
            return f"{name} is {dim}; it takes up to 256"
    return None


KERNELS = {
    "dual_chunk_attention": Kernel(dual_chunk_attention, supports, efficiency=0.45),
    "dual_chunk_attention_varlen": Kernel(dual_chunk_attention_varlen, supports, efficiency=0.45),
    "paged_dual_chunk_attention": Kernel(paged_dual_chunk_attention, supports, efficiency=0.5),
}
