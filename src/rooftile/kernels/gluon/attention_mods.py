"""Attention with functions of the caller inlined, on Hopper: a switch of the attention kernel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from rooftile.kernels import Kernel
from rooftile.kernels.gluon import attention as plain
from rooftile.kernels.gluon.attention.forward import supports as supports_attention
from rooftile.kernels.gluon.attention.mods import Mods
from rooftile.kernels.modifiers import functions


def attention_mods(
    q: Tensor,  # [batch, q_len, num_q_heads, k_dim]
    k: Tensor,  # [batch, kv_len, num_kv_heads, k_dim]
    v: Tensor,  # [batch, kv_len, num_kv_heads, v_dim]
    *options: Any,  # sink, left, right, softcap, scale, then the modifiers
) -> tuple[Tensor, Tensor]:  # [batch, q_len, num_q_heads, v_dim], [batch, q_len, num_q_heads]
    rest = (None, None, _mods(*options[-4:]))
    return plain.attention(q, k, v, *options[:-4], *rest)  # type: ignore[call-arg]


def attention_varlen_mods(
    q: Tensor,  # [tokens_q, num_q_heads, k_dim]
    k: Tensor,  # [tokens_k, num_kv_heads, k_dim]
    v: Tensor,  # [tokens_k, num_kv_heads, v_dim]
    *options: Any,  # lengths, sink, left, right, softcap, scale, then the modifiers
) -> tuple[Tensor, Tensor]:  # [tokens_q, num_q_heads, v_dim], [tokens_q, num_q_heads]
    rest = (None, None, _mods(*options[-4:]))
    return plain.attention_varlen(q, k, v, *options[:-4], *rest)  # type: ignore[call-arg]


def _mods(
    score: str, score_tensors: Sequence[Tensor], mask: str, mask_tensors: Sequence[Tensor]
) -> Mods:
    score_functions, mask_functions = functions(score), functions(mask)
    return Mods(
        score_functions and score_functions.fn,
        mask_functions and mask_functions.fn,
        tuple(score_tensors),
        tuple(mask_tensors),
    )


def supports(call: Any) -> str | None:
    for key in (call.score_mod, call.mask_mod):
        found = functions(key)
        if found is not None and found.fn is None:
            return f"{key} was registered without a @triton.jit function"
    return supports_attention(call.attention)


KERNELS = {
    "attention_mods": Kernel(attention_mods, supports, efficiency=0.6),
    "attention_varlen_mods": Kernel(attention_varlen_mods, supports, efficiency=0.6),
}
