"""Differential attention on Hopper as one launch of its attention kernels, whose keys are both keys.

A query [q1, 0] meets [k1, k2] as q1 meets k1. That is a third more arithmetic than two softmaxes
over one stream of values need, at the rate of head dims twice as large, which is higher.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from rooftile.kernels import Kernel
from rooftile.kernels.gluon import attention as plain
from rooftile.kernels.gluon import paged
from rooftile.kernels.torch.differential import over_pages, stack_queries
from rooftile.kernels.triton.differential import Outputs, subtract


def both_keys(k1: Tensor, k2: Tensor) -> Tensor:
    """[..., pairs, k_dim] both -> [..., pairs, 2 * k_dim]; a view where they lie side by side."""
    k_dim = k1.shape[-1]
    if (
        k1.stride() == k2.stride()
        and k1.stride(-1) == 1
        and k2.data_ptr() - k1.data_ptr() == k_dim * k1.element_size()
    ):
        return k1.as_strided((*k1.shape[:-1], 2 * k_dim), k1.stride())
    return torch.cat((k1, k2), -1)


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
) -> Outputs:  # [batch, q_len, num_q_pairs, v_dim], [batch, q_len, num_q_pairs] twice
    k = k1 if k2 is None else both_keys(k1, k2)
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
) -> Outputs:  # [tokens_q, num_q_pairs, v_dim], [tokens_q, num_q_pairs] twice
    k = k1 if k2 is None else both_keys(k1, k2)
    q = stack_queries(q1, q2, k2 is None)
    lengths = (cu_seqlens_q, cu_seqlens_k, max_q_len, max_kv_len)
    return subtract(*plain.attention_varlen(q, k, v, *lengths, None, left, right, 0.0, scale), lam)


paged_differential_attention = over_pages(paged.paged_attention, subtract)


def paged_supports(call: Any) -> str | None:
    keys = call.k_dim if call.shared_keys else 2 * call.k_dim
    return paged.supports(SimpleNamespace(**{**vars(call), "k_dim": keys, "kv_dtype": None}))


def supports(call: Any) -> str | None:
    keys = call.k_dim if call.shared_keys else 2 * call.k_dim
    return plain.supports(SimpleNamespace(**{**vars(call), "k_dim": keys}))


KERNELS = {
    "differential_attention": Kernel(differential_attention, supports, efficiency=0.6),
    "differential_attention_varlen": Kernel(
        differential_attention_varlen, supports, efficiency=0.6
    ),
    "paged_differential_attention": Kernel(
        paged_differential_attention, paged_supports, efficiency=0.8
    ),
}
