"""Attention forward in portable Triton (FlashAttention-2, Dao 2023): dense and ragged.

Runs on every GPU that Triton supports, and in Triton's interpreter on a CPU (TRITON_INTERPRET=1
before the import; float16 and float32). A program takes one tile of query rows of one head; keys
are visited from first to last, masked only where a bound cuts the block. From compute capability
9.0 on, blocks that are seen whole are loaded by the copy engine.
"""
# mypy: disable-error-code="no-untyped-def"

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from rooftile.kernels import Kernel
from rooftile.kernels.triton.attention_tiles import LARGEST_DIM, Config, config_of
from rooftile.kernels.triton.descriptors import (
    describe,
    has_copy_engine,
    is_addressable,
    unit_stride,
)
from rooftile.kernels.triton.grid import grid_of, pair_id
from rooftile.kernels.triton.paged import paged_attention
from rooftile.kernels.triton.ragged_pages import follows_plan, lengths_and_table, pages_of
from rooftile.kernels.triton.refusal import refusal

_LOG2_E = 1.4426950408889634
UNBOUNDED = 2**30  # beyond every length


@dataclass(frozen=True)
class Mods:
    """Modifiers of scores and visibility: jitted functions, and the tensors that they capture."""

    score: Any = None
    score_tensors: tuple[Tensor, ...] = ()
    mask: Any = None
    mask_tensors: tuple[Tensor, ...] = ()


NO_MODS = Mods()


@triton.jit
def _scores(
    s,  # [rows, block], raw products
    batch,
    head,
    rows,  # [rows], indices in the sequence, of valid queries
    columns,  # [block]
    factor,
    softcap,
    score_captured,  # tuple of pointers
    has_softcap: tl.constexpr,
    score_mod: tl.constexpr,
):
    """Scores in log2 units where a modifier or a cap has to be applied to them."""
    if has_softcap:
        # softcap * log2 e * tanh(s * scale / softcap), from exp2
        s = softcap - 2.0 * softcap / (tl.exp2(s * (2.0 * 1.4426950408889634 * factor)) + 1.0)
    else:
        s = s * factor
    if score_mod is not None:
        s = s * 0.6931471805599453
        t = score_mod(s, batch, head, rows[:, None], columns[None, :], *score_captured)
        s = tl.broadcast_to(t.to(tl.float32), s.shape) * 1.4426950408889634
    return s


@triton.jit
def _visit(
    state,  # (o [rows, v_tile], maximum [rows] in log2 units, total [rows])
    begin,
    end,  # keys, begin a multiple of block
    q,  # [rows, k_tile]
    k,  # pointers to the sequence's first key, its head
    v,
    k_desc,  # descriptors [batch, heads, keys, dim], or None
    v_desc,
    k_stride,
    v_stride,
    k_batch,  # where the sequence begins in the descriptors
    k_head,
    k_start,
    batch,
    head,
    rows,  # [rows], indices of queries
    q_len,
    kv_len,
    left,
    right,
    factor,
    softcap,
    k_dim,
    v_dim,
    score_captured,
    mask_captured,
    k_tile: tl.constexpr,
    v_tile: tl.constexpr,
    block: tl.constexpr,
    by_descriptor: tl.constexpr,
    masked: tl.constexpr,
    has_left: tl.constexpr,
    has_right: tl.constexpr,
    has_softcap: tl.constexpr,
    exact_dims: tl.constexpr,
    precision: tl.constexpr,
    stages: tl.constexpr,
    score_mod: tl.constexpr,
    mask_mod: tl.constexpr,
):
    """Folds keys begin .. end - 1 into the state."""
    o, maximum, total = state
    column = tl.arange(0, block)
    k_column = tl.arange(0, k_tile)
    v_column = tl.arange(0, v_tile)
    for start in tl.range(begin, end, block, num_stages=stages):
        columns = start + column
        if by_descriptor:
            k_tile_ = k_desc.load([k_batch, k_head, k_start + start, 0]).reshape([block, k_tile]).T
        else:
            k_at = k + tl.cast(start, tl.int64) * k_stride
            k_at = k_at + k_column[:, None] + column.to(tl.int64)[None, :] * k_stride
            if masked or not exact_dims:
                inside = columns < kv_len
                k_tile_ = tl.load(
                    k_at, mask=inside[None, :] & (k_column[:, None] < k_dim), other=0.0
                )
            else:
                k_tile_ = tl.load(k_at)
        s = tl.dot(q, k_tile_, input_precision=precision)
        scaled: tl.constexpr = has_softcap or score_mod is not None
        index = tl.minimum(rows, q_len - 1)
        key = tl.minimum(columns, kv_len - 1) if masked else columns
        if scaled:
            s = _scores(
                s, batch, head, index, key, factor, softcap, score_captured, has_softcap, score_mod
            )
        if mask_mod is not None:
            seen = mask_mod(batch, head, index[:, None], key[None, :], *mask_captured)
            s = tl.where(seen, s, float("-inf"))
        if masked:
            # One comparison a side: the end of the keys is folded into the rows' own bounds.
            position = rows + (kv_len - q_len)
            last = position * 0 + (kv_len - 1)
            if has_right:
                last = tl.minimum(position + right, last)
            seen = columns[None, :] <= last[:, None]
            if has_left:
                seen = seen & (columns[None, :] >= (position - left)[:, None])
            s = tl.where(seen, s, float("-inf"))
        if scaled:
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
            v_tile_ = v_desc.load([k_batch, k_head, k_start + start, 0]).reshape([block, v_tile])
        else:
            v_at = v + tl.cast(start, tl.int64) * v_stride
            v_at = v_at + v_column[None, :] + column.to(tl.int64)[:, None] * v_stride
            if masked or not exact_dims:
                inside = columns < kv_len
                v_tile_ = tl.load(
                    v_at, mask=inside[:, None] & (v_column[None, :] < v_dim), other=0.0
                )
            else:
                v_tile_ = tl.load(v_at)
        o = tl.dot(p.to(v_tile_.dtype), v_tile_, o, input_precision=precision)
        maximum = new_maximum
    return o, maximum, total


