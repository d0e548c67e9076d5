"""Dual chunk attention through torch's fused CPU kernel: each pair of chunks by itself, then merged."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rooftile.kernels import Kernel
from rooftile.kernels.reference.attention import nothing_seen
from rooftile.kernels.reference.precision import widen
from rooftile.kernels.torch.attention import attend, supports
from rooftile.kernels.torch.paged import _gather as gather_pages

Queries = tuple[Tensor, Tensor, Tensor]  # for keys of the own chunk, the one before, earlier ones


def attend_chunks(
    queries: Queries,  # each [batch, q_len, num_q_heads, dim]
    k: Tensor,  # [batch, num_kv_heads, kv_len, dim]
    v: Tensor,  # [batch, num_kv_heads, kv_len, dim]
    chunk_len: int,
    scale: float,
    out: Tensor,  # [batch, q_len, num_q_heads, dim], zeros
    lse: Tensor,  # [batch, q_len, num_q_heads], -inf
) -> None:
    """Writes out and lse of the queries that see a key; the last query stands at the last key."""
    m, n = out.shape[1], k.shape[2]
    offset = n - m
    row = max(0, -offset)
    while row < m:
        chunk = (row + offset) // chunk_len
        border = chunk * chunk_len
        end = min(m, border + chunk_len - offset)
        rows, last = slice(row, end), end + offset  # keys up to the last of these queries
        before = max(border - chunk_len, 0)
        pieces = (slice(border, last), slice(before, border), slice(0, before))
        parts = []
        for q, keys in zip(queries, pieces, strict=True):
            if keys.start == keys.stop:
                continue
            part = nothing_seen(q[:, rows], v.shape[-1])
            right = 0 if keys.stop == last else -1
            _attend(q[:, rows], k[:, :, keys], v[:, :, keys], right, scale, *part)
            parts.append(part)
        _merge(parts, out[:, rows], lse[:, rows])
        row = end


def _attend(
    q: Tensor,  # [batch, q_len, num_q_heads, dim]
    k: Tensor,  # [batch, num_kv_heads, kv_len, dim]
    v: Tensor,  # [batch, num_kv_heads, kv_len, dim]
    right: int,
    scale: float,
    out: Tensor,
    lse: Tensor,
) -> None:
    heads = k.shape[1]
    if q.shape[1] > 1 or heads == q.shape[2]:
        attend(q, k, v, -1, right, scale, out, lse)
        return
    # One query sees all of its keys: the heads of a group become rows, so keys are read once.
    rows = q[:, 0].unflatten(1, (heads, q.shape[2] // heads)).transpose(1, 2)
    part = nothing_seen(rows, v.shape[-1])
    attend(rows, k, v, -1, -1, scale, *part)
    out.copy_(part[0].transpose(1, 2).reshape(out.shape))
    lse.copy_(part[1].transpose(1, 2).reshape(lse.shape))


def _merge(parts: list[tuple[Tensor, Tensor]], out: Tensor, lse: Tensor) -> None:
    """Every query of every part sees a key."""
    if len(parts) == 1:
        out.copy_(parts[0][0])
        lse.copy_(parts[0][1])
        return
    total = torch.logsumexp(torch.stack([part[1] for part in parts]), 0)
    mixed = widen(parts[0][0]) * torch.exp(parts[0][1] - total)[..., None]
    for part_out, part_lse in parts[1:]:
        mixed.addcmul_(widen(part_out), torch.exp(part_lse - total)[..., None])
    out.copy_(mixed)
    lse.copy_(total)


def dual_chunk_attention(
    q_intra: Tensor,  # [batch, q_len, num_q_heads, dim]
    q_succ: Tensor,  # [batch, q_len, num_q_heads, dim]
    q_inter: Tensor,  # [batch, q_len, num_q_heads, dim]
    k: Tensor,  # [batch, kv_len, num_kv_heads, dim]
    v: Tensor,  # [batch, kv_len, num_kv_heads, dim]
    chunk_len: int,
    softcap: float,
    scale: float,
) -> tuple[Tensor, Tensor]:  # [batch, q_len, num_q_heads, dim], [batch, q_len, num_q_heads]
    out, lse = nothing_seen(q_intra, v.shape[-1])
    queries = (q_intra, q_succ, q_inter)
    attend_chunks(queries, k.transpose(1, 2), v.transpose(1, 2), chunk_len, scale, out, lse)
    return out, lse


def dual_chunk_attention_varlen(
    q_intra: Tensor,  # [tokens_q, num_q_heads, dim]
    q_succ: Tensor,  # [tokens_q, num_q_heads, dim]
    q_inter: Tensor,  # [tokens_q, num_q_heads, dim]
    k: Tensor,  # [tokens_k, num_kv_heads, dim]
    v: Tensor,  # [tokens_k, num_kv_heads, dim]
    cu_seqlens_q: Tensor,  # [batch + 1]
    cu_seqlens_k: Tensor,  # [batch + 1]
    max_q_len: int,
    max_kv_len: int,
    chunk_len: int,
    softcap: float,
    scale: float,
) -> tuple[Tensor, Tensor]:  # [tokens_q, num_q_heads, dim], [tokens_q, num_q_heads]
    out, lse = nothing_seen(q_intra, v.shape[-1])
    k, v = k.transpose(0, 1), v.transpose(0, 1)
    q_ends, k_ends = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    for i in range(len(q_ends) - 1):
        rows, keys = slice(q_ends[i], q_ends[i + 1]), slice(k_ends[i], k_ends[i + 1])
        queries = (q_intra[None, rows], q_succ[None, rows], q_inter[None, rows])
        results = (out[None, rows], lse[None, rows])
        attend_chunks(queries, k[None, :, keys], v[None, :, keys], chunk_len, scale, *results)
    return out, lse


def paged_dual_chunk_attention(
    q_intra: Tensor,  # [tokens, num_q_heads, dim]
    q_succ: Tensor,  # [tokens, num_q_heads, dim]
    q_inter: Tensor,  # [tokens, num_q_heads, dim]
    k_pages: Tensor,  # [num_pages, num_kv_heads, page_size, dim]
    v_pages: Tensor,  # [num_pages, num_kv_heads, page_size, dim]
    cu_seqlens_q: Tensor,  # [batch + 1]
    kv_lens: Tensor,  # [batch]
    page_table: Tensor,  # [batch, max_pages]
    max_q_len: int,
    max_kv_len: int,
    chunk_len: int,
    softcap: float,
    scale: float,
    plan: Tensor | None = None,  # this kernel follows none
    split: Sequence[int] = (),
) -> tuple[Tensor, Tensor]:  # [tokens, num_q_heads, dim], [tokens, num_q_heads]
    out, lse = nothing_seen(q_intra, v_pages.shape[-1])
    ends, page_size = cu_seqlens_q.tolist(), k_pages.shape[2]
    for i, kv_len in enumerate(kv_lens.tolist()):
        rows = slice(ends[i], ends[i + 1])
        if rows.start == rows.stop or kv_len == 0:
            continue
        table = page_table[i, None, : -(-kv_len // page_size)]
        k, v = (x[:, :, :kv_len] for x in gather_pages(table, k_pages, v_pages))
        queries = (q_intra[None, rows], q_succ[None, rows], q_inter[None, rows])
        attend_chunks(queries, k, v, chunk_len, scale, out[None, rows], lse[None, rows])
    return out, lse


KERNELS = {
    "dual_chunk_attention": Kernel(dual_chunk_attention, supports, efficiency=0.3),
    "dual_chunk_attention_varlen": Kernel(dual_chunk_attention_varlen, supports, efficiency=0.3),
    "paged_dual_chunk_attention": Kernel(paged_dual_chunk_attention, supports, efficiency=0.3),
}
