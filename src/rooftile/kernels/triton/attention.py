"""Attention forward in portable Triton (FlashAttention-2, Dao 2023): dense and ragged.

Runs on every GPU that Triton supports, with pointer loads only, and in Triton's interpreter on a
CPU (TRITON_INTERPRET=1 before the import; float16 and float32). A program takes one tile of query
rows of one head; keys are visited from first to last, masked only where a bound cuts the block.
"""
# mypy: disable-error-code="no-untyped-def"

import os
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from rooftile.kernels import Kernel

_LOG2_E = 1.4426950408889634
UNBOUNDED = 2**30  # beyond every length
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@triton.jit
def _visit(
    state,  # (o [rows, v_tile], maximum [rows], total [rows])
    begin,
    end,  # keys, begin a multiple of block
    q,  # [rows, k_tile]
    k,  # pointer to the first key, its head
    v,
    k_stride,
    v_stride,
    rows,  # positions
    kv_len,
    left,
    right,
    factor,
    softcap,
    k_dim,
    v_dim,
    k_tile: tl.constexpr,
    v_tile: tl.constexpr,
    block: tl.constexpr,
    masked: tl.constexpr,
    has_left: tl.constexpr,
    has_right: tl.constexpr,
    has_softcap: tl.constexpr,
    exact_dims: tl.constexpr,
    precision: tl.constexpr,
):
    """Folds keys begin .. end - 1 into the state."""
    o, maximum, total = state
    column = tl.arange(0, block)
    k_column = tl.arange(0, k_tile)
    v_column = tl.arange(0, v_tile)
    for start in tl.range(begin, end, block):
        columns = start + column
        key = columns.to(tl.int64)
        k_at = k + k_column[:, None] + key[None, :] * k_stride
        v_at = v + v_column[None, :] + key[:, None] * v_stride
        if masked or not exact_dims:
            inside = columns < kv_len
            k_tile_ = tl.load(k_at, mask=inside[None, :] & (k_column[:, None] < k_dim), other=0.0)
        else:
            k_tile_ = tl.load(k_at)
        s = tl.dot(q, k_tile_, input_precision=precision)
        if has_softcap:
            # softcap * log2 e * tanh(s * scale / softcap), from exp2
            s = softcap - 2.0 * softcap / (tl.exp2(s * (2.0 * 1.4426950408889634 * factor)) + 1.0)
        else:
            s = s * factor
        if masked:
            seen = (columns < kv_len)[None, :]
            if has_right:
                seen = seen & (columns[None, :] <= rows[:, None] + right)
            if has_left:
                seen = seen & (columns[None, :] >= rows[:, None] - left)
            s = tl.where(seen, s, float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(s, 1))
        p = tl.exp2(s - new_maximum[:, None])
        alpha = tl.exp2(maximum - new_maximum)
        total = total * alpha + tl.sum(p, 1)
        if masked or not exact_dims:
            inside = columns < kv_len
            v_tile_ = tl.load(v_at, mask=inside[:, None] & (v_column[None, :] < v_dim), other=0.0)
        else:
            v_tile_ = tl.load(v_at)
        o = tl.dot(p.to(v_tile_.dtype), v_tile_, o * alpha[:, None], input_precision=precision)
        maximum = new_maximum
    return o, maximum, total


_UNSPECIALISED = ["q_len", "kv_len", "left", "right", "group_size", "num_heads", "batch"]


