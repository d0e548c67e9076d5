"""Differential attention forward in portable Triton: two online softmaxes, one stream of values.

A program takes a tile of query rows of one pair. Both keys and the value of a token are loaded once
and meet both queries; where the queries share their keys, one key. Two outputs of more than 128
numbers a row do not fit the registers (H200, d128: twice the time of two plain calls), so there the
calls are two. Over pages, a slot's two keys are
one long key to plain attention, whose queries are filled up with zeros: memory binds there, and
plans, splits and merges are those of plain attention.
"""
# mypy: disable-error-code="no-untyped-def"

from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from rooftile.kernels import Kernel
from rooftile.kernels.torch.differential import over_pages
from rooftile.kernels.triton import attention as plain
from rooftile.kernels.triton import paged
from rooftile.kernels.triton.descriptors import (
    describe,
    has_copy_engine,
    is_addressable,
    unit_stride,
)
from rooftile.kernels.triton.grid import grid_of, pair_id, second_id
from rooftile.kernels.triton.interpreter import INTERPRETED
from rooftile.kernels.triton.pointwise import early, overlap
from rooftile.kernels.triton.refusal import refusal

Outputs = tuple[Tensor, Tensor, Tensor]
LOG2_E = 1.4426950408889634
UNBOUNDED = 2**30  # beyond every length
WIDEST = 128  # values, of which two outputs fit the registers


@triton.jit
def _step(s, state, factor):
    """The online softmax of scores s [rows, block]: weights, and the state with o scaled."""
    o, maximum, total = state
    # One multiplication and addition an element: the factor is positive.
    new_maximum = tl.maximum(maximum, tl.max(s, 1) * factor)
    p = tl.exp2(s * factor - new_maximum[:, None])
    alpha = tl.exp2(maximum - new_maximum)
    return p, (o * alpha[:, None], new_maximum, total * alpha + tl.sum(p, 1))


@triton.jit
def _load_key(desc, at, at_batch, head, row, inside, by_descriptor: tl.constexpr,
              masked: tl.constexpr, block: tl.constexpr, tile: tl.constexpr):  # fmt: skip
    if by_descriptor:
        return desc.load([at_batch, head, row, 0]).reshape([block, tile])
    if masked:
        return tl.load(at, mask=inside, other=0.0)
    return tl.load(at)


@triton.jit
def _fold(
    first,  # states (o [rows, v_tile], maximum [rows] in log2 units, total [rows])
    second,
    begin,
    end,  # keys, begin a multiple of block
    q1,  # [rows, k_tile]
    q2,
    k1,  # pointers to the sequence's first key, its head
    k2,
    v,
    k1_desc,  # descriptors [batch, heads, keys, dim], or None
    k2_desc,
    v_desc,
    k1_stride,
    k2_stride,
    v_stride,
    at_batch,  # where the sequence begins in the descriptors
    kv_head,
    kv_start,
    low,  # [rows], what a row sees: keys low .. high
    high,
    kv_len,
    factor,
    k_dim,
    v_dim,
    k_tile: tl.constexpr,
    v_tile: tl.constexpr,
    block: tl.constexpr,
    by_descriptor: tl.constexpr,
    masked: tl.constexpr,
    shared_keys: tl.constexpr,
    exact_dims: tl.constexpr,
    stages: tl.constexpr,
):
    """Folds keys begin .. end - 1 into both states."""
    column = tl.arange(0, block)
    k_column = tl.arange(0, k_tile)
    v_column = tl.arange(0, v_tile)
    careful: tl.constexpr = masked or not exact_dims
    for start in tl.range(begin, end, block, num_stages=stages):
        columns = start + column
        inside = (columns < kv_len)[:, None]
        seen = (columns[None, :] >= low[:, None]) & (columns[None, :] <= high[:, None])
        at = (tl.cast(start, tl.int64) + column)[:, None]
        k_inside = inside & (k_column < k_dim)[None, :]
        key = _load_key(
            k1_desc, k1 + at * k1_stride + k_column[None, :], at_batch, kv_head, kv_start + start,
            k_inside, by_descriptor, careful, block, k_tile,
        )  # fmt: skip
        s1 = tl.dot(q1, tl.trans(key), input_precision="ieee")
        if not shared_keys:
            key = _load_key(
                k2_desc, k2 + at * k2_stride + k_column[None, :], at_batch, kv_head,
                kv_start + start, k_inside, by_descriptor, careful, block, k_tile,
            )  # fmt: skip
        s2 = tl.dot(q2, tl.trans(key), input_precision="ieee")
        if masked:
            s1 = tl.where(seen, s1, float("-inf"))
            s2 = tl.where(seen, s2, float("-inf"))
        p1, first = _step(s1, first, factor)
        p2, second = _step(s2, second, factor)
        value = _load_key(
            v_desc, v + at * v_stride + v_column[None, :], at_batch, kv_head, kv_start + start,
            inside & (v_column < v_dim)[None, :], by_descriptor, careful, block, v_tile,
        )  # fmt: skip
        o1, maximum1, total1 = first
        o2, maximum2, total2 = second
        o1 = tl.dot(p1.to(value.dtype), value, o1, input_precision="ieee")
        o2 = tl.dot(p2.to(value.dtype), value, o2, input_precision="ieee")
        first = (o1, maximum1, total1)
        second = (o2, maximum2, total2)
    return first, second


