"""Dual chunk attention in plain PyTorch: three full score matrices, one taken at each place.

Shapes in comments: b batch, m query length, n key length, k key-value heads, g query heads per
key-value head, d key dimension, e value dimension.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rooftile.kernels import Kernel, anything
from rooftile.kernels.reference.attention import nothing_seen
from rooftile.kernels.reference.precision import widen


def dual_chunk_attention(
    q_intra: Tensor,  # [b, m, k * g, d]
    q_succ: Tensor,  # [b, m, k * g, d]
    q_inter: Tensor,  # [b, m, k * g, d]
    k: Tensor,  # [b, n, k, d]
    v: Tensor,  # [b, n, k, e]
    chunk_len: int,
    softcap: float,
    scale: float,
) -> tuple[Tensor, Tensor]:  # [b, m, k * g, e] in q's dtype, [b, m, k * g]
    m, n, heads = q_intra.shape[1], k.shape[1], k.shape[2]
    rows = torch.arange(n - m, n, device=k.device)[:, None]
    columns = torch.arange(n, device=k.device)
    hidden = columns > rows
    apart = (rows // chunk_len - columns // chunk_len).clamp(0, 2)  # chunks, 2: or more
    wide_k = widen(k)
    scores = wide_k.new_zeros(())
    for distance, q in enumerate((q_intra, q_succ, q_inter)):
        grouped = widen(q).unflatten(2, (heads, q.shape[2] // heads))
        scores = torch.where(
            apart == distance, torch.einsum("bmkgd,bnkd->bkgmn", grouped, wide_k) * scale, scores
        )
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(hidden, -torch.inf)
    lse = torch.logsumexp(scores, -1)  # [b, k, g, m]
    # -inf - -inf is NaN in a row without keys; such a row has no weights.
    weights = torch.exp(scores - lse[..., None]).masked_fill(hidden, 0)
    out = torch.einsum("bkgmn,bnke->bmkge", weights, widen(v))
    out = out.flatten(2, 3).to(q_intra.dtype).contiguous()
    return out, lse.permute(0, 3, 1, 2).flatten(2).contiguous()


def dual_chunk_attention_varlen(
    q_intra: Tensor,  # [tokens_q, k * g, d]
    q_succ: Tensor,  # [tokens_q, k * g, d]
    q_inter: Tensor,  # [tokens_q, k * g, d]
    k: Tensor,  # [tokens_k, k, d]
    v: Tensor,  # [tokens_k, k, e]
    cu_seqlens_q: Tensor,  # [b + 1]
    cu_seqlens_k: Tensor,  # [b + 1]
    max_q_len: int,
    max_kv_len: int,
    chunk_len: int,
    softcap: float,
    scale: float,
) -> tuple[Tensor, Tensor]:  # [tokens_q, k * g, e], [tokens_q, k * g]
    out, lse = nothing_seen(q_intra, v.shape[-1])
    q_ends, k_ends = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    for i in range(len(q_ends) - 1):
        rows, keys = slice(q_ends[i], q_ends[i + 1]), slice(k_ends[i], k_ends[i + 1])
        queries = (q_intra[None, rows], q_succ[None, rows], q_inter[None, rows])
        one = dual_chunk_attention(
            *queries, k[None, keys], v[None, keys], chunk_len, softcap, scale
        )
        out[rows], lse[rows] = one[0][0], one[1][0]
    return out, lse


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
    plan: Tensor | None = None,  # this kernel follows none
    split: Sequence[int] = (),
) -> tuple[Tensor, Tensor]:  # [tokens, num_q_heads, v_dim], [tokens, num_q_heads]
    out, lse = nothing_seen(q_intra, v_pages.shape[-1])
    ends = cu_seqlens_q.tolist()
    for i, kv_len in enumerate(kv_lens.tolist()):
        rows = slice(ends[i], ends[i + 1])
        if rows.start == rows.stop:
            continue
        pages = page_table[i, : -(-kv_len // k_pages.shape[2])].long()
        k, v = (x[pages].transpose(1, 2).flatten(0, 1)[:kv_len] for x in (k_pages, v_pages))
        queries = (q_intra[None, rows], q_succ[None, rows], q_inter[None, rows])
        one = dual_chunk_attention(*queries, k[None], v[None], chunk_len, softcap, scale)
        out[rows], lse[rows] = one[0][0], one[1][0]
    return out, lse


KERNELS = {
    "dual_chunk_attention": Kernel(dual_chunk_attention, anything, efficiency=0.02),
    "dual_chunk_attention_varlen": Kernel(dual_chunk_attention_varlen, anything, efficiency=0.02),
    "paged_dual_chunk_attention": Kernel(paged_dual_chunk_attention, anything, efficiency=0.02),
}