@triton.jit
def _clear(
    out, lse, head, start, tokens, num_heads, v_dim, m, v_tile: tl.constexpr, rows: tl.constexpr
):
    """Tokens start .. tokens - 1 after the last sequence: there may be more than the grid has tiles for."""
    v_column = tl.arange(0, v_tile)
    zero = tl.zeros([rows, v_tile], out.dtype.element_ty)
    row = start + m * rows
    while row < tokens:
        token = (row + tl.arange(0, rows)).to(tl.int64)
        at = token * num_heads + head
        mask = (token < tokens)[:, None] & (v_column[None, :] < v_dim)
        tl.store(out + at[:, None] * v_dim + v_column[None, :], zero, mask)
        tl.store(lse + at, tl.full([rows], float("-inf"), tl.float32), mask=token < tokens)
        row += tl.num_programs(0) * rows


# Whatever a length can change, so that lengths never compile anything; `aligned` says of the strides
# what Triton would find out.
_UNSPECIALISED = [
    *("q_len", "kv_len", "left", "right", "group_size", "num_heads", "batch"),
    *(f"{x}_{stride}" for x in "qkv" for stride in ("batch_stride", "stride", "head_stride")),
]


@triton.jit(do_not_specialize=_UNSPECIALISED)
def attention_kernel(
    q,
    k,
    v,
    q_desc,  # of tensors as [batch, heads, length, dim] with boxes [1, 1, rows or block, tile]:
    k_desc,  # all or none; o_desc None where ragged
    v_desc,
    o_desc,
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
    score_captured,  # tuples of pointers
    mask_captured,
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
    aligned: tl.constexpr,
    precision: tl.constexpr,
    by_descriptor: tl.constexpr,
    stages: tl.constexpr,
    score_mod: tl.constexpr,
    mask_mod: tl.constexpr,
):
    """Program (tile, pair of head and sequence); where ragged, one more sequence is the padding."""
    if aligned:  # to multiples of 16 bytes, which the compiler sees from this
        q_batch_stride, q_stride = q_batch_stride // 8 * 8, q_stride // 8 * 8
        k_batch_stride, k_stride = k_batch_stride // 8 * 8, k_stride // 8 * 8
        v_batch_stride, v_stride = v_batch_stride // 8 * 8, v_stride // 8 * 8
        q_head_stride = q_head_stride // 8 * 8
        k_head_stride = k_head_stride // 8 * 8
        v_head_stride = v_head_stride // 8 * 8
    # The last tiles of a causal batch are the longest, so they go first.
    m = tl.num_programs(0) - 1 - tl.program_id(0)
    head, sequence = pair_id(num_heads, batch + 1 if ragged else batch)
    q_start = 0
    kv_start = 0
    at_batch = sequence
    out_start = sequence.to(tl.int64) * q_len
    if ragged:
        at_batch = 0
        q_start = tl.load(cu_seqlens_q + sequence).to(tl.int32)
        kv_start = tl.load(cu_seqlens_k + sequence).to(tl.int32)
        k += kv_start.to(tl.int64) * k_stride
        v += kv_start.to(tl.int64) * v_stride
        out_start = q_start.to(tl.int64)
        if sequence == batch:
            _clear(out, lse, head, q_start, q_len, num_heads, v_dim, m, v_tile, tile_rows)
            return
        q_len = tl.load(cu_seqlens_q + sequence + 1).to(tl.int32) - q_start
        kv_len = tl.load(cu_seqlens_k + sequence + 1).to(tl.int32) - kv_start
        q_batch_stride = 0
        k_batch_stride = 0
        v_batch_stride = 0
        if m * tile_rows >= q_len:
            return
    row0 = m * tile_rows
    rows = row0 + tl.arange(0, tile_rows)
    k_column = tl.arange(0, k_tile)
    v_column = tl.arange(0, v_tile)
    kv_head = head // group_size
    if by_descriptor:  # rows after the sequence's end may be anything: they are not stored
        q_tile = q_desc.load([at_batch, head, q_start + row0, 0]).reshape([tile_rows, k_tile])
    else:
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
    for part in tl.static_range(3):
        first = begin if part == 0 else low if part == 1 else high
        last = low if part == 0 else high if part == 1 else end
        if has_left or part > 0:
            state = _visit(
                state, first, last, q_tile, k_at, v_at, k_desc, v_desc, k_stride, v_stride,
                at_batch, kv_head, kv_start, sequence, head, rows, q_len, kv_len, left, right,
                factor, softcap, k_dim, v_dim, score_captured, mask_captured, k_tile, v_tile,
                block, by_descriptor and (part == 1 or not ragged), part != 1, has_left, has_right,
                has_softcap, exact_dims, precision, stages, score_mod, mask_mod,
            )  # fmt: skip
    o, maximum, total = state

    o = o / tl.where(total != 0, total, 1.0)[:, None]
    log_sum = tl.where(total != 0, (maximum + tl.log2(total)) * 0.6931471805599453, float("-inf"))
    token = (out_start + rows) * num_heads + head
    o = o.to(out.dtype.element_ty)
    if o_desc is not None:
        o_desc.store([at_batch, head, row0, 0], o.reshape([1, 1, tile_rows, v_tile]))
    else:
        out_mask = (rows < q_len)[:, None] & (v_column[None, :] < v_dim)
        tl.store(out + token[:, None] * v_dim + v_column[None, :], o, out_mask)
    tl.store(lse + token, log_sum, mask=rows < q_len)


