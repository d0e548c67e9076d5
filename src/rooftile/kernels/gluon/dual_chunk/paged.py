"""Dual chunk attention over pages on Hopper: the paged kernel, which changes its queries at borders."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from rooftile.kernels.chunk_requests import cut_at_chunks
from rooftile.kernels.gluon import paged
from rooftile.kernels.gluon.paged.config import longest_tile


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
    q = _end_to_end(q_intra, q_succ, q_inter)
    if plan is None and max_q_len > 1 and kv_lens.shape[0]:
        tokens = q_intra.shape[0]
        cu_seqlens_q, kv_lens, page_table = cut_at_chunks(
            cu_seqlens_q, kv_lens, page_table, tokens, chunk_len
        )
        max_q_len = min(max_q_len, chunk_len)
    return paged.paged_attention(
        q,
        k_pages,
        v_pages,
        cu_seqlens_q,
        kv_lens,
        page_table,
        max_q_len,
        max_kv_len,
        sink=None,
        left=-1,
        right=0,
        softcap=softcap,
        scale=scale,
        k_scale=None,
        v_scale=None,
        batch_invariant=False,
        plan=plan,
        split=split,
        chunk_len=chunk_len,
    )


def _end_to_end(q_intra: Tensor, q_succ: Tensor, q_inter: Tensor) -> Tensor:
    """All three [tokens, ...] as one [3 * tokens, ...]; a view where they lie so in memory."""
    tokens, *rest = q_intra.shape
    gap = q_intra.numel() * q_intra.element_size()
    begins = [x.data_ptr() - q_intra.data_ptr() for x in (q_succ, q_inter)]
    if begins == [gap, 2 * gap] and all(x.is_contiguous() for x in (q_intra, q_succ, q_inter)):
        return q_intra.as_strided((3 * tokens, *rest), q_intra.stride())
    return torch.cat((q_intra, q_succ, q_inter))


def paged_supports(call: Any) -> str | None:
    plain_call = SimpleNamespace(**vars(call), kv_dtype=None)
    reason = paged.supports(plain_call)
    if reason is not None:
        return reason
    tile = longest_tile(call.k_dim, call.v_dim)
    if call.chunk_len % tile:
        return f"chunks of {call.chunk_len} tokens are no whole tiles of {tile} keys"
    return None
