"""Differential attention on a CPU as one plain attention, whose keys are both keys of a pair.

A query [q1, 0] meets [k1, k2] as q1 meets k1, and [0, q2] as q2 meets k2; so keys and values are
read once for both softmaxes, for twice the products with the keys.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from rooftile.kernels import Kernel
from rooftile.kernels.reference.precision import widen
from rooftile.kernels.torch import attention as plain
from rooftile.kernels.torch.paged import paged_attention

Outputs = tuple[Tensor, Tensor, Tensor]


def stack_queries(q1: Tensor, q2: Tensor, shared_keys: bool) -> Tensor:
    """[..., pairs, k_dim] both -> [..., 2 * pairs, k_dim or 2 * k_dim], the two of a pair adjacent."""
    if shared_keys:
        return torch.stack((q1, q2), -2).flatten(-3, -2)
    k_dim = q1.shape[-1]
    stacked = q1.new_zeros(*q1.shape[:-1], 2, 2 * k_dim)
    stacked[..., 0, :k_dim] = q1
    stacked[..., 1, k_dim:] = q2
    return stacked.flatten(-3, -2)


def subtract(out: Tensor, lse: Tensor, lam: Tensor) -> Outputs:
    """out [..., 2 * pairs, v_dim] and lse [..., 2 * pairs] of stacked queries -> those of pairs."""
    first, second = out.unflatten(-2, (out.shape[-2] // 2, 2)).unbind(-2)
    lse1, lse2 = lse.unflatten(-1, (lse.shape[-1] // 2, 2)).unbind(-1)
    # Nothing is known of the lam of a query that sees nothing, such as padding: it may be NaN.
    share = lam.to(lse.dtype).expand(lse2.shape).masked_fill(lse2 == -torch.inf, 0)
    wide = torch.addcmul(widen(first), share[..., None], widen(second), value=-1)
    return wide.to(out.dtype), lse1.contiguous(), lse2.contiguous()


def differential_attention(
    q1: Tensor,  # [batch, q_len, num_q_pairs, k_dim]
    k1: Tensor,  # [batch, kv_len, num_kv_pairs, k_dim]
    q2: Tensor,  # [batch, q_len, num_q_pairs, k_dim]
    k2: Tensor | None,  # [batch, kv_len, num_kv_pairs, k_dim]; None: k1
    v: Tensor,  # [batch, kv_len, num_kv_pairs, v_dim]
    lam: Tensor,  # [num_q_pairs] or [batch, q_len, num_q_pairs]
    left: int,
    right: int,
    scale: float,
) -> Outputs:
    k = k1 if k2 is None else torch.cat((k1, k2), -1)
    q = stack_queries(q1, q2, k2 is None)
    return subtract(*plain.attention(q, k, v, None, left, right, 0.0, scale), lam)


def differential_attention_varlen(
    q1: Tensor,  # [tokens_q, num_q_pairs, k_dim]
    k1: Tensor,  # [tokens_k, num_kv_pairs, k_dim]
    q2: Tensor,  # [tokens_q, num_q_pairs, k_dim]
    k2: Tensor | None,  # [tokens_k, num_kv_pairs, k_dim]; None: k1
    v: Tensor,  # [tokens_k, num_kv_pairs, v_dim]
    lam: Tensor,  # [num_q_pairs] or [tokens_q, num_q_pairs]
    cu_seqlens_q: Tensor,  # [batch + 1]
    cu_seqlens_k: Tensor,  # [batch + 1]
    max_q_len: int,
    max_kv_len: int,
    left: int,
    right: int,
    scale: float,
) -> Outputs:
    k = k1 if k2 is None else torch.cat((k1, k2), -1)
    q = stack_queries(q1, q2, k2 is None)
    lengths = (cu_seqlens_q, cu_seqlens_k, max_q_len, max_kv_len)
    return subtract(*plain.attention_varlen(q, k, v, *lengths, None, left, right, 0.0, scale), lam)


def over_pages(
    attention: Callable[..., tuple[Tensor, Tensor]],
    subtract: Callable[[Tensor, Tensor, Tensor], Outputs],
    stack: Callable[[Tensor, Tensor, bool], Tensor] = stack_queries,
) -> Callable[..., Outputs]:
    """`paged_differential_attention` as one call of a family's `paged_attention`, whose pages hold the
    keys of a pair side by side, and that family's ways to stack and to subtract.
    """

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
        plan: Tensor | None = None,
        split: Sequence[int] = (),
    ) -> Outputs:  # [tokens, num_q_pairs, v_dim], [tokens, num_q_pairs] twice
        q = stack(q1, q2, k_pages.shape[3] == q1.shape[2])
        out, lse = attention(
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
            plan=plan,
            split=list(split),
        )
        return subtract(out, lse, lam)

    return paged_differential_attention


paged_differential_attention = over_pages(paged_attention, subtract)


def supports(call: Any) -> str | None:
    if call.device != "cpu":
        return f"torch's fused attention that returns lse runs on the CPU, not on {call.device!r}"
    keys = call.k_dim if call.shared_keys else 2 * call.k_dim
    if keys != call.v_dim:
        return f"torch's fused attention needs values as wide as a pair's keys, {keys}, got {call.v_dim}"
    return None


KERNELS = {
    "differential_attention": Kernel(differential_attention, supports, efficiency=0.3),
    "differential_attention_varlen": Kernel(
        differential_attention_varlen, supports, efficiency=0.3
    ),
    "paged_differential_attention": Kernel(paged_differential_attention, supports, efficiency=0.25),
}
