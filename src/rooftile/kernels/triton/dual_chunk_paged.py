"""Dual chunk attention over pages in portable Triton: prefill, decode and any mixture, after one plan.

As `paged.py`, with the keys of an item in up to three runs, each met by its own queries. Requests are
cut at chunk borders first, so that all queries of a tile stand in one chunk.
"""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from rooftile.kernels.chunk_requests import cut_at_chunks
from rooftile.kernels.triton.merge import merge_parts
from rooftile.kernels.triton.paged import (
    LOG2_E,
    Planned,
    clear_padding,
    config_of,
    split_of,
    store_item,
)
from rooftile.kernels.triton.split_kv import ITEM_WORDS, split_kv
from rooftile.planning.split_kv import Layout
from rooftile.types import SplitSpec


@triton.jit
def _fold(
    state,  # (o [rows, v_tile], maximum [rows], total [rows])
    begin,
    end,  # keys; whole blocks where not masked
    q,  # [rows, k_tile]
    table,  # the request's row of the page table
    k,  # its kv head in page 0
    v,
    k_page_stride,
    k_slot_stride,
    k_dim_stride,
    v_page_stride,
    v_slot_stride,
    v_dim_stride,
    last,  # [rows], the last key that each row sees
    factor,
    softcap,
    k_dim,
    v_dim,
    k_tile: tl.constexpr,
    v_tile: tl.constexpr,
    page_size: tl.constexpr,
    block: tl.constexpr,
    masked: tl.constexpr,
    has_softcap: tl.constexpr,
    exact_dims: tl.constexpr,
    stages: tl.constexpr,
):
    """Folds keys begin .. end - 1 into the state."""
    o, maximum, total = state
    k_column = tl.arange(0, k_tile)
    v_column = tl.arange(0, v_tile)
    # Masked blocks are few: prefetching them would only take registers.
    for start in tl.range(begin, end, block, num_stages=1 if masked else stages):
        keys = start + tl.arange(0, block)
        present = keys < end
        if masked:
            page = tl.load(table + keys // page_size, mask=present, other=0).to(tl.int64)
        else:
            page = tl.load(table + keys // page_size).to(tl.int64)
        slot = keys % page_size
        k_at = k + (page * k_page_stride + slot * k_slot_stride)[:, None]
        k_at += k_column[None, :] * k_dim_stride
        if masked or not exact_dims:
            inside = present[:, None] & (k_column < k_dim)[None, :]
            k_block = tl.load(k_at, mask=inside, other=0.0)
        else:
            k_block = tl.load(k_at)
        s = tl.dot(q, tl.trans(k_block), input_precision="ieee")
        if has_softcap:
            # softcap * log2 e * tanh(s * scale / softcap), from exp2
            s = softcap - 2.0 * softcap / (tl.exp2(s * (2.0 * 1.4426950408889634 * factor)) + 1.0)
        else:
            s = s * factor
        if masked:
            seen = keys[None, :] <= last[:, None]
            s = tl.where(seen & present[None, :], s, float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(s, 1))
        p = tl.exp2(s - new_maximum[:, None])
        alpha = tl.exp2(maximum - new_maximum)
        total = total * alpha + tl.sum(p, 1)
        v_at = v + (page * v_page_stride + slot * v_slot_stride)[:, None]
        v_at += v_column[None, :] * v_dim_stride
        if masked or not exact_dims:
            inside = present[:, None] & (v_column < v_dim)[None, :]
            v_block = tl.load(v_at, mask=inside, other=0.0)
        else:
            v_block = tl.load(v_at)
        o = tl.dot(p.to(v_block.dtype), v_block, o * alpha[:, None], input_precision="ieee")
        maximum = new_maximum
    return o, maximum, total


@triton.jit
def _run_item(
    words,  # pointer to the item
    q_intra,
    q_succ,
    q_inter,
    k,
    v,
    page_table,
    table_stride,
    out,
    lse,
    partial_out,
    partial_lse,
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
    chunk_len,
    factor,
    softcap,
    k_dim,
    v_dim,
    tile_rows: tl.constexpr,
    k_tile: tl.constexpr,
    v_tile: tl.constexpr,
    page_size: tl.constexpr,
    block: tl.constexpr,
    has_softcap: tl.constexpr,
    exact_dims: tl.constexpr,
    stages: tl.constexpr,
):
    request = tl.load(words)
    kv_head = tl.load(words + 1)
    row_begin = tl.load(words + 2)
    row_end = tl.load(words + 3)
    item_begin = tl.load(words + 5) * block
    item_end = tl.load(words + 6) * block
    partial_row = tl.load(words + 7)
    q_begin = tl.load(words + 9)
    q_len = tl.load(words + 10)
    kv_len = tl.load(words + 11)

    lane = tl.arange(0, tile_rows)
    row = row_begin + lane
    valid = row < row_end
    token = row // group_size
    head = kv_head * group_size + row % group_size
    offset = kv_len - q_len
    k_column = tl.arange(0, k_tile)
    q_at = (q_begin + token).to(tl.int64) * q_stride + head.to(tl.int64) * q_head_stride
    q_at = q_at[:, None] + k_column[None, :] * q_dim_stride
    q_mask = valid[:, None] & (k_column < k_dim)[None, :]
    table = page_table + request.to(tl.int64) * table_stride
    k += kv_head.to(tl.int64) * k_head_stride
    v += kv_head.to(tl.int64) * v_head_stride

    # All queries stand in the chunk of the request's last key; what the tile's first one sees of it,
    # all of its rows see.
    first_position = tl.maximum(offset + row_begin // group_size, 0)
    position = offset + token
    own = tl.maximum(kv_len - 1, 0) // chunk_len * chunk_len
    before = tl.maximum(own - chunk_len, 0)

    state = (
        tl.zeros([tile_rows, v_tile], tl.float32),
        tl.full([tile_rows], -1.0e30, tl.float32),
        tl.zeros([tile_rows], tl.float32),
    )
    # A loop that stays one: the compiler's work is there once.
    for part in tl.range(0, 3, num_stages=1):
        # Keys begin .. end - 1 belong to this run; up to whole - 1 every row sees them.
        queries = q_inter
        begin = own * 0
        end = before
        whole = before
        last = position * 0 + (end - 1)
        if part == 1:
            queries = q_succ
            begin = before
            end = own
            whole = own
            last = position * 0 + (end - 1)
        elif part == 2:
            queries = q_intra
            begin = own
            end = kv_len
            whole = first_position + 1
            last = position
        begin = tl.maximum(begin, item_begin)
        end = tl.minimum(end, item_end)
        if begin < end:
            q_tile = tl.load(queries + q_at, mask=q_mask, other=0.0)
            whole = tl.maximum(tl.minimum(whole, end), begin)
            whole = begin + (whole - begin) // block * block
            state = _fold(
                state, begin, whole, q_tile, table, k, v, k_page_stride, k_slot_stride,
                k_dim_stride, v_page_stride, v_slot_stride, v_dim_stride, last, factor, softcap,
                k_dim, v_dim, k_tile, v_tile, page_size, block, False, has_softcap, exact_dims,
                stages,
            )  # fmt: skip
            state = _fold(
                state, whole, end, q_tile, table, k, v, k_page_stride, k_slot_stride,
                k_dim_stride, v_page_stride, v_slot_stride, v_dim_stride, last, factor, softcap,
                k_dim, v_dim, k_tile, v_tile, page_size, block, True, has_softcap, exact_dims,
                stages,
            )  # fmt: skip
    o, maximum, total = state

    o = o / tl.where(total != 0, total, 1.0)[:, None]
    log_sum = tl.where(total != 0, (maximum + tl.log2(total)) * 0.6931471805599453, float("-inf"))
    store_item(
        o, log_sum, out, lse, partial_out, partial_lse, partial_row, lane, valid, q_begin, token, head,
        num_heads, v_dim, v_tile,
    )  # fmt: skip


@triton.jit(do_not_specialize=["batch", "tokens", "items_at", "ctas_at", "chunk_len"])
def paged_dual_chunk_kernel(
    plan,
    items_at,
    ctas_at,
    cu_seqlens_q,
    batch,
    tokens,
    q_intra,
    q_succ,
    q_inter,
    k,
    v,
    page_table,
    table_stride,
    out,
    lse,
    partial_out,
    partial_lse,
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
    chunk_len,
    factor,
    softcap,
    k_dim,
    v_dim,
    small_rows: tl.constexpr,
    large_rows: tl.constexpr,  # 0: all tiles are small
    k_tile: tl.constexpr,
    v_tile: tl.constexpr,
    page_size: tl.constexpr,
    block: tl.constexpr,
    has_softcap: tl.constexpr,
    exact_dims: tl.constexpr,
    stages: tl.constexpr,
):
    program = tl.program_id(0)
    first = tl.load(plan + ctas_at + program * 2)
    count = tl.load(plan + ctas_at + program * 2 + 1)
    for index in range(first, first + count):
        words = plan + items_at + index * ITEM_WORDS
        tile_rows = tl.load(words + 4)
        if tile_rows == small_rows:
            _run_item(
                words, q_intra, q_succ, q_inter, k, v, page_table, table_stride, out, lse,
                partial_out, partial_lse, q_stride, q_head_stride, q_dim_stride, k_page_stride,
                k_head_stride, k_slot_stride, k_dim_stride, v_page_stride, v_head_stride,
                v_slot_stride, v_dim_stride, num_heads, group_size, chunk_len, factor, softcap,
                k_dim, v_dim, small_rows, k_tile, v_tile, page_size, block, has_softcap,
                exact_dims, stages,
            )  # fmt: skip
        elif large_rows > 0:
            _run_item(
                words, q_intra, q_succ, q_inter, k, v, page_table, table_stride, out, lse,
                partial_out, partial_lse, q_stride, q_head_stride, q_dim_stride, k_page_stride,
                k_head_stride, k_slot_stride, k_dim_stride, v_page_stride, v_head_stride,
                v_slot_stride, v_dim_stride, num_heads, group_size, chunk_len, factor, softcap,
                k_dim, v_dim, large_rows, k_tile, v_tile, page_size, block, has_softcap,
                exact_dims, stages,
            )  # fmt: skip
    clear_padding(cu_seqlens_q, batch, tokens, program, out, lse, num_heads, v_dim)


def paged_dual_chunk_attention(
    q_intra: Tensor,  # [tokens, num_q_heads, k_dim]
    q_succ: Tensor,  # [tokens, num_q_heads, k_dim]
    q_inter: Tensor,  # [tokens, num_q_heads, k_dim]
    k_pages: Tensor,  # [num_pages, num_kv_heads, page_size, k_dim]
    v_pages: Tensor,  # [num_pages, num_kv_heads, page_size, v_dim]
    cu_seqlens_q: Tensor,  # [batch + 1]
    kv_lens: Tensor,  # [batch]
    page_table: Tensor,  # [batch, max_pages]
    max_q_len: int,
    max_kv_len: int,
    chunk_len: int,
    softcap: float,
    scale: float,
    plan: Tensor | None,
    split: list[int],
) -> tuple[Tensor, Tensor]:  # [tokens, num_q_heads, v_dim], [tokens, num_q_heads]
    queries: tuple[Any, ...] = (q_intra, q_succ, q_inter)
    if len({x.stride() for x in queries}) > 1:
        queries = tuple(x.contiguous() for x in queries)
    tokens, num_heads, k_dim = q_intra.shape
    _, num_kv_heads, page_size, v_dim = v_pages.shape
    out = q_intra.new_empty(tokens, num_heads, v_dim)
    lse = q_intra.new_empty(tokens, num_heads, dtype=torch.float32)
    if tokens == 0:
        return out, lse
    if plan is None:
        if max_q_len > 1 and kv_lens.shape[0]:
            cu_seqlens_q, kv_lens, page_table = cut_at_chunks(
                cu_seqlens_q, kv_lens, page_table, tokens, chunk_len
            )
            max_q_len = min(max_q_len, chunk_len)
        call = Planned(q_intra.dtype, num_heads, num_kv_heads, k_dim, v_dim)
        split = split_of(call, kv_lens.shape[0], tokens, max_q_len, max_kv_len).numbers
        plan = split_kv(cu_seqlens_q, kv_lens, split)
    batch = kv_lens.shape[0]
    spec = SplitSpec.from_numbers(split)
    layout = Layout(spec)
    config = config_of(k_dim, v_dim, q_intra.dtype.itemsize, max_q_len * spec.group_size)
    partial_out = q_intra.new_empty(layout.partial_rows, v_dim, dtype=torch.float32)
    partial_lse = q_intra.new_empty(layout.partial_rows, dtype=torch.float32)
    k_tile, v_tile = (max(16, triton.next_power_of_2(n)) for n in (k_dim, v_dim))
    table = page_table if page_table.stride(1) == 1 else page_table.contiguous()
    with torch.cuda.device(q_intra.device) if q_intra.is_cuda else torch.no_grad():
        paged_dual_chunk_kernel[(spec.num_ctas,)](
            *(plan, layout.items, layout.ctas, cu_seqlens_q, batch, tokens),
            *(*queries, k_pages, v_pages, table, table.stride(0)),
            *(out, lse, partial_out, partial_lse),
            *(*queries[0].stride(), *k_pages.stride(), *v_pages.stride()),
            num_heads,
            spec.group_size,
            chunk_len,
            scale / softcap if softcap else scale * LOG2_E,
            softcap * LOG2_E,
            k_dim,
            v_dim,
            small_rows=spec.tile_rows[0],
            large_rows=spec.tile_rows[1] if len(spec.tile_rows) > 1 else 0,
            k_tile=k_tile,
            v_tile=v_tile,
            page_size=page_size,
            block=spec.kv_tile,
            has_softcap=softcap != 0,
            exact_dims=k_dim == k_tile and v_dim == v_tile,
            stages=config.num_stages,
            num_warps=config.num_warps,
            num_stages=config.num_stages,
        )
        merge_parts(plan, spec, partial_out, partial_lse, None, out, lse)
    return out, lse
