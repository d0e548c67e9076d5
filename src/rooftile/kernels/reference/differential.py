"""Differential attention in plain PyTorch: two attentions with all their scores, subtracted.

Shapes in comments: b batch, m query length, n key length, p pairs of queries, k pairs of keys, d key
dimension, e value dimension. lam is [p], or has one number for each query and pair.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rooftile.kernels import Kernel, anything
from rooftile.kernels.reference import attention as plain
from rooftile.kernels.reference.attention import nothing_seen
from rooftile.kernels.reference.paged import first_visible
from rooftile.kernels.reference.precision import widen

Outputs = tuple[Tensor, Tensor, Tensor]


def differential_attention(
    q1: Tensor,  # [b, m, p, d]
    k1: Tensor,  # [b, n, k, d]
    q2: Tensor,  # [b, m, p, d]
    k2: Tensor | None,  # [b, n, k, d]; None: k1
    v: Tensor,  # [b, n, k, e]
    lam: Tensor,  # [p] or [b, m, p]
    left: int,
    right: int,
    scale: float,
) -> Outputs:  # [b, m, p, e] in q1's dtype, [b, m, p], [b, m, p]
    out1, lse1, out2, lse2 = _both(q1, k1, q2, k2, v, left, right, scale)
    out = out1 - _weights(lam, lse2)[..., None] * out2
    return out.to(q1.dtype), lse1, lse2


def _both(
    q1: Tensor,
    k1: Tensor,
    q2: Tensor,
    k2: Tensor | None,
    v: Tensor,
    left: int,
    right: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """out1, lse1, out2, lse2 in float32 or wider."""
    wide_v = widen(v)
    return (
        *plain.attention(widen(q1), widen(k1), wide_v, None, left, right, 0.0, scale),
        *plain.attention(
            widen(q2), widen(k1 if k2 is None else k2), wide_v, None, left, right, 0.0, scale
        ),
    )


def _weights(lam: Tensor, lse2: Tensor) -> Tensor:
    """lam of each query [b, m, p] in lse2's dtype; 0, whatever it holds, where a query sees nothing."""
    return lam.to(lse2.dtype).expand(lse2.shape).masked_fill(lse2 == -torch.inf, 0)


