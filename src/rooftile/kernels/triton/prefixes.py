"""Shared prefixes, found on the device: what neighbours have in common, then the groups.

The second launch has one program, whose lanes are so many requests after the other.
"""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from rooftile.kernels import Kernel
from rooftile.kernels.triton.interpreter import INTERPRETED
from rooftile.kernels.triton.pointwise import where

BLOCK = 512  # pages at a time
LANES = (32, 512)  # requests at a time: of each a kernel, which compiles the longer the wider it is
ALL = tl.constexpr(2**30)


@triton.jit
def _whole_pages(cu_seqlens_q, kv_lens, request, page_size):
    """Of a request, those before its first query."""
    q_len = tl.load(cu_seqlens_q + request + 1) - tl.load(cu_seqlens_q + request)
    return tl.maximum(tl.load(kv_lens + request) - q_len, 0).to(tl.int32) // page_size


@triton.jit(do_not_specialize=["table_stride", "page_size"])
def common_pages_kernel(
    cu_seqlens_q,  # [batch + 1]
    kv_lens,  # [batch]
    page_table,  # [batch, max_pages]
    common,  # [batch] int32
    table_stride,
    page_size,
    block: tl.constexpr,
):
    """Program i: the leading pages that requests i - 1 and i have in common."""
    request = tl.program_id(0)
    found = tl.zeros([], tl.int32)
    if request > 0:
        mine = _whole_pages(cu_seqlens_q, kv_lens, request, page_size)
        end = tl.minimum(mine, _whole_pages(cu_seqlens_q, kv_lens, request - 1, page_size))
        row = page_table + request.to(tl.int64) * table_stride
        going = end > 0
        while going:
            column = found + tl.arange(0, block)
            there = column < end
            one = tl.load(row + column, mask=there, other=0)
            other = tl.load(row - table_stride + column, mask=there, other=1)
            # Columns from the end on differ, so that this comes to an end there.
            differs = tl.min(tl.where(one == other, ALL, column), 0)
            going = differs == ALL
            found = tl.where(going, found + block, differs)
    tl.store(common + request, found)


@triton.jit
def _begins(common, request, batch, page_size, least):
    """Whether a request begins a new group, and what it has in common with the one before."""
    mine = tl.load(common + request, mask=(request > 0) & (request < batch), other=0)
    before = tl.load(common + request - 1, mask=(request > 1) & (request <= batch), other=0)
    after = tl.load(common + request + 1, mask=request + 1 < batch, other=0)
    alone = (mine * page_size < least) | (2 * mine < tl.maximum(before, after))
    return alone | (request == 0) | (request >= batch), mine


@triton.jit
def _fold(begins, least, begins_then, least_then):
    """The least value since a group began."""
    kept = tl.where(begins_then, least_then, tl.minimum(least, least_then))
    return begins | begins_then, kept


@triton.jit(do_not_specialize=["batch", "page_size", "least"])
def groups_kernel(
    common,  # [batch] int32
    first,  # [batch + 1] int32
    lens,  # [batch] int32
    batch,
    page_size,
    least,
    lanes: tl.constexpr,  # requests at a time
):
    lane = tl.arange(0, lanes)
    groups = tl.zeros([], tl.int32)  # that begin before these lanes
    before = tl.full([], ALL, tl.int32)  # the least value since the last of them began
    for start in range(0, batch, lanes):
        request = start + lane
        exists = request < batch
        begins, pages = _begins(common, request, batch, page_size, least)
        begins_next, _ = _begins(common, request + 1, batch, page_size, least)
        counted = (begins & exists).to(tl.int32)
        group = groups + tl.cumsum(counted, 0) - 1
        begun, least_pages = tl.associative_scan((begins, tl.where(begins, ALL, pages)), 0, _fold)
        least_pages = tl.where(begun, least_pages, tl.minimum(before, least_pages))
        keys = tl.where(least_pages == ALL, 0, least_pages * page_size)
        tl.store(first + group, request, mask=begins & exists)
        tl.store(lens + group, keys, mask=begins_next & exists)
        groups += tl.sum(counted, 0)
        before = tl.sum(tl.where(lane == lanes - 1, least_pages, 0), 0)
    for start in range(groups, batch + 1, lanes):
        place = start + lane
        tl.store(first + place, batch, mask=place <= batch)
        tl.store(lens + place, 0, mask=place < batch)


def find_prefixes(
    cu_seqlens_q: Tensor,  # [batch + 1]
    kv_lens: Tensor,  # [batch]
    page_table: Tensor,  # [batch, max_pages]
    page_size: int,
    least: int,
) -> tuple[Tensor, Tensor]:  # first [batch + 1], lens [batch] int32, see ops.prefixes
    batch = kv_lens.shape[0]
    common, first, lens = (
        page_table.new_empty(n, dtype=torch.int32) for n in (batch, batch + 1, batch)
    )
    if batch == 0:
        return first.zero_(), lens
    table = page_table if page_table.stride(1) == 1 else page_table.contiguous()
    with where(kv_lens):
        common_pages_kernel[(batch,)](
            *(cu_seqlens_q.contiguous(), kv_lens.contiguous(), table, common, table.stride(0)),
            page_size,
            block=BLOCK,
        )
        lanes = next((n for n in LANES if batch <= n), LANES[-1])
        groups_kernel[(1,)](common, first, lens, batch, page_size, least, lanes=lanes, num_warps=8)
    return first, lens


def supports(call: Any) -> str | None:
    if call.device != "cuda" and not INTERPRETED:
        return f"it needs a GPU, not a {call.device}"
    return None


KERNELS = {"find_prefixes": Kernel(find_prefixes, supports, efficiency=0.5)}
