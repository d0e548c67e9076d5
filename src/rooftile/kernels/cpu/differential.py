"""Differential attention over pages as one call of the native attention over pages."""

from __future__ import annotations

from torch import Tensor

from rooftile.kernels import Kernel
from rooftile.kernels.cpu.arguments import refusal
from rooftile.kernels.cpu.paged import paged_attention
from rooftile.kernels.torch.differential import Outputs, stack_queries, subtract


def paged_differential_attention(
    q1: Tensor,  # [tokens, num_q_pairs, k_dim]
    q2: Tensor,  # [tokens, num_q_pairs, k_dim]
    k_pages: Tensor,  # [num_pages, num_kv_pairs, page_size, 2 * k_dim or k_dim]
    v_pages: Tensor,  # [num_pages, num_kv_pairs, page_size, v_dim]
    lam: Tensor,  # [num_q_pairs] or [tokens, num_q_pairs]
    cu_seqlens_q: Tensor,  # [batch + 1]
    kv_lens: Tensor,  # [batch]
    page_table: Tensor,  # [batch, max_pages]
    max_q_len: int,
    max_kv_len: int,
    left: int,
    right: int,
    scale: float,
) -> Outputs:  # [tokens, num_q_pairs, v_dim], [tokens, num_q_pairs], [tokens, num_q_pairs]
    q = stack_queries(q1, q2, k_pages.shape[3] == q1.shape[2])
    out, lse = paged_attention(
        q,
        k_pages,
        v_pages,
        cu_seqlens_q,
        kv_lens,
        page_table,
        max_q_len,
        max_kv_len,
        sink=None,
        left=left,
        right=right,
        softcap=0.0,
        scale=scale,
        k_scale=None,
        v_scale=None,
        batch_invariant=False,
        plan=None,
        split=[],
    )
    return subtract(out, lse, lam)


KERNELS = {
    "paged_differential_attention": Kernel(paged_differential_attention, refusal, efficiency=0.5),
}