@triton.jit
def _finish(state):
    """The output and lse of a state."""
    o, maximum, total = state
    log_sum = tl.where(total != 0, (maximum + tl.log2(total)) * 0.6931471805599453, float("-inf"))
    return o / tl.where(total != 0, total, 1.0)[:, None], log_sum


_UNSPECIALISED = ["q_len", "kv_len", "left", "right", "group_size", "num_pairs", "batch"]


@triton.jit(do_not_specialize=_UNSPECIALISED)
def differential_kernel(
    q1,
    q2,
    k1,
    k2,
    v,
    k1_desc,
    k2_desc,
    v_desc,
    lam,
    out,
    lse1,
    lse2,
    cu_seqlens_q,
    cu_seqlens_k,
    q1_batch_stride,
    q1_stride,
    q1_head_stride,
    q2_batch_stride,
    q2_stride,
    q2_head_stride,
    k1_batch_stride,
    k1_stride,
    k1_head_stride,
    k2_batch_stride,
    k2_stride,
    k2_head_stride,
    v_batch_stride,
    v_stride,
    v_head_stride,
    lam_batch_stride,
    lam_stride,
    lam_head_stride,
    batch,
    num_pairs,
    group_size,
    q_len,  # of each sequence; tokens of all where ragged
    kv_len,
    left,
    right,
    factor,
    k_dim,
    v_dim,
    k_tile: tl.constexpr,
    v_tile: tl.constexpr,
    tile_rows: tl.constexpr,
    block: tl.constexpr,
    ragged: tl.constexpr,
    has_left: tl.constexpr,
    has_right: tl.constexpr,
    shared_keys: tl.constexpr,
    exact_dims: tl.constexpr,
    by_descriptor: tl.constexpr,
    stages: tl.constexpr,
):
    """Program (tile, one of pairs and sequences); where ragged, one more sequence is the padding."""
    # The last tiles of a causal batch are the longest, so they go first.
    m = tl.num_programs(0) - 1 - tl.program_id(0)
    pair, sequence = pair_id(num_pairs, batch + 1 if ragged else batch)
    q_start = 0
    kv_start = 0
    at_batch = sequence
    at_lam = sequence.to(tl.int64) * lam_batch_stride
    out_start = sequence.to(tl.int64) * q_len
    lane = tl.arange(0, tile_rows)
    v_column = tl.arange(0, v_tile)
    if ragged:
        at_batch = 0
        at_lam = at_lam * 0
        q_start = tl.load(cu_seqlens_q + sequence).to(tl.int32)
        if sequence == batch:
            # Tokens after the last sequence: there may be more than the grid has tiles for.
            for row in range(q_start + m * tile_rows, q_len, tl.num_programs(0) * tile_rows):
                token = (row + lane).to(tl.int64)
                at = token * num_pairs + pair
                mask = (token < q_len)[:, None] & (v_column < v_dim)[None, :]
                zero = tl.zeros([tile_rows, v_tile], out.dtype.element_ty)
                nothing = tl.full([tile_rows], float("-inf"), tl.float32)
                tl.store(out + at[:, None] * v_dim + v_column[None, :], zero, mask)
                tl.store(lse1 + at, nothing, token < q_len)
                tl.store(lse2 + at, nothing, token < q_len)
            return
        kv_start = tl.load(cu_seqlens_k + sequence).to(tl.int32)
        k1 += kv_start.to(tl.int64) * k1_stride
        k2 += kv_start.to(tl.int64) * k2_stride
        v += kv_start.to(tl.int64) * v_stride
        out_start = q_start.to(tl.int64)
        q_len = tl.load(cu_seqlens_q + sequence + 1).to(tl.int32) - q_start
        kv_len = tl.load(cu_seqlens_k + sequence + 1).to(tl.int32) - kv_start
        q1_batch_stride = 0
        q2_batch_stride = 0
        k1_batch_stride = 0
        k2_batch_stride = 0
        v_batch_stride = 0
        if m * tile_rows >= q_len:
            return
    row0 = m * tile_rows
    rows = row0 + lane
    k_column = tl.arange(0, k_tile)
    kv_head = (pair // group_size).to(tl.int64)
    number = sequence.to(tl.int64)
    q_mask = (rows < q_len)[:, None] & (k_column < k_dim)[None, :]
    token = (q_start + rows).to(tl.int64)[:, None]
    q1_at = q1 + number * q1_batch_stride + pair.to(tl.int64) * q1_head_stride
    q2_at = q2 + number * q2_batch_stride + pair.to(tl.int64) * q2_head_stride
    q1_tile = tl.load(q1_at + token * q1_stride + k_column[None, :], mask=q_mask, other=0.0)
    q2_tile = tl.load(q2_at + token * q2_stride + k_column[None, :], mask=q_mask, other=0.0)
    k1 += number * k1_batch_stride + kv_head * k1_head_stride
    k2 += number * k2_batch_stride + kv_head * k2_head_stride
    v += number * v_batch_stride + kv_head * v_head_stride

    # Blocks low .. high are seen whole by every row of the tile.
    offset = kv_len - q_len
    begin = 0
    end = kv_len
    low = 0
    high = kv_len
    row_low = rows * 0
    row_high = rows * 0 + (kv_len - 1)
    if has_right:
        end = tl.minimum(end, tl.minimum(row0 + tile_rows, q_len) + offset + right)
        high = tl.minimum(high, row0 + offset + right + 1)
        row_high = tl.minimum(rows + offset + right, row_high)
    if has_left:
        begin = tl.maximum(row0 + offset - left, 0) // block * block
        low = tl.maximum(row0 + tile_rows - 1 + offset - left, 0)
        low = (low + block - 1) // block * block
        row_low = rows + offset - left
    high = tl.maximum(high, 0) // block * block
    low = tl.maximum(tl.minimum(low, end), begin)
    high = tl.minimum(tl.maximum(high, low), end)
    first = (
        tl.zeros([tile_rows, v_tile], tl.float32),
        tl.full([tile_rows], -1.0e30, tl.float32),
        tl.zeros([tile_rows], tl.float32),
    )
    second = first
    for part in tl.static_range(3):
        from_key = begin if part == 0 else low if part == 1 else high
        to_key = low if part == 0 else high if part == 1 else end
        if has_left or part > 0:
            first, second = _fold(
                first, second, from_key, to_key, q1_tile, q2_tile, k1, k2, v, k1_desc, k2_desc,
                v_desc, k1_stride, k2_stride, v_stride, at_batch, pair // group_size, kv_start,
                row_low, row_high, kv_len, factor, k_dim, v_dim, k_tile, v_tile, block,
                by_descriptor and (part == 1 or not ragged), part != 1, shared_keys, exact_dims,
                stages,
            )  # fmt: skip
    o1, log_sum1 = _finish(first)
    o2, log_sum2 = _finish(second)
    at_lam += pair.to(tl.int64) * lam_head_stride
    # Nothing is known of the lam of a query that sees nothing: it may be NaN.
    has_share = (rows < q_len) & (log_sum2 > float("-inf"))
    share = tl.load(lam + at_lam + (q_start + rows).to(tl.int64) * lam_stride, has_share, 0.0)
    o = o1 - share.to(tl.float32)[:, None] * o2
    at = (out_start + rows) * num_pairs + pair
    out_mask = (rows < q_len)[:, None] & (v_column < v_dim)[None, :]
    tl.store(out + at[:, None] * v_dim + v_column[None, :], o.to(out.dtype.element_ty), out_mask)
    tl.store(lse1 + at, log_sum1, mask=rows < q_len)
    tl.store(lse2 + at, log_sum2, mask=rows < q_len)


@dataclass(frozen=True)
class Config:
    tile_rows: int
    block: int
    num_warps: int
    num_stages: int


@cache
def config_of(v_tile: int, itemsize: int) -> Config:
    """Two outputs [tile_rows, v_tile] in float32 must fit the registers of a CTA."""
    if INTERPRETED:
        return Config(32, 32, 4, 1)
    if itemsize == 4:
        return Config(32, 32, 4, 2)
    return Config(64, 64, 4, 2) if v_tile <= 128 else Config(64, 32, 8, 2)


def differential_attention(
    q1: Tensor,  # [batch, q_len, num_q_pairs, k_dim]
    k1: Tensor,  # [batch, kv_len, num_kv_pairs, k_dim]
    q2: Tensor,  # [batch, q_len, num_q_pairs, k_dim]
    k2: Tensor | None,  # [batch, kv_len, num_kv_pairs, k_dim]; None: k1
    v: Tensor,  # [batch, kv_len, num_kv_pairs, v_dim]
    lam: Tensor,  # [num_q_pairs] or [batch, q_len, num_q_pairs]
    left: int,
    right: int,
    scale: float,
    config: Config | None = None,
) -> Outputs:  # [batch, q_len, num_q_pairs, v_dim], [batch, q_len, num_q_pairs] twice
    if v.shape[-1] > WIDEST and config is None:
        options = (None, left, right, 0.0, scale)
        first = plain.attention(q1, k1, v, *options)
        return _difference(first, plain.attention(q2, k1 if k2 is None else k2, v, *options), lam)
    share = lam.expand(q1.shape[:-1])
    return _launch(q1, k1, q2, k2, v, share, None, q1.shape[1], left, right, scale, config)


def differential_attention_varlen(
    q1: Tensor,  # [tokens_q, num_q_pairs, k_dim]
    k1: Tensor,  # [tokens_k, num_kv_pairs, k_dim]
    q2: Tensor,  # [tokens_q, num_q_pairs, k_dim]
    k2: Tensor | None,  # [tokens_k, num_kv_pairs, k_dim]; None: k1
    v: Tensor,  # [tokens_k, num_kv_pairs, v_dim]
    lam: Tensor,  # [num_q_pairs] or [tokens_q, num_q_pairs]
    cu_seqlens_q: Tensor,  # [batch + 1]
    cu_seqlens_k: Tensor,  # [batch + 1]
    max_q_len: int,
    max_kv_len: int,
    left: int,
    right: int,
    scale: float,
) -> Outputs:  # [tokens_q, num_q_pairs, v_dim], [tokens_q, num_q_pairs] twice
    if v.shape[-1] > WIDEST:
        options = (cu_seqlens_q, cu_seqlens_k, max_q_len, max_kv_len, None, left, right, 0.0, scale)
        first = plain.attention_varlen(q1, k1, v, *options)
        other = plain.attention_varlen(q2, k1 if k2 is None else k2, v, *options)
        return _difference(first, other, lam)
    second = None if k2 is None else k2[None]
    share = lam.expand(q1.shape[:-1])[None]
    cu = (cu_seqlens_q, cu_seqlens_k)
    results = _launch(
        q1[None], k1[None], q2[None], second, v[None], share, cu, max_q_len, left, right, scale, None
    )  # fmt: skip
    return results[0][0], results[1][0], results[2][0]


def _difference(
    first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor], lam: Tensor
) -> Outputs:
    """Of out and lse of both queries."""
    # Nothing is known of a padding token's lam, which may be NaN.
    share = lam if lam.dim() == 1 else lam.masked_fill(second[1] == -torch.inf, 0)
    wide = torch.addcmul(first[0].float(), share.float()[..., None], second[0].float(), value=-1)
    return wide.to(first[0].dtype), first[1], second[1]