@triton.jit(do_not_specialize=_UNSPECIALISED)
def attention_kernel(
    q,
    k,
    v,
    out,
    lse,
    sink,
    cu_seqlens_q,
    cu_seqlens_k,
    q_batch_stride,
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
    left,
    right,
    factor,
    softcap,
    k_dim,
    v_dim,
    k_tile: tl.constexpr,
    v_tile: tl.constexpr,
    tile_rows: tl.constexpr,
    block: tl.constexpr,
    ragged: tl.constexpr,
    has_left: tl.constexpr,
    has_right: tl.constexpr,
    has_softcap: tl.constexpr,
    has_sink: tl.constexpr,
    exact_dims: tl.constexpr,
    precision: tl.constexpr,
):
    """Program (tile, head, sequence); where ragged, one more sequence is the padding."""
    # The last tiles of a causal batch are the longest, so they go first.
    m = tl.num_programs(0) - 1 - tl.program_id(0)
    head = tl.program_id(1)
    sequence = tl.program_id(2)
    q_start = 0
    out_start = sequence.to(tl.int64) * q_len
    if ragged:
        q_start = tl.load(cu_seqlens_q + sequence).to(tl.int32)
        kv_start = tl.load(cu_seqlens_k + sequence).to(tl.int32)
        k += kv_start.to(tl.int64) * k_stride
        v += kv_start.to(tl.int64) * v_stride
        out_start = q_start.to(tl.int64)
        if sequence == batch:
            q_len = q_len - q_start
            kv_len = 0
        else:
            q_len = tl.load(cu_seqlens_q + sequence + 1).to(tl.int32) - q_start
            kv_len = tl.load(cu_seqlens_k + sequence + 1).to(tl.int32) - kv_start
        q_batch_stride = 0
        k_batch_stride = 0
        v_batch_stride = 0
    row0 = m * tile_rows
    # A sequence of the ragged batch may have more padding rows than the grid has tiles for.
    while row0 < q_len:
        rows = row0 + tl.arange(0, tile_rows)
        k_column = tl.arange(0, k_tile)
        v_column = tl.arange(0, v_tile)
        kv_head = head // group_size
        q_rows = (q_start + rows).to(tl.int64)[:, None] * q_stride
        q_at = q + sequence.to(tl.int64) * q_batch_stride + head.to(tl.int64) * q_head_stride
        q_mask = (rows < q_len)[:, None] & (k_column[None, :] < k_dim)
        q_tile = tl.load(q_at + q_rows + k_column[None, :], mask=q_mask, other=0.0)
        k_at = k + sequence.to(tl.int64) * k_batch_stride + kv_head.to(tl.int64) * k_head_stride
        v_at = v + sequence.to(tl.int64) * v_batch_stride + kv_head.to(tl.int64) * v_head_stride
        maximum = tl.full([tile_rows], -1.0e30, tl.float32)
        total = tl.zeros([tile_rows], tl.float32)
        if has_sink:
            logit = tl.load(sink + head) * 1.4426950408889634
            if ragged:
                logit = tl.where(sequence == batch, float("-inf"), logit)
            total += tl.where(logit > -1.0e30, 1.0, 0.0)
            maximum = tl.maximum(maximum, logit)
        o = tl.zeros([tile_rows, v_tile], tl.float32)

        # Blocks low .. high are seen whole by every row of the tile.
        offset = kv_len - q_len
        begin = 0
        end = kv_len
        low = 0
        high = kv_len
        if has_right:
            end = tl.minimum(end, tl.minimum(row0 + tile_rows, q_len) + offset + right)
            high = tl.minimum(high, row0 + offset + right + 1)
        if has_left:
            begin = tl.maximum(row0 + offset - left, 0) // block * block
            low = tl.maximum(row0 + tile_rows - 1 + offset - left, 0)
            low = (low + block - 1) // block * block
        high = tl.maximum(high, 0) // block * block
        low = tl.maximum(tl.minimum(low, end), begin)
        high = tl.minimum(tl.maximum(high, low), end)
        state = (o, maximum, total)
        if has_left:
            state = _visit(
                state, begin, low, q_tile, k_at, v_at, k_stride, v_stride, rows + offset, kv_len,
                left, right, factor, softcap, k_dim, v_dim, k_tile, v_tile, block, True,
                has_left, has_right, has_softcap, exact_dims, precision,
            )  # fmt: skip
        state = _visit(
            state, low, high, q_tile, k_at, v_at, k_stride, v_stride, rows + offset, kv_len,
            left, right, factor, softcap, k_dim, v_dim, k_tile, v_tile, block, False,
            has_left, has_right, has_softcap, exact_dims, precision,
        )  # fmt: skip
        state = _visit(
            state, high, end, q_tile, k_at, v_at, k_stride, v_stride, rows + offset, kv_len,
            left, right, factor, softcap, k_dim, v_dim, k_tile, v_tile, block, True,
            has_left, has_right, has_softcap, exact_dims, precision,
        )  # fmt: skip
        o, maximum, total = state

        o = o / tl.where(total > 0, total, 1.0)[:, None]
        log_sum = tl.where(
            total > 0, (maximum + tl.log2(total)) * 0.6931471805599453, float("-inf")
        )
        token = (out_start + rows) * num_heads + head
        out_mask = (rows < q_len)[:, None] & (v_column[None, :] < v_dim)
        tl.store(
            out + token[:, None] * v_dim + v_column[None, :], o.to(out.dtype.element_ty), out_mask
        )
        tl.store(lse + token, log_sum, mask=rows < q_len)
        row0 += tl.num_programs(0) * tile_rows


@dataclass(frozen=True)
class Config:
    tile_rows: int
    block: int
    num_warps: int
    num_stages: int


@cache
def config_of(dim: int, dtype: torch.dtype) -> Config:
    if INTERPRETED:
        return Config(32, 32, 4, 1)
    if dtype == torch.float32:
        return Config(64, 32, 4, 2)
    return Config(128, 64, 8, 3 if dim <= 128 else 2)


