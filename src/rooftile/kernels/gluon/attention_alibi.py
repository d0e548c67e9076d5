"""Attention with linear biases on Hopper: a switch of the attention kernel."""

from torch import Tensor

from rooftile.kernels import Kernel
from rooftile.kernels.gluon import attention as plain
from rooftile.kernels.gluon.attention.forward import supports


def attention_alibi(
    q: Tensor,  # [batch, q_len, num_q_heads, k_dim]
    k: Tensor,  # [batch, kv_len, num_kv_heads, k_dim]
    v: Tensor,  # [batch, kv_len, num_kv_heads, v_dim]
    sink: Tensor | None,  # [num_q_heads]
    slopes: Tensor,  # [num_q_heads]
    left: int,
    right: int,
    softcap: float,
    scale: float,
) -> tuple[Tensor, Tensor]:  # [batch, q_len, num_q_heads, v_dim], [batch, q_len, num_q_heads]
    return plain.attention(q, k, v, sink, left, right, softcap, scale, None, slopes)


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
    left: int,
    right: int,
    softcap: float,
    scale: float,
) -> tuple[Tensor, Tensor]:  # [tokens_q, num_q_heads, v_dim], [tokens_q, num_q_heads]
    return plain.attention_varlen(
        *(q, k, v, cu_seqlens_q, cu_seqlens_k, max_q_len, max_kv_len),
        *(sink, left, right, softcap, scale, None, slopes),
    )


KERNELS = {
    "attention_alibi": Kernel(attention_alibi, supports, efficiency=0.7),
    "attention_varlen_alibi": Kernel(attention_varlen_alibi, supports, efficiency=0.7),
}
