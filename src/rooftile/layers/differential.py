"""The differential attention layer: pairs of heads whose softmaxes are subtracted."""

from __future__ import annotations

import math
from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor

from rooftile.layers.attention import AttentionLayer, LayerKV
from rooftile.layers.linear import Linear, RowParallelLinear
from rooftile.layers.norm import RMSNorm
from rooftile.ops.append import APPEND_KV
from rooftile.ops.differential import PAGED_DIFFERENTIAL, differential_call, plan_differential
from rooftile.ops.paged import plan_arguments
from rooftile.ops.rope import ROTARY_EMBEDDING
from rooftile.types import AttentionPlan, KVSpec, PagedBatch


def lambda_init(depth: int) -> float:
    """What lambda begins with in layer number `depth`, counted from 0."""
    return 0.8 - 0.6 * math.exp(-0.3 * depth)


def learned_lambda(q1: Tensor, k1: Tensor, q2: Tensor, k2: Tensor, initial: float) -> Tensor:
    """exp(q1 . k1) - exp(q2 . k2) + initial, of a layer's four vectors [head_dim]: [], float32."""
    first = torch.exp((q1.float() * k1.float()).sum())
    return first - torch.exp((q2.float() * k2.float()).sum()) + initial


class DifferentialAttentionLayer(AttentionLayer):
    """`AttentionLayer` whose heads 2 p and 2 p + 1 are pair p, of queries, keys and values alike.

    lam: a number for every pair (the first version; the values of a pair are one vector of
        2 * head_dim), or what a token's numbers come from, of which the sigmoid is taken (the
        second: pairs are of queries only, and share keys and values).
    head_norm: of each pair's output, 1 - lambda_init included in its weight; the first version's.
    """

    operator = PAGED_DIFFERENTIAL

    def __init__(
        self,
        qkv: Linear,
        out: RowParallelLinear,
        *,
        lam: Tensor | Linear,  # [num_heads / 2] float32, or hidden -> num_heads / 2
        head_norm: RMSNorm | None,
        **options: Any,
    ) -> None:
        super().__init__(qkv, out, **options)
        self.lam = lam
        self.head_norm = head_norm
        self.shares_keys = isinstance(lam, Linear)

    @property
    def needs_hidden(self) -> bool:
        return isinstance(self.lam, Linear)

    def kv_spec(self, dtype: torch.dtype, window: int | None) -> KVSpec:
        if self.shares_keys:
            return super().kv_spec(dtype, window)
        width = 2 * self.head_dim
        return KVSpec(self.num_kv_heads // 2, width, width, dtype, window)

    def call(self, hidden: Tensor, k_pages: Tensor, v_pages: Tensor) -> Hashable:
        q = hidden.new_empty(0, self.num_heads // 2, self.head_dim)
        return differential_call(q, k_pages, v_pages, self.left_window, 0)

    def plan(self, call: Any, batch: PagedBatch, tokens: int) -> tuple[PagedBatch, AttentionPlan]:
        return plan_differential(call, batch, tokens)

    def rotate_append(
        self,
        q: Tensor,  # [tokens, num_heads, head_dim]
        k: Tensor,  # [tokens, num_kv_heads, head_dim]
        v: Tensor,  # [tokens, num_kv_heads, head_dim]
        positions: Tensor,  # [tokens]
        kv: LayerKV,
    ) -> Tensor:  # [tokens, num_heads, head_dim]
        if self.cos_sin is not None:
            q, k = (
                ROTARY_EMBEDDING.handle(heads, positions, self.cos_sin, False, False, "auto")
                for heads in (q, k)
            )
        if not self.shares_keys:
            # Both keys of a pair in one slot, and both values.
            pairs = (self.num_kv_heads // 2, 2 * self.head_dim)
            k, v = k.reshape(-1, *pairs), v.reshape(-1, *pairs)
        APPEND_KV.handle(
            *(k, v, kv.k_pages, kv.v_pages, kv.slots, None, None, False, None, None, "auto")
        )
        return q

    def attend(
        self,
        q: Tensor,  # [tokens, num_heads, head_dim]
        kv: LayerKV,
        x: Tensor | None,  # [tokens, hidden]
    ) -> Tensor:  # [tokens, num_heads / 2, 2 * head_dim], or head_dim
        lam = self.lam
        if isinstance(lam, Linear):
            assert x is not None
            lam = torch.sigmoid(lam(x).float())
        batch = kv.batch
        out: Tensor = PAGED_DIFFERENTIAL.handle(
            *(q[:, 0::2], q[:, 1::2], kv.k_pages, kv.v_pages, lam),
            *(batch.cu_seqlens_q, batch.kv_lens, batch.page_table),
            *(batch.max_q_len, batch.max_kv_len, self.left_window, 0, self.softmax_scale),
            *(*plan_arguments(kv.plan), "auto" if kv.plan is None else kv.plan.kernel),
        )[0]
        return out if self.head_norm is None else self.head_norm(out)
