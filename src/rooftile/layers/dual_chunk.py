"""The attention layer whose positions never leave the range that the model was trained for."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from torch import Tensor

from rooftile.layers.attention import AttentionLayer, LayerKV
from rooftile.layers.linear import Linear, RowParallelLinear
from rooftile.ops.append import APPEND_KV
from rooftile.ops.dual_chunk import PAGED_DUAL_CHUNK, dual_chunk_call, plan_dual_chunk
from rooftile.ops.dual_chunk_rotary import DUAL_CHUNK_ROTARY, DualChunkConfig
from rooftile.ops.paged import plan_arguments
from rooftile.types import AttentionPlan, PagedBatch


class DualChunkAttentionLayer(AttentionLayer):
    """`AttentionLayer` with dual chunk attention.

    Keys are cached turned by their position in their chunk and not scaled; the length factor is in
    the queries alone. So what is cached depends on nothing that comes after it, unless
    dual_chunk.length_factor is "prompt". There is no window.
    """

    operator = PAGED_DUAL_CHUNK

    def __init__(
        self,
        qkv: Linear,
        out: RowParallelLinear,
        *,
        dual_chunk: DualChunkConfig,
        cos_sin: Tensor,  # [dual_chunk.num_positions or more, 2, rotary_dim / 2] float32
        **options: Any,
    ) -> None:
        super().__init__(qkv, out, cos_sin=cos_sin, **options)
        self.dual_chunk = dual_chunk

    def call(self, hidden: Tensor, k_pages: Tensor, v_pages: Tensor) -> Hashable:
        q = hidden.new_empty(0, self.num_heads, self.head_dim)
        return dual_chunk_call(q, k_pages, v_pages, self.dual_chunk.chunk_len, self.softcap)

    def plan(self, call: Any, batch: PagedBatch, tokens: int) -> tuple[PagedBatch, AttentionPlan]:
        return plan_dual_chunk(call, batch, tokens)

    @property
    def _chunks(self) -> tuple[int, int, int]:
        chunk = self.dual_chunk
        return chunk.chunk_size, chunk.local_size, chunk.original_max_position or 0

    def rotate_append(
        self,
        q: Tensor,  # [tokens, num_heads, head_dim]
        k: Tensor,  # [tokens, num_kv_heads, head_dim]
        v: Tensor,  # [tokens, num_kv_heads, head_dim]
        positions: Tensor,  # [tokens]
        kv: LayerKV,
    ) -> Tensor:  # [3, tokens, num_heads, head_dim]
        queries: Tensor = DUAL_CHUNK_ROTARY.handle(
            *(q, positions, kv.lengths, self.cos_sin, False, *self._chunks, "auto")
        )
        in_chunk = positions % self.dual_chunk.chunk_len
        APPEND_KV.handle(
            *(k, v, kv.k_pages, kv.v_pages, kv.slots, in_chunk, self.cos_sin),
            *(False, None, None, "auto"),
        )
        return queries

    def attend(
        self,
        q: Tensor,  # [3, tokens, num_heads, head_dim]
        kv: LayerKV,
        x: Tensor | None,
    ) -> Tensor:  # [tokens, num_heads, head_dim]
        batch = kv.batch
        out: Tensor = PAGED_DUAL_CHUNK.handle(
            *(*q.unbind(0), kv.k_pages, kv.v_pages, batch.cu_seqlens_q, batch.kv_lens),
            *(batch.page_table, batch.max_q_len, batch.max_kv_len, self.dual_chunk.chunk_len),
            *(self.softcap, self.softmax_scale, *plan_arguments(kv.plan)),
            "auto" if kv.plan is None else kv.plan.kernel,
        )[0]
        return out
