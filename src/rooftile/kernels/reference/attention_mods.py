"""Attention with modified scores and masks in plain PyTorch, differentiable by autograd as it is.

Shapes in comments: b batch, m query length, n key length, h query heads, k key-value heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rooftile.kernels import Kernel, anything
from rooftile.kernels.modifiers import functions
from rooftile.kernels.reference.attention import nothing_seen, visible_keys
from rooftile.kernels.reference.precision import widen

HIDDEN = -1e30  # a score from here on hides its key, as -inf does


def attention_mods(
    q: Tensor,  # [b, m, h, d]
    k: Tensor,  # [b, n, k, d]
    v: Tensor,  # [b, n, k, e]
    sink: Tensor | None,  # [h]
    left: int,
    right: int,
    softcap: float,
    scale: float,
    score_mod: str,
    score_tensors: Sequence[Tensor],
    mask_mod: str,
    mask_tensors: Sequence[Tensor],
    first: int = 0,  # index of the first sequence
) -> tuple[Tensor, Tensor]:  # [b, m, h, e] in q's dtype, [b, m, h]
    (b, m, h, _), n = q.shape, k.shape[1]
    group = h // k.shape[2]
    keys, values = (widen(x).repeat_interleave(group, 2) for x in (k, v))
    scores = torch.einsum("bmhd,bnhd->bhmn", widen(q), keys) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    batch = torch.arange(first, first + b, device=q.device).view(b, 1, 1, 1)
    head = torch.arange(h, device=q.device).view(h, 1, 1)
    row, column = torch.arange(m, device=q.device), torch.arange(n, device=q.device)
    indices = (batch, head, row[:, None], column)
    modifier, mask = functions(score_mod), functions(mask_mod)
    if modifier is not None:
        changed = modifier.reference(scores, *indices, *score_tensors)
        scores = _like_scores("score_mod", changed, scores.shape).expand(b, h, m, n)
    visible = visible_keys(row + n - m, column, left, right) & ~(scores <= HIDDEN)
    if mask is not None:
        seen = mask.reference(*indices, *mask_tensors)
        visible = visible & _like_scores("mask_mod", seen, scores.shape)
    scores = scores.to(keys.dtype).masked_fill(~visible, -torch.inf)
    # No logsumexp: its gradient is NaN in a row that sees nothing.
    sinks = None if sink is None else sink.to(scores.dtype).view(h, 1)
    highest = scores.detach().amax(-1) if n else scores.new_full((b, h, m), -torch.inf)
    if sinks is not None:
        highest = torch.maximum(highest, sinks.detach())
    highest = highest.masked_fill(highest == -torch.inf, 0)
    weights = torch.exp(scores - highest[..., None])  # [b, h, m, n]
    total = weights.sum(-1)
    if sinks is not None:
        total = total + torch.exp(sinks - highest)
    empty = total == 0
    total = total.masked_fill(empty, 1)
    out = torch.einsum("bhmn,bnhe->bmhe", weights / total[..., None], values)
    lse = (highest + torch.log(total)).masked_fill(empty, -torch.inf)
    return out.to(q.dtype).contiguous(), lse.transpose(1, 2).contiguous()


def _like_scores(name: str, result: Any, shape: Sequence[int]) -> Tensor:
    """What a modifier of the caller returned, if it is what it should be."""
    if isinstance(result, bool | int | float):
        result = torch.tensor(result)
    mask = name == "mask_mod"
    wanted = f"{'booleans' if mask else 'numbers'} that broadcast to {list(shape)}"
    if not isinstance(result, Tensor):
        raise ValueError(f"{name} returned {result!r:.80}; it must return {wanted}")
    if result.is_complex() or (result.dtype == torch.bool) != mask:
        raise ValueError(f"{name} returned {result.dtype}; it must return {wanted}")
    fits = zip(reversed(result.shape), reversed(shape), strict=False)
    if result.dim() > len(shape) or any(one not in (1, whole) for one, whole in fits):
        raise ValueError(f"{name} returned shape {list(result.shape)}; it must return {wanted}")
    return result


def attention_varlen_mods(
    q: Tensor,  # [tokens_q, h, d]
    k: Tensor,  # [tokens_k, k, d]
    v: Tensor,  # [tokens_k, k, e]
    cu_seqlens_q: Tensor,  # [b + 1]
    cu_seqlens_k: Tensor,  # [b + 1]
    max_q_len: int,
    max_kv_len: int,
    *options: Any,  # as attention_mods, from sink to mask_tensors
) -> tuple[Tensor, Tensor]:  # [tokens_q, h, e], [tokens_q, h]
    q_ends, k_ends = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    parts = []
    for i in range(len(q_ends) - 1):
        queries, keys = slice(q_ends[i], q_ends[i + 1]), slice(k_ends[i], k_ends[i + 1])
        one = attention_mods(q[None, queries], k[None, keys], v[None, keys], *options, i)  # type: ignore[call-arg]
        parts.append((one[0][0], one[1][0]))
    parts.append(nothing_seen(q[q_ends[-1] :], v.shape[-1]))  # padding
    return torch.cat([out for out, _ in parts]), torch.cat([lse for _, lse in parts])


KERNELS = {
    "attention_mods": Kernel(attention_mods, anything, efficiency=0.02),
    "attention_varlen_mods": Kernel(attention_varlen_mods, anything, efficiency=0.02),
}
