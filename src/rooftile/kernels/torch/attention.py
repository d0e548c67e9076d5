"""Attention through torch's fused CPU kernel, called below its public wrapper for its lse."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rooftile.kernels import Kernel
from rooftile.kernels.reference.attention import nothing_seen, visible_keys

FUSED = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default

# Query rows that share one mask: enough for full tiles, few enough to skip what none of them sees.
MASKED_ROWS = 256


def attend(
    q: Tensor,  # [batch, q_len, num_q_heads, dim]
    k: Tensor,  # [batch, num_kv_heads, kv_len, dim]
    v: Tensor,  # [batch, num_kv_heads, kv_len, dim]
    left: int,
    right: int,
    scale: float,
    out: Tensor,  # [batch, q_len, num_q_heads, dim], zeros
    lse: Tensor,  # [batch, q_len, num_q_heads], -inf
) -> None:
    """Writes out and lse of the queries that see a key; key-value heads serve equal groups."""
    m, n = q.shape[1], k.shape[2]
    # Queries that see nothing stand more than `right` before the first key. The fused kernel
    # would give them lse 0, and it divides by zero when there are no keys.
    first_row = max(0, m - n - right) if right >= 0 else 0
    if n == 0 or first_row >= m or q.shape[0] == 0:
        return
    if scale <= 0:  # the fused kernel scales what it has hidden: -inf would be NaN, or inf
        q, scale = (-q, -scale) if scale < 0 else (q * 0, 1.0)
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    q = q.transpose(1, 2)
    bounded_left, bounded_right = 0 <= left < n - 1, 0 <= right < m - 1
    if not bounded_left and (not bounded_right or (right == 0 and m == n)):
        result = FUSED(q, k, v, 0.0, bounded_right, scale=scale)
        # A row whose scores are all NaN can come out as 0 with lse 0. With a mask it does not.
        if not bool((result[1] == 0).any()):
            out.copy_(result[0].transpose(1, 2))
            lse.copy_(result[1].transpose(1, 2))
            return
    for row in range(first_row, m, MASKED_ROWS):
        end = min(row + MASKED_ROWS, m)
        first, last = n - m + row, n - m + end - 1  # positions of the block's outer queries
        low = max(0, first - left) if bounded_left else 0
        high = min(n, last + right + 1) if bounded_right else n
        visible = visible_keys(torch.arange(first, last + 1), torch.arange(low, high), left, right)
        mask = q.new_zeros(visible.shape).masked_fill_(~visible, -torch.inf)
        result = FUSED(
            q[:, :, row:end],
            k[:, :, low:high],
            v[:, :, low:high],
            attn_mask=mask[None, None],
            scale=scale,
        )
        out[:, row:end] = result[0].transpose(1, 2)
        lse[:, row:end] = result[1].transpose(1, 2)


def add_sink(out: Tensor, lse: Tensor, sink: Tensor | None) -> None:
    """Lets a logit per head join the denominator of out [..., heads, v_dim] and lse, in place."""
    if sink is not None:
        total = torch.logaddexp(lse, sink.to(lse.dtype))
        # A row that saw nothing and whose sink is -inf has no total to take a share of.
        share = torch.exp(lse - total).masked_fill_(lse == -torch.inf, 0)
        out.mul_(share[..., None])
        lse.copy_(total)


def attention(
    q: Tensor,  # [batch, q_len, num_q_heads, dim]
    k: Tensor,  # [batch, kv_len, num_kv_heads, dim]
    v: Tensor,  # [batch, kv_len, num_kv_heads, dim]
    sink: Tensor | None,  # [num_q_heads]
    left: int,
    right: int,
    softcap: float,
    scale: float,
) -> tuple[Tensor, Tensor]:
    out, lse = nothing_seen(q, v.shape[-1])
    attend(q, k.transpose(1, 2), v.transpose(1, 2), left, right, scale, out, lse)
    add_sink(out, lse, sink)
    return out, lse


def attention_varlen(
    q: Tensor,  # [tokens_q, num_q_heads, dim]
    k: Tensor,  # [tokens_k, num_kv_heads, dim]
    v: Tensor,  # [tokens_k, num_kv_heads, dim]
    cu_seqlens_q: Tensor,  # [batch + 1]
    cu_seqlens_k: Tensor,  # [batch + 1]
    max_q_len: int,
    max_kv_len: int,
    sink: Tensor | None,  # [num_q_heads]
    left: int,
    right: int,
    softcap: float,
    scale: float,
) -> tuple[Tensor, Tensor]:
    out, lse = nothing_seen(q, v.shape[-1])
    k, v = k.transpose(0, 1), v.transpose(0, 1)
    q_ends, k_ends = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    for i in range(len(q_ends) - 1):
        queries, keys = slice(q_ends[i], q_ends[i + 1]), slice(k_ends[i], k_ends[i + 1])
        results = (out[None, queries], lse[None, queries])
        attend(q[None, queries], k[None, :, keys], v[None, :, keys], left, right, scale, *results)
    used = slice(q_ends[-1])
    add_sink(out[used], lse[used], sink)
    return out, lse


def supports(call: Any) -> str | None:
    if call.device != "cpu":
        return f"torch's fused attention that returns lse runs on the CPU, not on {call.device!r}"
    if call.has_softcap:
        return "torch's fused attention has no softcap"
    if call.k_dim != call.v_dim:
        return f"torch's fused attention needs k_dim = v_dim, got {call.k_dim} and {call.v_dim}"
    return None


KERNELS = {
    "attention": Kernel(attention, supports, efficiency=0.4),
    "attention_varlen": Kernel(attention_varlen, supports, efficiency=0.4),
}