def _launch(
    q1: Tensor,
    k1: Tensor,
    q2: Tensor,
    k2: Tensor | None,
    v: Tensor,
    lam: Tensor,  # [batch, q_len, num_q_pairs]
    cu_seqlens: tuple[Tensor, Tensor] | None,  # ragged: one batch of all tokens
    most_rows: int,  # of a sequence
    left: int,
    right: int,
    scale: float,
    config: Config | None,
) -> Outputs:
    out = q1.new_empty(*q1.shape[:-1], v.shape[-1])
    lse1, lse2 = (q1.new_empty(q1.shape[:-1], dtype=torch.float32) for _ in range(2))
    if lse1.numel() == 0:
        return out, lse1, lse2
    if scale <= 0:  # the row maximum is taken of raw scores
        sign = -1 if scale < 0 else 0
        q1, q2, scale = q1 * sign, q2 * sign, -scale or 1.0
    shared_keys = k2 is None
    keys = unit_stride(k1)
    q1, q2, v = unit_stride(q1), unit_stride(q2), unit_stride(v)
    others = keys if k2 is None else unit_stride(k2)
    num_pairs, k_dim, v_dim = q1.shape[2], q1.shape[3], v.shape[3]
    k_tile, v_tile = (max(16, triton.next_power_of_2(n)) for n in (k_dim, v_dim))
    config = config or config_of(v_tile, q1.element_size())
    batch = q1.shape[0] if cu_seqlens is None else cu_seqlens[0].shape[0] - 1
    sequences = batch if cu_seqlens is None else batch + 1
    grid = grid_of(max(triton.cdiv(most_rows, config.tile_rows), 1), num_pairs * sequences)
    by_descriptor = has_copy_engine(q1.device) and all(map(is_addressable, (keys, others, v)))
    descriptors: tuple[Any, ...] = (None,) * 3
    if by_descriptor:
        boxes = ((keys, k_tile), (others, k_tile), (v, v_tile))
        descriptors = tuple(describe(x, config.block, tile) for x, tile in boxes)
    with torch.cuda.device(q1.device) if q1.is_cuda else nullcontext():
        differential_kernel[grid](
            *(q1, q2, keys, others, v, *descriptors, lam, out, lse1, lse2),
            *(cu_seqlens or (lse1, lse1)),
            *(stride for x in (q1, q2, keys, others, v) for stride in x.stride()[:3]),
            *lam.stride(),
            batch,
            num_pairs,
            num_pairs // k1.shape[2],
            q1.shape[1],
            k1.shape[1],
            min(left, UNBOUNDED),
            min(right, UNBOUNDED),
            scale * LOG2_E,
            k_dim,
            v_dim,
            k_tile=k_tile,
            v_tile=v_tile,
            tile_rows=config.tile_rows,
            block=config.block,
            ragged=cu_seqlens is not None,
            has_left=left >= 0,
            has_right=right >= 0,
            shared_keys=shared_keys,
            exact_dims=k_dim == k_tile and v_dim == v_tile,
            by_descriptor=by_descriptor,
            stages=config.num_stages,
            num_warps=config.num_warps,
            num_stages=config.num_stages,
        )
    return out, lse1, lse2


