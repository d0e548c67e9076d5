"""Attention of token trees over pages: paged attention with a mask among the query tokens."""

from __future__ import annotations

from torch import Tensor

from rooftile.kernels import Kernel
from rooftile.kernels.triton.paged import paged_attention, split_of, supports


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
    return paged_attention(
        *(q, k_pages, v_pages, cu_seqlens_q, kv_lens, page_table, max_q_len, max_kv_len, sink),
        *(-1, -1, softcap, scale, k_scale, v_scale, False, None, []),
        tree=tree.contiguous(),
    )


KERNELS = {"tree_attention": Kernel(tree_attention, supports, efficiency=0.5, split=split_of)}
