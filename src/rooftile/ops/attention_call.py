"""The static properties of an attention call, which choose its kernel, and its results' metadata."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class AttentionCall:
    """The static properties that choose a kernel."""

    device: str
    dtype: torch.dtype
    num_q_heads: int
    num_kv_heads: int
    k_dim: int
    v_dim: int
    left: int  # window, -1: unbounded
    right: int
    has_softcap: bool
    has_sink: bool
    page_size: int = 0  # 0: not paged
    kv_dtype: torch.dtype | None = None  # of the pages, where it is not q's
    batch_invariant: bool = False


def attention_call(
    q: Tensor,  # [..., num_q_heads, k_dim]
    k: Tensor,  # [..., num_kv_heads, k_dim]
    v: Tensor,  # [..., num_kv_heads, v_dim]
    sink: Tensor | None,
    left: int,
    right: int,
    softcap: float,
) -> AttentionCall:
    return AttentionCall(
        q.device.type,
        q.dtype,
        q.shape[-2],
        k.shape[-2],
        k.shape[-1],
        v.shape[-1],
        left,
        right,
        has_softcap=softcap != 0,
        has_sink=sink is not None,
    )


def fake_attention(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    lse_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    return q.new_empty(*q.shape[:-1], v.shape[-1]), q.new_empty(q.shape[:-1], dtype=lse_dtype)