def attention(
    q: Tensor,  # [batch, q_len, num_q_heads, k_dim]
    k: Tensor,  # [batch, kv_len, num_kv_heads, k_dim]
    v: Tensor,  # [batch, kv_len, num_kv_heads, v_dim]
    sink: Tensor | None,  # [num_q_heads]
    left: int,
    right: int,
    softcap: float,
    scale: float,
) -> tuple[Tensor, Tensor]:  # [batch, q_len, num_q_heads, v_dim], [batch, q_len, num_q_heads]
    out = q.new_empty(*q.shape[:-1], v.shape[-1])
    lse = q.new_empty(q.shape[:-1], dtype=torch.float32)
    q, k, v = (_unit_stride(x) for x in (q, k, v))
    strides = [x.stride()[:3] for x in (q, k, v)]
    sizes = (q.shape[0], q.shape[1], k.shape[1])
    _launch(
        q, k, v, out, lse, sink, None, None, strides, sizes, sizes[1], left, right, softcap, scale
    )
    return out, lse


def attention_varlen(
    q: Tensor,  # [tokens_q, num_q_heads, k_dim]
    k: Tensor,  # [tokens_k, num_kv_heads, k_dim]
    v: Tensor,  # [tokens_k, num_kv_heads, v_dim]
    cu_seqlens_q: Tensor,  # [batch + 1]
    cu_seqlens_k: Tensor,  # [batch + 1]
    max_q_len: int,
    max_kv_len: int,
    sink: Tensor | None,  # [num_q_heads]
    left: int,
    right: int,
    softcap: float,
    scale: float,
) -> tuple[Tensor, Tensor]:  # [tokens_q, num_q_heads, v_dim], [tokens_q, num_q_heads]
    out = q.new_empty(*q.shape[:-1], v.shape[-1])
    lse = q.new_empty(q.shape[:-1], dtype=torch.float32)
    q, k, v = (_unit_stride(x) for x in (q, k, v))
    strides = [(0, *x.stride()[:2]) for x in (q, k, v)]
    sizes = (cu_seqlens_q.shape[0] - 1, q.shape[0], k.shape[0])
    cu = (cu_seqlens_q, cu_seqlens_k)
    _launch(q, k, v, out, lse, sink, *cu, strides, sizes, max_q_len, left, right, softcap, scale)
    return out, lse


def _unit_stride(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def _launch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    sink: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    strides: list[Any],  # of q, k, v: batch, length, heads
    sizes: tuple[int, int, int],  # batch, q_len, kv_len; tokens of all sequences where ragged
    most_rows: int,
    left: int,
    right: int,
    softcap: float,
    scale: float,
) -> None:
    if lse.numel() == 0:
        return
    ragged = cu_seqlens_q is not None
    num_heads, k_dim, v_dim = q.shape[-2], q.shape[-1], v.shape[-1]
    k_tile, v_tile = (max(16, triton.next_power_of_2(n)) for n in (k_dim, v_dim))
    config = config_of(max(k_tile, v_tile), q.dtype)
    grid = (
        max(triton.cdiv(most_rows, config.tile_rows), 1),
        num_heads,
        sizes[0] + 1 if ragged else sizes[0],
    )
    with torch.cuda.device(q.device) if q.is_cuda else torch.no_grad():
        attention_kernel[grid](
            *(q, k, v, out, lse, lse if sink is None else sink.float()),
            *((cu_seqlens_q, cu_seqlens_k) if ragged else (lse, lse)),
            *(stride for tensor in strides for stride in tensor),
            sizes[0],
            num_heads,
            num_heads // k.shape[-2],
            sizes[1],
            sizes[2],
            min(left, UNBOUNDED),
            min(right, UNBOUNDED),
            scale / softcap if softcap else scale * _LOG2_E,
            softcap * _LOG2_E,
            k_dim,
            v_dim,
            k_tile=k_tile,
            v_tile=v_tile,
            tile_rows=config.tile_rows,
            block=config.block,
            ragged=ragged,
            has_left=left >= 0,
            has_right=right >= 0,
            has_softcap=softcap != 0,
            has_sink=sink is not None,
            exact_dims=k_dim == k_tile and v_dim == v_tile,
            precision="ieee",
            num_warps=config.num_warps,
            num_stages=config.num_stages,
        )


def supports(call: Any) -> str | None:
    if INTERPRETED:
        if call.dtype not in (torch.float16, torch.float32):
            return f"Triton's interpreter takes float16 and float32, not {call.dtype}"
    elif call.device != "cuda":
        return f"it needs a GPU, not a {call.device}"
    elif call.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"it takes bfloat16, float16 and float32, not {call.dtype}"
    for name, dim in (("k_dim", call.k_dim), ("v_dim", call.v_dim)):
        if dim > 256:
            return f"{name} is {dim}; it takes up to 256"
    if call.page_size:
        return "it reads dense and ragged keys, not pages"
    return None


KERNELS = {
    "attention": Kernel(attention, supports, efficiency=0.45),
    "attention_varlen": Kernel(attention_varlen, supports, efficiency=0.45),
}