@triton.jit(do_not_specialize=["num_pairs"])
def _stack_kernel(
    q1,
    q2,
    out,  # [tokens, 2 * pairs, width], the two queries of a pair adjacent
    q1_stride,
    q1_pair_stride,
    q2_stride,
    q2_pair_stride,
    num_pairs,
    k_dim,
    width,  # k_dim, or 2 * k_dim: each query then stands in its own half, zeros in the other
    pairs_tile: tl.constexpr,
    width_tile: tl.constexpr,
    overlapped: tl.constexpr,
):
    """Program (token, tile of pairs)."""
    early(overlapped)
    token = tl.program_id(0).to(tl.int64)
    pair = second_id() * pairs_tile + tl.arange(0, pairs_tile)[:, None]
    column = tl.arange(0, width_tile)[None, :]
    present = pair < num_pairs
    at1 = q1 + token * q1_stride + pair.to(tl.int64) * q1_pair_stride + column
    first = tl.load(at1, mask=present & (column < k_dim), other=0.0)
    begins = width - k_dim
    at2 = q2 + token * q2_stride + pair.to(tl.int64) * q2_pair_stride + (column - begins)
    second = tl.load(at2, mask=present & (column >= begins) & (column < width), other=0.0)
    to = out + (token * num_pairs + pair) * 2 * width + column
    inside = present & (column < width)
    tl.store(to, first, mask=inside)
    tl.store(to + width, second, mask=inside)