def attention(
    q: Tensor,  # [batch, q_len, num_q_heads, k_dim]
    k: Tensor,  # [batch, kv_len, num_kv_heads, k_dim]
    v: Tensor,  # [batch, kv_len, num_kv_heads, v_dim]
    sink: Tensor | None,  # [num_q_heads]
    left: int,
    right: int,
    softcap: float,
    scale: float,
    mods: Mods = NO_MODS,
    config: Config | None = None,
) -> tuple[Tensor, Tensor]:  # [batch, q_len, num_q_heads, v_dim], [batch, q_len, num_q_heads]
    out, lse = _outputs(q, v)
    options = (sink, left, right, softcap, scale, mods, config)
    _launch(q, k, v, out, lse, None, q.shape[1], *options)
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
    mods: Mods = NO_MODS,
    config: Config | None = None,
) -> tuple[Tensor, Tensor]:  # [tokens_q, num_q_heads, v_dim], [tokens_q, num_q_heads]
    if mods is NO_MODS and config is None:
        group_size = q.shape[1] // k.shape[1]
        if follows_plan(k, v, max_q_len, max_kv_len, group_size):
            kv_lens, table = lengths_and_table(cu_seqlens_k, max_kv_len)
            scales_and_plan: tuple[Any, ...] = (None, None, False, None, [])
            return paged_attention(
                *(q, pages_of(k), pages_of(v), cu_seqlens_q, kv_lens, table, max_q_len, max_kv_len),
                *(sink, left, right, softcap, scale, *scales_and_plan),
            )
    out, lse = _outputs(q, v)
    options = (sink, left, right, softcap, scale, mods, config)
    cu = (cu_seqlens_q, cu_seqlens_k)
    _launch(q[None], k[None], v[None], out, lse, cu, max_q_len, *options)
    return out, lse