def differential_attention_backward(
    q1: Tensor,  # [b, m, p, d]
    k1: Tensor,  # [b, n, k, d]
    q2: Tensor,  # [b, m, p, d]
    k2: Tensor | None,  # [b, n, k, d]; None: k1
    v: Tensor,  # [b, n, k, e]
    lam: Tensor,  # [p] or [b, m, p]
    lse1: Tensor,  # [b, m, p]
    lse2: Tensor,  # [b, m, p]
    grad_out: Tensor,  # [b, m, p, e]
    grad_lse1: Tensor,  # [b, m, p]
    grad_lse2: Tensor,  # [b, m, p]
    left: int,
    right: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q1, k1, q2, k2 (empty without one), v and lam."""
    out1, _, out2, _ = _both(q1, k1, q2, k2, v, left, right, scale)
    g = widen(grad_out)
    wide_lam = _weights(lam, lse2)[..., None]
    options = (left, right, 0.0, scale)
    wide_v, second = widen(v), widen(k1 if k2 is None else k2)
    grad_q1, grad_k1, grad_v1, _ = plain.attention_backward(
        widen(q1), widen(k1), wide_v, None, out1, lse1, g, grad_lse1, *options
    )
    grad_q2, grad_k2, grad_v2, _ = plain.attention_backward(
        widen(q2), second, wide_v, None, out2, lse2, -wide_lam * g, grad_lse2, *options
    )
    if k2 is None:
        grad_k1, grad_k2 = grad_k1 + grad_k2, grad_k2.new_empty(0)
    grad_lam = -(g * out2).sum(-1).sum_to_size(lam.shape)
    return (
        grad_q1.to(q1.dtype),
        grad_k1.to(k1.dtype),
        grad_q2.to(q2.dtype),
        grad_k2.to(k1.dtype),
        (grad_v1 + grad_v2).to(v.dtype),
        grad_lam.to(lam.dtype),
    )


def of_tokens(lam: Tensor, tokens: slice) -> Tensor:
    """What a ragged batch's lam is for some of its tokens."""
    return lam if lam.dim() == 1 else lam[tokens]


def differential_attention_varlen(
    q1: Tensor,  # [tokens_q, p, d]
    k1: Tensor,  # [tokens_k, k, d]
    q2: Tensor,  # [tokens_q, p, d]
    k2: Tensor | None,  # [tokens_k, k, d]; None: k1
    v: Tensor,  # [tokens_k, k, e]
    lam: Tensor,  # [p] or [tokens_q, p]
    cu_seqlens_q: Tensor,  # [b + 1]
    cu_seqlens_k: Tensor,  # [b + 1]
    max_q_len: int,
    max_kv_len: int,
    left: int,
    right: int,
    scale: float,
) -> Outputs:  # [tokens_q, p, e], [tokens_q, p], [tokens_q, p]
    out, lse1 = nothing_seen(q1, v.shape[-1])
    lse2 = lse1.clone()
    q_ends, k_ends = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    for i in range(len(q_ends) - 1):
        rows, keys = slice(q_ends[i], q_ends[i + 1]), slice(k_ends[i], k_ends[i + 1])
        one = differential_attention(
            *(q1[None, rows], k1[None, keys], q2[None, rows]),
            *(None if k2 is None else k2[None, keys], v[None, keys], of_tokens(lam, rows)),
            *(left, right, scale),
        )
        out[rows], lse1[rows], lse2[rows] = (x[0] for x in one)
    return out, lse1, lse2


def differential_attention_varlen_backward(
    q1: Tensor,  # [tokens_q, p, d]
    k1: Tensor,  # [tokens_k, k, d]
    q2: Tensor,  # [tokens_q, p, d]
    k2: Tensor | None,  # [tokens_k, k, d]; None: k1
    v: Tensor,  # [tokens_k, k, e]
    lam: Tensor,  # [p] or [tokens_q, p]
    cu_seqlens_q: Tensor,  # [b + 1]
    cu_seqlens_k: Tensor,  # [b + 1]
    max_q_len: int,
    max_kv_len: int,
    lse1: Tensor,  # [tokens_q, p]
    lse2: Tensor,  # [tokens_q, p]
    grad_out: Tensor,  # [tokens_q, p, e]
    grad_lse1: Tensor,  # [tokens_q, p]
    grad_lse2: Tensor,  # [tokens_q, p]
    left: int,
    right: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    grad_q1, grad_q2, grad_k1, grad_v = (x.new_zeros(x.shape) for x in (q1, q2, k1, v))
    grad_k2 = k1.new_zeros(0 if k2 is None else k2.shape)
    grad_lam = torch.zeros_like(lam, memory_format=torch.contiguous_format)
    q_ends, k_ends = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    for i in range(len(q_ends) - 1):
        rows, keys = slice(q_ends[i], q_ends[i + 1]), slice(k_ends[i], k_ends[i + 1])
        one = differential_attention_backward(
            q1[None, rows],
            k1[None, keys],
            q2[None, rows],
            None if k2 is None else k2[None, keys],
            v[None, keys],
            of_tokens(lam, rows),
            lse1[None, rows],
            lse2[None, rows],
            grad_out[None, rows],
            grad_lse1[None, rows],
            grad_lse2[None, rows],
            left,
            right,
            scale,
        )
        grad_q1[rows], grad_k1[keys], grad_q2[rows], grad_v[keys] = (
            one[at][0] for at in (0, 1, 2, 4)
        )
        if k2 is not None:
            grad_k2[keys] = one[3][0]
        if lam.dim() == 1:
            grad_lam += one[5]
        else:
            grad_lam[rows] = one[5]
    return grad_q1, grad_k1, grad_q2, grad_k2, grad_v, grad_lam


def paged_differential_attention(
    q1: Tensor,  # [tokens, p, d]
    q2: Tensor,  # [tokens, p, d]
    k_pages: Tensor,  # [num_pages, k, page_size, 2 d or d]
    v_pages: Tensor,  # [num_pages, k, page_size, e]
    lam: Tensor,  # [p] or [tokens, p]
    cu_seqlens_q: Tensor,  # [batch + 1]
    kv_lens: Tensor,  # [batch]
    page_table: Tensor,  # [batch, max_pages]
    max_q_len: int,
    max_kv_len: int,
    left: int,
    right: int,
    scale: float,
    plan: Tensor | None = None,  # this kernel follows none
    split: Sequence[int] = (),
) -> Outputs:  # [tokens, p, e], [tokens, p], [tokens, p]
    out, lse1 = nothing_seen(q1, v_pages.shape[-1])
    lse2 = lse1.clone()
    page_size, k_dim = k_pages.shape[2], q1.shape[2]
    ends = cu_seqlens_q.tolist()
    for i, kv_len in enumerate(kv_lens.tolist()):
        rows = slice(ends[i], ends[i + 1])
        q_len = ends[i + 1] - ends[i]
        if q_len == 0:
            continue
        # Pages wholly outside the window may be gone, so they are not even looked up.
        first = first_visible(q_len, kv_len, left)
        pages = page_table[i, first // page_size : -(-kv_len // page_size)].long()
        skipped = first // page_size * page_size
        k, v = (
            x[pages].transpose(1, 2).flatten(0, 1)[None, first - skipped : kv_len - skipped]
            for x in (k_pages, v_pages)
        )
        k2 = None if k.shape[3] == k_dim else k[..., k_dim:]
        one = differential_attention(
            *(q1[None, rows], k[..., :k_dim], q2[None, rows], k2, v, of_tokens(lam, rows)),
            *(left, right, scale),
        )
        out[rows], lse1[rows], lse2[rows] = (x[0] for x in one)
    return out, lse1, lse2


KERNELS = {
    "differential_attention": Kernel(differential_attention, anything, efficiency=0.05),
    "differential_attention_backward": Kernel(
        differential_attention_backward, anything, efficiency=0.05
    ),
    "differential_attention_varlen": Kernel(
        differential_attention_varlen, anything, efficiency=0.05
    ),
    "differential_attention_varlen_backward": Kernel(
        differential_attention_varlen_backward, anything, efficiency=0.05
    ),
    "paged_differential_attention": Kernel(paged_differential_attention, anything, efficiency=0.05),
}
