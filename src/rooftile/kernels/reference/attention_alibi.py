"""Attention with linear biases in plain PyTorch: attention with a modified score.

Differentiable by autograd as it is, in the slopes too.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rooftile.kernels import Kernel, anything
from rooftile.kernels.modifiers import register
from rooftile.kernels.reference.attention_mods import attention_mods, attention_varlen_mods


def lower_by_distance(
    score: Tensor, batch: Tensor, head: Tensor, i: Tensor, j: Tensor,
    slopes: Tensor,  # [num_q_heads]
    offsets: Tensor,  # [batch], kv_len - q_len
) -> Tensor:  # fmt: skip
    return score - slopes.to(score.dtype)[head] * (i + offsets[batch] - j).abs()


KEY = register("score", None, lower_by_distance).key


def offsets_of(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> Tensor:  # [batch + 1] -> [batch]
    return cu_seqlens_k.diff() - cu_seqlens_q.diff()


def attention_alibi(
    q: Tensor,  # [batch, q_len, num_q_heads, k_dim]
    k: Tensor,  # [batch, kv_len, num_kv_heads, k_dim]
    v: Tensor,  # [batch, kv_len, num_kv_heads, v_dim]
    sink: Tensor | None,  # [num_q_heads]
    slopes: Tensor,  # [num_q_heads]
    *options: Any,  # left, right, softcap, scale
) -> tuple[Tensor, Tensor]:  # [batch, q_len, num_q_heads, v_dim], [batch, q_len, num_q_heads]
    offsets = torch.full((q.shape[0],), k.shape[1] - q.shape[1], device=q.device)
    rest = (sink, *options, KEY, (slopes, offsets), "", ())
    return attention_mods(q, k, v, *rest)


def attention_varlen_alibi(
    q: Tensor,  # [tokens_q, num_q_heads, k_dim]
    k: Tensor,  # [tokens_k, num_kv_heads, k_dim]
    v: Tensor,  # [tokens_k, num_kv_heads, v_dim]
    cu_seqlens_q: Tensor,  # [batch + 1]
    cu_seqlens_k: Tensor,  # [batch + 1]
    max_q_len: int,
    max_kv_len: int,
    sink: Tensor | None,  # [num_q_heads]
    slopes: Tensor,  # [num_q_heads]
    *options: Any,  # left, right, softcap, scale
) -> tuple[Tensor, Tensor]:  # [tokens_q, num_q_heads, v_dim], [tokens_q, num_q_heads]
    lengths = (cu_seqlens_q, cu_seqlens_k)
    tensors = (slopes, offsets_of(*lengths))
    rest = (max_q_len, max_kv_len, sink, *options, KEY, tensors, "", ())
    return attention_varlen_mods(q, k, v, *lengths, *rest)


KERNELS = {
    "attention_alibi": Kernel(attention_alibi, anything, efficiency=0.02),
    "attention_varlen_alibi": Kernel(attention_varlen_alibi, anything, efficiency=0.02),
}