def _outputs(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    out = q.new_empty(*q.shape[:-1], v.shape[-1])
    return out, q.new_empty(q.shape[:-1], dtype=torch.float32)


def _positive_scale(q: Tensor, scale: float) -> tuple[Tensor, float]:
    """The row maximum is taken of raw scores, which needs a positive scale."""
    if scale > 0:
        return q, scale
    return (-q, -scale) if scale < 0 else (q * 0, 1.0)


def _launch(
    q: Tensor,  # [batch, q_len, num_q_heads, k_dim]; batch 1 and all tokens where ragged
    k: Tensor,  # [batch, kv_len, num_kv_heads, k_dim]
    v: Tensor,  # [batch, kv_len, num_kv_heads, v_dim]
    out: Tensor,
    lse: Tensor,
    cu_seqlens: tuple[Tensor, Tensor] | None,  # [sequences + 1], of queries and of keys
    most_rows: int,  # of a sequence
    sink: Tensor | None,
    left: int,
    right: int,
    softcap: float,
    scale: float,
    mods: Mods,
    config: Config | None,
) -> None:
    if lse.numel() == 0:
        return
    q, scale = _positive_scale(q, scale)
    q, k, v = (unit_stride(x) for x in (q, k, v))
    num_heads, k_dim, v_dim = q.shape[-2], q.shape[-1], v.shape[-1]
    k_tile, v_tile = (max(16, triton.next_power_of_2(n)) for n in (k_dim, v_dim))
    config = config or config_of(max(k_tile, v_tile), q.element_size(), most_rows, right >= 0)
    batch = q.shape[0] if cu_seqlens is None else cu_seqlens[0].shape[0] - 1
    sequences = batch if cu_seqlens is None else batch + 1
    grid = grid_of(max(triton.cdiv(most_rows, config.tile_rows), 1), num_heads * sequences)
    by_descriptor = has_copy_engine(q.device) and all(map(is_addressable, (q, k, v)))
    descriptors: tuple[Any, ...] = (None,) * 4
    if by_descriptor:
        boxes = (
            (q, config.tile_rows, k_tile),
            (k, config.block, k_tile),
            (v, config.block, v_tile),
        )
        stored = None
        if cu_seqlens is None and is_addressable(out):
            stored = describe(out, config.tile_rows, v_tile)
        descriptors = (*(describe(*box) for box in boxes), stored)
    with torch.cuda.device(q.device) if q.is_cuda else nullcontext():
        attention_kernel[grid](
            *(q, k, v),
            *descriptors,
            *(out, lse, lse if sink is None else sink.float()),
            *(cu_seqlens or (lse, lse)),
            *(stride for x in (q, k, v) for stride in x.stride()[:3]),
            batch,
            num_heads,
            num_heads // k.shape[-2],
            q.shape[1],
            k.shape[1],
            min(left, UNBOUNDED),
            min(right, UNBOUNDED),
            scale / softcap if softcap else scale * _LOG2_E,
            softcap * _LOG2_E,
            k_dim,
            v_dim,
            mods.score_tensors,
            mods.mask_tensors,
            k_tile=k_tile,
            v_tile=v_tile,
            tile_rows=config.tile_rows,
            block=config.block,
            ragged=cu_seqlens is not None,
            has_left=left >= 0,
            has_right=right >= 0,
            has_softcap=softcap != 0,
            has_sink=sink is not None,
            exact_dims=k_dim == k_tile and v_dim == v_tile,
            aligned=all(stride % 8 == 0 for x in (q, k, v) for stride in x.stride()[:3]),
            precision="ieee",
            by_descriptor=by_descriptor,
            stages=config.num_stages,
            score_mod=mods.score,
            mask_mod=mods.mask,
            num_warps=config.num_warps,
            num_stages=config.num_stages,
        )


def supports(call: Any) -> str | None:
    reason = refusal(call)
    if reason is not None:
        return reason
    for name, dim in (("k_dim", call.k_dim), ("v_dim", call.v_dim)):
        if dim > LARGEST_DIM:
            return f"{name} is {dim}; it takes up to {LARGEST_DIM}"
    if call.page_size:
        return "it reads dense and ragged keys, not pages"
    return None


KERNELS = {
    "attention": Kernel(attention, supports, efficiency=0.45),
    "attention_varlen": Kernel(attention_varlen, supports, efficiency=0.45),
}
