"""Attention with linear biases in portable Triton: attention with a modified score."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from rooftile.kernels import Kernel
from rooftile.kernels.reference.attention_alibi import offsets_of
from rooftile.kernels.triton import attention as plain
from rooftile.kernels.triton.attention import Mods


@triton.jit
def _lower_by_distance(s, b, h, i, j, slopes, offsets):  # type: ignore[no-untyped-def]
    return s - tl.load(slopes + h) * tl.abs(i + tl.load(offsets + b) - j)


def attention_alibi(
    q: Tensor,  # [batch, q_len, num_q_heads, k_dim]
    k: Tensor,  # [batch, kv_len, num_kv_heads, k_dim]
    v: Tensor,  # [batch, kv_len, num_kv_heads, v_dim]
    sink: Tensor | None,  # [num_q_heads]
    slopes: Tensor,  # [num_q_heads]
    *options: Any,  # left, right, softcap, scale
) -> tuple[Tensor, Tensor]:  # [batch, q_len, num_q_heads, v_dim], [batch, q_len, num_q_heads]
    offset = k.shape[1] - q.shape[1]
    offsets = torch.full((q.shape[0],), offset, dtype=torch.int32, device=q.device)
    mods = Mods(_lower_by_distance, (slopes.float(), offsets), None, ())
    return plain.attention(q, k, v, sink, *options, mods)  # type: ignore[call-arg]


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
    tensors = (slopes.float(), offsets_of(*lengths).to(torch.int32))
    mods = Mods(_lower_by_distance, tensors, None, ())
    rest = (max_q_len, max_kv_len, sink, *options, mods)
    return plain.attention_varlen(q, k, v, *lengths, *rest)


KERNELS = {
    "attention_alibi": Kernel(attention_alibi, plain.supports, efficiency=0.4),
    "attention_varlen_alibi": Kernel(attention_varlen_alibi, plain.supports, efficiency=0.4),
}
