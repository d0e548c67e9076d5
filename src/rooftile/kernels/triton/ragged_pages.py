"""Ragged attention by a plan: the keys of short queries, laid end to end, as pages.

Kernels for ragged batches give a CTA to each sequence, query head and tile of queries. Of many short
queries over long keys that is few CTAs, each of which reads all keys. The kernels for pages pack the
heads of a group and cut keys into equal shares, and a ragged tensor is a pool whose pages overlap: page
n is rows n to n + PAGE - 1, so that a sequence's pages are every PAGE-th one from its first row on.
"""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rooftile.kernels.triton.pointwise import where

PAGE = 128  # a multiple of every KV tile
BLOCK = 256
# H200, 32/8 heads of 128, causal, us of the ragged kernel and by a plan: 4 of 128 queries over 16k keys 209
# 237, 16 of 64 over 4k 210 164, 256 of 1 over 300 374 104.
MOST_ROWS = 256  # packed rows of a sequence: beyond, products bind and not what is read
LEAST_KEYS = (
    256  # of a sequence, and of all together: below, making a plan takes longer than it saves
)
LEAST_TOKENS = 4096


@triton.jit(do_not_specialize=["table_stride"])
def ragged_pages_kernel(
    cu_seqlens_k,  # [batch + 1]
    kv_lens,  # [batch] int32
    table,  # [batch, max_pages] int32
    table_stride,
    page: tl.constexpr,
    block: tl.constexpr,
):
    sequence = tl.program_id(0)
    begin = tl.load(cu_seqlens_k + sequence).to(tl.int32)
    length = tl.load(cu_seqlens_k + sequence + 1).to(tl.int32) - begin
    tl.store(kv_lens + sequence, length)
    row = table + sequence.to(tl.int64) * table_stride
    for start in range(0, tl.cdiv(length, page), block):
        column = start + tl.arange(0, block)
        tl.store(row + column, begin + column * page, mask=column * page < length)


def follows_plan(
    k: Tensor,  # [tokens, heads, k_dim]
    v: Tensor,  # [tokens, heads, v_dim]
    max_q_len: int,
    max_kv_len: int,
    group_size: int,
) -> bool:
    """Whether a ragged call takes less time by a plan, and its keys can be pages."""
    return (
        0 < max_q_len * group_size <= MOST_ROWS
        and max_kv_len >= LEAST_KEYS
        and k.shape[0] >= max(LEAST_TOKENS, PAGE)
        and k.stride(-1) == v.stride(-1) == 1
    )


def pages_of(
    x: Tensor,  # [tokens, heads, dim]
) -> Tensor:  # [tokens - PAGE + 1, heads, PAGE, dim]
    """Pages that overlap. Those that begin later exist as far as there are rows."""
    tokens, heads, dim = x.shape
    stride, head_stride, step = x.stride()
    shape = (tokens - PAGE + 1, heads, PAGE, dim)
    return x.as_strided(shape, (stride, head_stride, stride, step))


def lengths_and_table(
    cu_seqlens_k: Tensor,  # [batch + 1]
    max_kv_len: int,
) -> tuple[Tensor, Tensor]:  # [batch], [batch, max_pages] int32
    batch = cu_seqlens_k.shape[0] - 1
    kv_lens = cu_seqlens_k.new_empty(batch, dtype=torch.int32)
    table = cu_seqlens_k.new_empty(batch, -(-max_kv_len // PAGE), dtype=torch.int32)
    if batch:
        with where(cu_seqlens_k):
            ragged_pages_kernel[(batch,)](
                cu_seqlens_k.contiguous(), kv_lens, table, table.stride(0), page=PAGE, block=BLOCK
            )
    return kv_lens, table
