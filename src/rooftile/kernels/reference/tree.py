"""Attention of token trees over pages, in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from rooftile.kernels import Kernel, anything
from rooftile.kernels.reference.attention import nothing_seen
from rooftile.kernels.reference.precision import widen


def tree_attention(
    q: Tensor,  # [tokens, num_q_heads, k_dim]
    k_pages: Tensor,  # [num_pages, num_kv_heads, page_size, k_dim]
    v_pages: Tensor,  # [num_pages, num_kv_heads, page_size, v_dim]
    cu_seqlens_q: Tensor,  # [batch + 1]
    kv_lens: Tensor,  # [batch]
    page_table: Tensor,  # [batch, max_pages]
    tree: Tensor,  # [tokens] int64
    max_q_len: int,
    max_kv_len: int,
    sink: Tensor | None,  # [num_q_heads]
    softcap: float,
    scale: float,
    k_scale: Tensor | None,  # [num_kv_heads]
    v_scale: Tensor | None,  # [num_kv_heads]
) -> tuple[Tensor, Tensor]:  # [tokens, num_q_heads, v_dim], [tokens, num_q_heads]
    out, lse = nothing_seen(q, v_pages.shape[-1])
    page_size, kv_heads = k_pages.shape[2], k_pages.shape[1]
    ends = cu_seqlens_q.tolist()
    for i, kv_len in enumerate(kv_lens.tolist()):
        queries, q_len = slice(ends[i], ends[i + 1]), ends[i + 1] - ends[i]
        if q_len == 0:
            continue
        pages = page_table[i, : -(-kv_len // page_size)].long()
        k, v = (
            p[pages].transpose(1, 2).flatten(0, 1)[:kv_len].to(widen(q).dtype)  # [n, k, d]
            for p in (k_pages, v_pages)
        )
        if k_scale is not None and v_scale is not None:
            k, v = k * k_scale[:, None], v * v_scale[:, None]
        grouped = widen(q[queries]).unflatten(1, (kv_heads, -1))  # [m, k, g, d]
        scores = torch.einsum("mkgd,nkd->mkgn", grouped, k) * scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        drafted = torch.arange(kv_len, device=q.device) - (kv_len - q_len)
        named = (tree[queries, None] >> drafted.clamp(min=0)) & 1
        hidden = ~((drafted < 0) | (named != 0))[:, None, None]  # [m, 1, 1, n]
        scores = scores.masked_fill(hidden, -torch.inf)
        total = torch.logsumexp(scores, -1)  # [m, k, g]
        if sink is not None:
            total = torch.logaddexp(total, sink.to(total.dtype).view(kv_heads, -1))
        weights = torch.exp(scores - total[..., None]).masked_fill(hidden, 0)
        result = torch.einsum("mkgn,nke->mkge", weights, v)
        out[queries] = result.flatten(1, 2).to(q.dtype)
        lse[queries] = total.flatten(1)
    return out, lse


KERNELS = {"tree_attention": Kernel(tree_attention, anything, efficiency=0.05)}
