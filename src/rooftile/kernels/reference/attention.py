"""Attention in plain PyTorch, scores in full, accumulated in float32 or wider.

Shapes in comments: b batch, m query length, n key length, k key-value heads, g query heads per
key-value head, d key dimension, e value dimension. left and right are the window, -1 unbounded.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from rooftile.kernels import Kernel, anything
from rooftile.kernels.reference.precision import widen


def visible_keys(rows: Tensor, columns: Tensor, left: int, right: int) -> Tensor:
    """[rows, columns] bool: which keys, by position, the queries at these positions see."""
    rows = rows[:, None]
    visible = torch.ones(rows.shape[0], columns.shape[0], dtype=torch.bool, device=rows.device)
    if left >= 0:
        visible &= columns >= rows - left
    if right >= 0:
        visible &= columns <= rows + right
    return visible


def _visible(q: Tensor, k: Tensor, left: int, right: int) -> Tensor:
    m, n = q.shape[1], k.shape[1]
    rows = torch.arange(n - m, n, device=q.device)
    return visible_keys(rows, torch.arange(n, device=q.device), left, right)


def _scores(
    q: Tensor,  # [b, m, k, g, d], wide
    k: Tensor,  # [b, n, k, d], wide
    softcap: float,
    scale: float,
) -> Tensor:  # [b, k, g, m, n]
    scores = torch.einsum("bmkgd,bnkd->bkgmn", q, k) * scale
    return softcap * torch.tanh(scores / softcap) if softcap else scores


def attention(
    q: Tensor,  # [b, m, k * g, d]
    k: Tensor,  # [b, n, k, d]
    v: Tensor,  # [b, n, k, e]
    sink: Tensor | None,  # [k * g]
    left: int,
    right: int,
    softcap: float,
    scale: float,
) -> tuple[Tensor, Tensor]:  # [b, m, k * g, e] in q's dtype, [b, m, k * g]
    kv_heads, group = k.shape[2], q.shape[2] // k.shape[2]
    scores = _scores(widen(q).unflatten(2, (kv_heads, group)), widen(k), softcap, scale)
    visible = _visible(q, k, left, right)
    scores = scores.masked_fill(~visible, -torch.inf)
    lse = torch.logsumexp(scores, -1)  # [b, k, g, m]
    if sink is not None:
        lse = torch.logaddexp(lse, sink.to(lse.dtype).view(kv_heads, group, 1))
    # -inf - -inf is NaN in a row without keys; such a row has no weights.
    weights = torch.exp(scores - lse[..., None]).masked_fill(~visible, 0)
    out = torch.einsum("bkgmn,bnke->bmkge", weights, widen(v))
    out = out.flatten(2, 3).to(q.dtype).contiguous()
    return out, lse.permute(0, 3, 1, 2).flatten(2).contiguous()


def attention_backward(
    q: Tensor,  # [b, m, k * g, d]
    k: Tensor,  # [b, n, k, d]
    v: Tensor,  # [b, n, k, e]
    sink: Tensor | None,  # [k * g]
    out: Tensor,  # [b, m, k * g, e]
    lse: Tensor,  # [b, m, k * g]
    grad_out: Tensor,  # [b, m, k * g, e]
    grad_lse: Tensor,  # [b, m, k * g]
    left: int,
    right: int,
    softcap: float,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v and sink (empty without a sink), from the saved out and lse."""
    heads = (k.shape[2], q.shape[2] // k.shape[2])
    wide_q, wide_k = widen(q).unflatten(2, heads), widen(k)
    g = widen(grad_out).unflatten(2, heads)
    lse = lse.unflatten(2, heads).permute(0, 2, 3, 1)  # [b, k, g, m]
    # d(loss)/d(score) = weight * (grad_out . v - drift), and the sink's score has no value.
    drift = (grad_out * widen(out)).sum(-1) - grad_lse
    drift = drift.unflatten(2, heads).permute(0, 2, 3, 1)

    scores = _scores(wide_q, wide_k, softcap, scale)
    hidden = ~_visible(q, k, left, right)
    weights = torch.exp(scores - lse[..., None]).masked_fill(hidden, 0)
    grad_v = torch.einsum("bkgmn,bmkge->bnke", weights, g)
    grad_scores = torch.einsum("bmkge,bnke->bkgmn", g, widen(v)) - drift[..., None]
    grad_scores = weights * grad_scores.masked_fill(hidden, 0)
    if softcap:
        grad_scores = grad_scores * (1 - (scores / softcap).square())
    grad_scores = grad_scores * scale
    grad_q = torch.einsum("bkgmn,bnkd->bmkgd", grad_scores, wide_k).flatten(2, 3)
    grad_k = torch.einsum("bkgmn,bmkgd->bnkd", grad_scores, wide_q)

    if sink is None:
        grad_sink = lse.new_zeros(0)
    else:
        share = torch.exp(sink.to(lse.dtype).view(*heads, 1) - lse)
        share = torch.where(lse == -torch.inf, 0, -share * drift)
        grad_sink = share.sum((0, 3)).flatten().to(sink.dtype)
    return (
        grad_q.to(q.dtype).contiguous(),
        grad_k.to(k.dtype).contiguous(),
        grad_v.to(v.dtype).contiguous(),
        grad_sink,
    )


def _sequences(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> Iterator[tuple[slice, slice]]:
    q_ends, k_ends = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    for i in range(len(q_ends) - 1):
        yield slice(q_ends[i], q_ends[i + 1]), slice(k_ends[i], k_ends[i + 1])


def attention_varlen(
    q: Tensor,  # [tokens_q, k * g, d]
    k: Tensor,  # [tokens_k, k, d]
    v: Tensor,  # [tokens_k, k, e]
    cu_seqlens_q: Tensor,  # [b + 1]
    cu_seqlens_k: Tensor,  # [b + 1]
    max_q_len: int,
    max_kv_len: int,
    sink: Tensor | None,  # [k * g]
    left: int,
    right: int,
    softcap: float,
    scale: float,
) -> tuple[Tensor, Tensor]:  # [tokens_q, k * g, e], [tokens_q, k * g]
    out, lse = nothing_seen(q, v.shape[-1])
    for queries, keys in _sequences(cu_seqlens_q, cu_seqlens_k):
        one = attention(
            q[None, queries], k[None, keys], v[None, keys], sink, left, right, softcap, scale
        )
        out[queries], lse[queries] = one[0][0], one[1][0]
    return out, lse


def nothing_seen(q: Tensor, v_dim: int) -> tuple[Tensor, Tensor]:
    """out and lse of queries [..., d] that see no key and no sink, to be filled where they do."""
    lse_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    return (
        q.new_zeros(*q.shape[:-1], v_dim),
        q.new_full(q.shape[:-1], -torch.inf, dtype=lse_dtype),
    )


def attention_varlen_backward(
    q: Tensor,  # [tokens_q, k * g, d]
    k: Tensor,  # [tokens_k, k, d]
    v: Tensor,  # [tokens_k, k, e]
    cu_seqlens_q: Tensor,  # [b + 1]
    cu_seqlens_k: Tensor,  # [b + 1]
    max_q_len: int,
    max_kv_len: int,
    sink: Tensor | None,  # [k * g]
    out: Tensor,  # [tokens_q, k * g, e]
    lse: Tensor,  # [tokens_q, k * g]
    grad_out: Tensor,  # [tokens_q, k * g, e]
    grad_lse: Tensor,  # [tokens_q, k * g]
    left: int,
    right: int,
    softcap: float,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    grad_q, grad_k, grad_v = (x.new_zeros(x.shape) for x in (q, k, v))
    grad_sink = lse.new_zeros(0) if sink is None else torch.zeros_like(sink)
    for queries, keys in _sequences(cu_seqlens_q, cu_seqlens_k):
        one = attention_backward(
            q[None, queries],
            k[None, keys],
            v[None, keys],
            sink,
            out[None, queries],
            lse[None, queries],
            grad_out[None, queries],
            grad_lse[None, queries],
            left,
            right,
            softcap,
            scale,
        )
        grad_q[queries], grad_k[keys], grad_v[keys] = one[0][0], one[1][0], one[2][0]
        grad_sink += one[3]
    return grad_q, grad_k, grad_v, grad_sink


KERNELS = {
    "attention": Kernel(attention, anything, efficiency=0.05),
    "attention_backward": Kernel(attention_backward, anything, efficiency=0.05),
    "attention_varlen": Kernel(attention_varlen, anything, efficiency=0.05),
    "attention_varlen_backward": Kernel(attention_varlen_backward, anything, efficiency=0.05),
}
