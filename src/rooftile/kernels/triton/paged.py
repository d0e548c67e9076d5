"""Paged attention in portable Triton: prefill, decode and any mixture, after one plan.

Each program runs its items of the plan (planning/split_kv.py) one after the other: packed query rows
against KV tiles whose pages are looked up key by key, so that any page size goes; a second kernel
merges the strips that were split. Runs on every GPU that Triton supports and in its interpreter.
"""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from rooftile.kernels import Kernel
from rooftile.kernels.triton.append import append_kv, append_supports
from rooftile.kernels.triton.interpreter import INTERPRETED
from rooftile.kernels.triton.merge import merge_parts, merge_shared
from rooftile.kernels.triton.refusal import refusal
from rooftile.kernels.triton.split_kv import ITEM_WORDS, largest_power, split_kv
from rooftile.planning.split_cost import ITEM_CLOCKS, LEAST_SAVED, tile_clocks
from rooftile.planning.split_kv import Layout
from rooftile.types import SplitSpec

LOG2_E = 1.4426950408889634
UNBOUNDED = 2**30  # beyond every length
LATENT_DIM = 576  # largest k_dim, and 512 of v: multi-head latent attention
PIECE_TOKENS = 4096  # where batch-invariant splits fall


@triton.jit
def _visit(
    state,  # (o [rows, v_tile], maximum [rows], total [rows])
    begin,
    end,  # keys, begin a multiple of block
    q_main,  # [rows, main_dim]
    q_rest,  # [rows, rest_tile]
    table,  # the request's row of the page table
    k,  # its kv head in page 0
    v,
    k_page_stride,
    k_slot_stride,
    k_dim_stride,
    v_page_stride,
    v_slot_stride,
    v_dim_stride,
    positions,  # [rows] of the queries
    drafts,  # [rows] a bit for each of the request's query tokens, where has_tree
    q_len,
    first_key,
    kv_len,
    left,
    right,
    factor,
    softcap,
    k_dim,
    v_dim,
    main_dim: tl.constexpr,
    rest_tile: tl.constexpr,
    v_tile: tl.constexpr,
    page_size: tl.constexpr,
    block: tl.constexpr,
    masked: tl.constexpr,
    has_left: tl.constexpr,
    has_right: tl.constexpr,
    has_softcap: tl.constexpr,
    has_tree: tl.constexpr,
    latent: tl.constexpr,
    exact_k: tl.constexpr,
    exact_v: tl.constexpr,
):
    """Folds keys begin .. end - 1 into the state."""
    o, maximum, total = state
    main = tl.arange(0, main_dim)
    v_column = tl.arange(0, v_tile)
    for start in tl.range(begin, end, block):
        keys = start + tl.arange(0, block)
        present = (keys >= first_key) & (keys < kv_len)
        if masked:
            page = tl.load(table + keys // page_size, mask=present, other=0).to(tl.int64)
        else:
            page = tl.load(table + keys // page_size).to(tl.int64)
        slot = keys % page_size
        k_at = k + (page * k_page_stride + slot * k_slot_stride)[:, None]
        if masked or not exact_k:
            wanted = (main < k_dim)[None, :]
            if masked:
                wanted = wanted & present[:, None]
            k_main = tl.load(k_at + main[None, :] * k_dim_stride, mask=wanted, other=0.0)
        else:
            k_main = tl.load(k_at + main[None, :] * k_dim_stride)
        k_main = k_main.to(q_main.dtype)
        s = tl.dot(q_main, tl.trans(k_main), input_precision="ieee")
        if rest_tile > 0:
            rest = main_dim + tl.arange(0, rest_tile)
            k_rest = tl.load(
                k_at + rest[None, :] * k_dim_stride,
                mask=present[:, None] & (rest < k_dim)[None, :],
                other=0.0,
            ).to(q_main.dtype)
            s = tl.dot(q_rest, tl.trans(k_rest), s, input_precision="ieee")
        if has_softcap:
            # softcap * log2 e * tanh(s * scale / softcap), from exp2
            s = softcap - 2.0 * softcap / (tl.exp2(s * (2.0 * 1.4426950408889634 * factor)) + 1.0)
        else:
            s = s * factor
        if masked:
            seen = (keys < kv_len)[None, :]
            if has_tree:
                drafted = keys - (kv_len - q_len)
                named = (drafts[:, None] >> tl.maximum(drafted, 0)[None, :].to(tl.int64)) & 1
                seen = seen & ((drafted < 0)[None, :] | (named != 0))
            if has_right:
                seen = seen & (keys[None, :] <= positions[:, None] + right)
            if has_left:
                seen = seen & (keys[None, :] >= positions[:, None] - left)
            s = tl.where(seen, s, float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(s, 1))
        p = tl.exp2(s - new_maximum[:, None])
        alpha = tl.exp2(maximum - new_maximum)
        total = total * alpha + tl.sum(p, 1)
        if latent:
            values = k_main  # the first dims of a key are its value
        else:
            v_at = v + (page * v_page_stride + slot * v_slot_stride)[:, None]
            v_at += v_column[None, :] * v_dim_stride
            if masked or not exact_v:
                wanted = (v_column < v_dim)[None, :]
                if masked:
                    wanted = wanted & present[:, None]
                values = tl.load(v_at, mask=wanted, other=0.0)
            else:
                values = tl.load(v_at)
            values = values.to(q_main.dtype)
        o = tl.dot(p.to(values.dtype), values, o * alpha[:, None], input_precision="ieee")
        maximum = new_maximum
    return o, maximum, total


@triton.jit
def store_item(
    o,  # [rows, v_tile], normalised
    log_sum,  # [rows]
    out,
    lse,
    partial_out,
    partial_lse,
    partial_row,  # of the item's first row in the partial buffers; negative: the output itself
    lane,  # [rows], 0, 1, ...
    valid,  # [rows]
    q_begin,
    token,  # [rows], of the request
    head,  # [rows]
    num_heads,
    v_dim,
    v_tile: tl.constexpr,
):
    v_column = tl.arange(0, v_tile)
    mask = valid[:, None] & (v_column < v_dim)[None, :]
    if partial_row < 0:
        at = (q_begin + token).to(tl.int64) * num_heads + head
        tl.store(out + at[:, None] * v_dim + v_column[None, :], o.to(out.dtype.element_ty), mask)
        tl.store(lse + at, log_sum, mask=valid)
    else:
        at = (partial_row + lane).to(tl.int64)
        tl.store(partial_out + at[:, None] * v_dim + v_column[None, :], o, mask)
        tl.store(partial_lse + at, log_sum, mask=valid)


@triton.jit
def clear_padding(cu_seqlens_q, batch, tokens, program, out, lse, num_heads, v_dim):
    """Tokens after the last request, shared out among the programs."""
    column = tl.arange(0, 1024)
    used = tl.load(cu_seqlens_q + batch).to(tl.int32)
    for token in range(used + program, tokens, tl.num_programs(0)):
        at = (tl.zeros([], tl.int64) + token) * num_heads
        for start in range(0, num_heads * v_dim, 1024):
            mask = start + column < num_heads * v_dim
            tl.store(out + at * v_dim + start + column, 0.0, mask=mask)
        for start in range(0, num_heads, 1024):
            tl.store(lse + at + start + column, float("-inf"), mask=start + column < num_heads)


@triton.jit
def _run_item(
    words,  # pointer to the item
    q,
    k,
    v,
    page_table,
    table_stride,
    out,
    lse,
    partial_out,
    partial_lse,
    sink,
    tree,
    k_scale,
    v_scale,
    q_stride,
    q_head_stride,
    q_dim_stride,
    k_page_stride,
    k_head_stride,
    k_slot_stride,
    k_dim_stride,
    v_page_stride,
    v_head_stride,
    v_slot_stride,
    v_dim_stride,
    num_heads,
    group_size,
    left,
    right,
    factor,
    softcap,
    k_dim,
    v_dim,
    tile_rows: tl.constexpr,
    main_dim: tl.constexpr,
    rest_tile: tl.constexpr,
    v_tile: tl.constexpr,
    page_size: tl.constexpr,
    block: tl.constexpr,
    has_left: tl.constexpr,
    has_right: tl.constexpr,
    has_softcap: tl.constexpr,
    has_sink: tl.constexpr,
    has_tree: tl.constexpr,
    scaled: tl.constexpr,
    latent: tl.constexpr,
    exact_k: tl.constexpr,
    exact_v: tl.constexpr,
):
    request = tl.load(words)
    kv_head = tl.load(words + 1)
    row_begin = tl.load(words + 2)
    row_end = tl.load(words + 3)
    begin = tl.load(words + 5) * block
    end = tl.load(words + 6) * block
    partial_row = tl.load(words + 7)
    q_begin = tl.load(words + 9)
    q_len = tl.load(words + 10)
    kv_len = tl.load(words + 11)

    lane = tl.arange(0, tile_rows)
    row = row_begin + lane
    valid = row < row_end
    token = row // group_size
    head = kv_head * group_size + row % group_size
    positions = kv_len - q_len + token
    main = tl.arange(0, main_dim)
    q_at = q + ((q_begin + token).to(tl.int64) * q_stride + head.to(tl.int64) * q_head_stride)
    q_at = q_at[:, None]
    q_mask = valid[:, None] & (main < k_dim)[None, :]
    q_main = tl.load(q_at + main[None, :] * q_dim_stride, mask=q_mask, other=0.0)
    q_rest = q_main
    if rest_tile > 0:
        rest = main_dim + tl.arange(0, rest_tile)
        q_rest = tl.load(
            q_at + rest[None, :] * q_dim_stride,
            mask=valid[:, None] & (rest < k_dim)[None, :],
            other=0.0,
        )
    table = page_table + request.to(tl.int64) * table_stride
    k += kv_head.to(tl.int64) * k_head_stride
    v += kv_head.to(tl.int64) * v_head_stride
    if scaled:
        factor *= tl.load(k_scale + kv_head)
    drafts = positions
    if has_tree:
        drafts = tl.load(tree + q_begin + token, mask=valid, other=0)

    # Tiles low .. high are seen whole by every row.
    first_key = 0
    low = begin
    high = kv_len
    last_row = tl.minimum(row_begin + tile_rows, row_end) - 1
    if has_right:
        high = tl.minimum(high, kv_len - q_len + row_begin // group_size + right + 1)
    if has_left:
        first_key = tl.maximum(kv_len - q_len + row_begin // group_size - left, 0)
        low = tl.maximum(kv_len - q_len + last_row // group_size - left, 0)
        low = (low + block - 1) // block * block
    if has_tree:
        high = tl.minimum(high, kv_len - q_len)
    high = tl.maximum(high, 0) // block * block
    low = tl.maximum(tl.minimum(low, end), begin)
    high = tl.minimum(tl.maximum(high, low), end)

    state = (
        tl.zeros([tile_rows, v_tile], tl.float32),
        tl.full([tile_rows], -1.0e30, tl.float32),
        tl.zeros([tile_rows], tl.float32),
    )
    if has_left:
        state = _visit(
            state, begin, low, q_main, q_rest, table, k, v, k_page_stride, k_slot_stride,
            k_dim_stride, v_page_stride, v_slot_stride, v_dim_stride, positions, drafts, q_len, first_key, kv_len,
            left, right, factor, softcap, k_dim, v_dim, main_dim, rest_tile, v_tile, page_size, block,
            True, has_left, has_right, has_softcap, has_tree, latent, exact_k, exact_v,
        )  # fmt: skip
    state = _visit(
        state, low, high, q_main, q_rest, table, k, v, k_page_stride, k_slot_stride,
        k_dim_stride, v_page_stride, v_slot_stride, v_dim_stride, positions, drafts, q_len, first_key, kv_len,
        left, right, factor, softcap, k_dim, v_dim, main_dim, rest_tile, v_tile, page_size, block,
        False, has_left, has_right, has_softcap, has_tree, latent, exact_k, exact_v,
    )  # fmt: skip
    state = _visit(
        state, high, end, q_main, q_rest, table, k, v, k_page_stride, k_slot_stride,
        k_dim_stride, v_page_stride, v_slot_stride, v_dim_stride, positions, drafts, q_len, first_key, kv_len,
        left, right, factor, softcap, k_dim, v_dim, main_dim, rest_tile, v_tile, page_size, block,
        True, has_left, has_right, has_softcap, has_tree, latent, exact_k, exact_v,
    )  # fmt: skip
    o, maximum, total = state

    if has_sink and partial_row < 0:
        logit = tl.load(sink + head, mask=valid, other=0.0) * 1.4426950408889634
        new_maximum = tl.maximum(maximum, logit)
        alpha = tl.exp2(maximum - new_maximum)
        total = total * alpha + tl.exp2(logit - new_maximum)
        o = o * alpha[:, None]
        maximum = new_maximum
    o = o / tl.where(total != 0, total, 1.0)[:, None]
    if scaled:
        o = o * tl.load(v_scale + kv_head)
    log_sum = tl.where(total != 0, (maximum + tl.log2(total)) * 0.6931471805599453, float("-inf"))
    store_item(
        o, log_sum, out, lse, partial_out, partial_lse, partial_row, lane, valid, q_begin, token, head,
        num_heads, v_dim, v_tile,
    )  # fmt: skip


@triton.jit(do_not_specialize=["batch", "tokens", "items_at", "table_stride", "left", "right"])
def paged_attention_kernel(
    plan,
    items_at,
    ctas_at,
    cu_seqlens_q,
    batch,
    tokens,
    q,
    k,
    v,
    page_table,
    table_stride,
    out,
    lse,
    partial_out,
    partial_lse,
    sink,
    tree,
    k_scale,
    v_scale,
    q_stride,
    q_head_stride,
    q_dim_stride,
    k_page_stride,
    k_head_stride,
    k_slot_stride,
    k_dim_stride,
    v_page_stride,
    v_head_stride,
    v_slot_stride,
    v_dim_stride,
    num_heads,
    group_size,
    left,
    right,
    factor,
    softcap,
    k_dim,
    v_dim,
    small_rows: tl.constexpr,
    large_rows: tl.constexpr,  # 0: all tiles are small
    main_dim: tl.constexpr,
    rest_tile: tl.constexpr,
    v_tile: tl.constexpr,
    page_size: tl.constexpr,
    block: tl.constexpr,
    has_left: tl.constexpr,
    has_right: tl.constexpr,
    has_softcap: tl.constexpr,
    has_sink: tl.constexpr,
    has_tree: tl.constexpr,
    scaled: tl.constexpr,
    latent: tl.constexpr,
    exact_k: tl.constexpr,
    exact_v: tl.constexpr,
):
    program = tl.program_id(0)
    first = tl.load(plan + ctas_at + program * 2)
    count = tl.load(plan + ctas_at + program * 2 + 1)
    for index in range(first, first + count):
        words = plan + items_at + index * ITEM_WORDS
        tile_rows = tl.load(words + 4)
        if tile_rows == small_rows:
            _run_item(
                words, q, k, v, page_table, table_stride, out, lse, partial_out, partial_lse, sink,
                tree, k_scale, v_scale, q_stride, q_head_stride, q_dim_stride, k_page_stride,
                k_head_stride, k_slot_stride, k_dim_stride, v_page_stride, v_head_stride,
                v_slot_stride, v_dim_stride, num_heads, group_size, left, right, factor, softcap,
                k_dim, v_dim, small_rows, main_dim, rest_tile, v_tile, page_size, block, has_left,
                has_right, has_softcap, has_sink, has_tree, scaled, latent, exact_k, exact_v,
            )  # fmt: skip
        elif large_rows > 0:
            _run_item(
                words, q, k, v, page_table, table_stride, out, lse, partial_out, partial_lse, sink,
                tree, k_scale, v_scale, q_stride, q_head_stride, q_dim_stride, k_page_stride,
                k_head_stride, k_slot_stride, k_dim_stride, v_page_stride, v_head_stride,
                v_slot_stride, v_dim_stride, num_heads, group_size, left, right, factor, softcap,
                k_dim, v_dim, large_rows, main_dim, rest_tile, v_tile, page_size, block, has_left,
                has_right, has_softcap, has_sink, has_tree, scaled, latent, exact_k, exact_v,
            )  # fmt: skip
    clear_padding(cu_seqlens_q, batch, tokens, program, out, lse, num_heads, v_dim)


@dataclass(frozen=True)
class Config:
    tile_rows: tuple[int, ...]  # one or two sizes
    block: int  # keys of a KV tile
    num_warps: int
    num_stages: int
    ctas_per_unit: int


@cache
def config_of(k_dim: int, v_dim: int, itemsize: int, most_rows: int) -> Config:
    """most_rows: packed rows of the longest request."""
    large = 64 if most_rows <= 64 or v_dim > 256 else 128
    tile_rows = (16,) if most_rows <= 16 else (16, large)
    if INTERPRETED:
        return Config(tile_rows if large == 64 else (16, 32), 32, 4, 1, 1)
    if itemsize == 4:
        return Config((16,) if most_rows <= 16 else (16, 64), 32, 4, 2, 1)
    # Page numbers and what they point to are loaded one after the other, so that of n stages
    # (n - 1) / 2 hold keys and values.
    if k_dim > 256:
        return Config(tile_rows, 32, 4 if most_rows <= 16 else 8, 4, 1)
    if most_rows <= 16:
        return (
            Config(tile_rows, 64, 4, 7, 2)
            if k_dim + v_dim <= 256
            else Config(tile_rows, 32, 4, 7, 1)
        )
    return Config(tile_rows, 64, 8 if large == 128 else 4, 2 if k_dim + v_dim > 256 else 3, 1)


def split_of(
    call: Any, batch: int, tokens: int, max_q_len: int, max_kv_len: int, groups: int = 0
) -> SplitSpec:
    group_size = call.num_q_heads // call.num_kv_heads
    kv_dtype = call.kv_dtype or call.dtype
    most_rows = (tokens if groups else max_q_len) * group_size  # of a group, or of one request
    config = config_of(call.k_dim, call.v_dim, call.dtype.itemsize, most_rows)
    dims = call.k_dim + call.v_dim
    return SplitSpec(
        batch=batch,
        tokens=tokens,
        max_q_len=max_q_len,
        max_kv_len=max_kv_len,
        group_size=group_size,
        num_kv_heads=call.num_kv_heads,
        left=min(call.left, UNBOUNDED),
        right=min(call.right, UNBOUNDED),
        kv_tile=config.block,
        tile_rows=config.tile_rows,
        tile_cost=tuple(
            tile_clocks(rows, config.block, dims, kv_dtype.itemsize) for rows in config.tile_rows
        ),
        item_cost=2 * ITEM_CLOCKS,  # nothing is loaded ahead of an item's beginning
        num_ctas=_units() * config.ctas_per_unit,
        min_piece=2,
        piece=PIECE_TOKENS // config.block if call.batch_invariant else 0,
        groups=groups,
        least_saved=LEAST_SAVED if groups else 0,
    )


@cache
def _units() -> int:
    if INTERPRETED:
        return 5
    return int(torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count)


@dataclass(frozen=True)
class Planned:
    """What `split_of` reads of an ops.attention.AttentionCall; by default of a causal one."""

    dtype: torch.dtype
    num_q_heads: int
    num_kv_heads: int
    k_dim: int
    v_dim: int
    kv_dtype: torch.dtype | None = None  # None: dtype
    left: int = -1
    right: int = 0
    batch_invariant: bool = False


def paged_attention(
    q: Tensor,  # [tokens, num_q_heads, k_dim]
    k_pages: Tensor,  # [num_pages, num_kv_heads, page_size, k_dim]
    v_pages: Tensor,  # [num_pages, num_kv_heads, page_size, v_dim]
    cu_seqlens_q: Tensor,  # [batch + 1]
    kv_lens: Tensor,  # [batch]
    page_table: Tensor,  # [batch, max_pages]
    max_q_len: int,
    max_kv_len: int,
    sink: Tensor | None,  # [num_q_heads]
    left: int,
    right: int,
    softcap: float,
    scale: float,
    k_scale: Tensor | None,  # [num_kv_heads]
    v_scale: Tensor | None,  # [num_kv_heads]
    batch_invariant: bool,
    plan: Tensor | None,
    split: list[int],
    with_lse: bool = True,  # whether anybody reads it
    tree: Tensor | None = None,  # [tokens] int64, see ops.tree
) -> tuple[Tensor, Tensor]:  # [tokens, num_q_heads, v_dim], [tokens, num_q_heads]
    tokens, num_heads, k_dim = q.shape
    _, num_kv_heads, page_size, v_dim = v_pages.shape
    out = q.new_empty(tokens, num_heads, v_dim)
    lse = q.new_empty(tokens, num_heads, dtype=torch.float32)
    if tokens == 0:
        return out, lse
    batch = kv_lens.shape[0]
    if plan is None:
        heads = (num_heads, num_kv_heads)
        call = Planned(
            *(q.dtype, *heads, k_dim, v_dim, k_pages.dtype, left, right, batch_invariant)
        )
        spec = split_of(call, batch, tokens, max_q_len, max_kv_len)
        plan = split_kv(cu_seqlens_q, kv_lens, spec.numbers)
    else:
        spec = SplitSpec.from_numbers(split)
    layout = Layout(spec)
    most_rows = (tokens if spec.groups else max_q_len) * spec.group_size
    config = config_of(k_dim, v_dim, q.dtype.itemsize, most_rows)
    partial_out = q.new_empty(layout.partial_rows, v_dim, dtype=torch.float32)
    partial_lse = q.new_empty(layout.partial_rows, dtype=torch.float32)
    main_dim = max(16, largest_power(k_dim))
    rest_tile = 0 if k_dim <= main_dim else max(16, triton.next_power_of_2(k_dim - main_dim))
    v_tile = max(16, triton.next_power_of_2(v_dim))
    latent = (
        v_pages.data_ptr() == k_pages.data_ptr()
        and v_pages.stride() == k_pages.stride()
        and v_dim == main_dim == v_tile
    )
    sink = None if sink is None else sink.float().contiguous()
    scales = [lse if x is None else x.float().contiguous() for x in (k_scale, v_scale)]
    with torch.cuda.device(q.device) if q.is_cuda else torch.no_grad():
        paged_attention_kernel[(spec.num_ctas,)](
            plan,
            layout.items,
            layout.ctas,
            cu_seqlens_q,
            batch,
            tokens,
            q,
            k_pages,
            v_pages,
            page_table if page_table.stride(1) == 1 else page_table.contiguous(),
            page_table.stride(0) if page_table.stride(1) == 1 else page_table.shape[1],
            out,
            lse,
            partial_out,
            partial_lse,
            lse if sink is None else sink,
            lse if tree is None else tree,
            *scales,
            *q.stride(),
            *k_pages.stride(),
            *v_pages.stride(),
            num_heads,
            spec.group_size,
            spec.left,
            spec.right,
            scale / softcap if softcap else scale * LOG2_E,
            softcap * LOG2_E,
            k_dim,
            v_dim,
            small_rows=spec.tile_rows[0],
            large_rows=spec.tile_rows[1] if len(spec.tile_rows) > 1 else 0,
            main_dim=main_dim,
            rest_tile=rest_tile,
            v_tile=v_tile,
            page_size=page_size,
            block=spec.kv_tile,
            has_left=left >= 0,
            has_right=right >= 0,
            has_softcap=softcap != 0,
            has_sink=sink is not None,
            has_tree=tree is not None,
            scaled=k_scale is not None,
            latent=latent,
            exact_k=k_dim >= main_dim,
            exact_v=v_dim == v_tile,
            num_warps=config.num_warps,
            num_stages=config.num_stages,
        )
        merge = merge_shared if spec.groups else merge_parts
        merge(plan, spec, partial_out, partial_lse, sink, out, lse)
    return out, lse


def supports(call: Any) -> str | None:
    reason = refusal(call)
    if reason is not None:
        return reason
    if call.kv_dtype not in (None, torch.float8_e4m3fn):
        return f"it takes pages of q's dtype or float8_e4m3fn, not {call.kv_dtype}"
    if call.k_dim > LATENT_DIM or call.v_dim > 512:
        return f"dims are {call.k_dim} and {call.v_dim}; it takes up to {LATENT_DIM} and 512"
    return None


KERNELS = {
    "paged_attention": Kernel(paged_attention, supports, efficiency=0.5, split=split_of),
    "append_kv": Kernel(append_kv, append_supports, efficiency=0.5),
}