def stack_queries(q1: Tensor, q2: Tensor, shared_keys: bool) -> Tensor:
    """[tokens, pairs, k_dim] both -> [tokens, 2 * pairs, k_dim or 2 * k_dim], as the torch family's."""
    tokens, num_pairs, k_dim = q1.shape
    width = k_dim if shared_keys else 2 * k_dim
    stacked = q1.new_empty(tokens, 2 * num_pairs, width)
    if stacked.numel() == 0:
        return stacked
    q1, q2 = unit_stride(q1), unit_stride(q2)
    width_tile = triton.next_power_of_2(width)
    pairs_tile = max(1, min(triton.next_power_of_2(num_pairs), 2048 // width_tile))
    with torch.cuda.device(q1.device) if q1.is_cuda else nullcontext():
        _stack_kernel[grid_of(tokens, triton.cdiv(num_pairs, pairs_tile))](
            *(q1, q2, stacked, *q1.stride()[:2], *q2.stride()[:2], num_pairs, k_dim, width),
            pairs_tile=pairs_tile,
            width_tile=width_tile,
            **overlap(q1),
        )
    return stacked


@triton.jit(do_not_specialize=["num_pairs"])
def _subtract_kernel(
    stacked,  # [tokens, 2 * pairs, v_dim]
    stacked_lse,  # [tokens, 2 * pairs]
    lam,
    out,
    lse1,
    lse2,
    lam_stride,
    lam_head_stride,
    num_pairs,
    v_dim,
    v_tile: tl.constexpr,
    overlapped: tl.constexpr,
):
    """Program token * num_pairs + pair: tokens may be more than a grid's second axis holds."""
    early(overlapped)
    program = tl.program_id(0)
    token, pair = (program // num_pairs).to(tl.int64), program % num_pairs
    at = program.to(tl.int64)
    column = tl.arange(0, v_tile)
    inside = column < v_dim
    first = tl.load(stacked + 2 * at * v_dim + column, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(stacked + (2 * at + 1) * v_dim + column, mask=inside, other=0.0)
    log_sum2 = tl.load(stacked_lse + 2 * at + 1)
    # Nothing is known of a padding token's lam, which may be NaN.
    share = tl.load(lam + token * lam_stride + pair * lam_head_stride).to(tl.float32)
    share = tl.where(log_sum2 > float("-inf"), share, 0.0)
    o = first - share * second.to(tl.float32)
    tl.store(out + at * v_dim + column, o.to(out.dtype.element_ty), mask=inside)
    tl.store(lse1 + at, tl.load(stacked_lse + 2 * at))
    tl.store(lse2 + at, log_sum2)


def subtract(stacked: Tensor, stacked_lse: Tensor, lam: Tensor) -> Outputs:
    """stacked [..., 2 * pairs, v_dim], stacked_lse [..., 2 * pairs], lam [pairs] or [..., pairs]."""
    *leading, heads, v_dim = stacked.shape
    out = stacked.new_empty(*leading, heads // 2, v_dim)
    lse1, lse2 = (stacked_lse.new_empty(*leading, heads // 2) for _ in range(2))
    if lse1.numel() == 0:
        return out, lse1, lse2
    tokens = lse1.numel() // (heads // 2)
    share = lam.expand(tokens, -1) if lam.dim() == 1 else lam.reshape(tokens, -1)
    with torch.cuda.device(stacked.device) if stacked.is_cuda else nullcontext():
        _subtract_kernel[(lse1.numel(),)](
            *(stacked, stacked_lse, share, out, lse1, lse2, *share.stride()),
            heads // 2,
            v_dim,
            v_tile=triton.next_power_of_2(v_dim),
            num_warps=1 if v_dim <= 128 else 2,
            **overlap(stacked),
        )
    return out, lse1, lse2


paged_differential_attention = over_pages(paged.paged_attention, subtract, stack_queries)


def supports(call: Any) -> str | None:
    reason = refusal(call)
    if reason is not None:
        return reason
    for name, dim in (("k_dim", call.k_dim), ("v_dim", call.v_dim)):
        if dim > 256:
            return f"{name} is {dim}; it takes up to 256"
    return None


KERNELS = {
    "differential_attention": Kernel(differential_attention, supports, efficiency=0.45),
    "differential_attention_varlen": Kernel(
        differential_attention_varlen, supports, efficiency=0.45
    ),
    "paged_differential_attention": Kernel(paged_differential_attention, supports, efficiency=0.5),
}
