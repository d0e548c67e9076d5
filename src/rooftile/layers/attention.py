"""The attention layer over paged memory."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rooftile.layers.linear import Linear, RowParallelLinear
from rooftile.layers.norm import ProjectionNorm, RMSNorm
from rooftile.ops.append import APPEND_KV
from rooftile.ops.operator import Operator
from rooftile.ops.paged import PAGED_ATTENTION, make_plan, paged_call, plan_arguments
from rooftile.ops.qkv import NORM_ROTATE_APPEND
from rooftile.ops.rope import ROTARY_EMBEDDING
from rooftile.types import AttentionPlan, KVSpec, PagedBatch


@dataclass(frozen=True)
class LayerKV:
    """One layer's pages, and where this step's tokens go in them.

    batch: with a plan, what `AttentionLayer.plan` returned with it.
    lengths: of the text that each token's query is scaled for, where the model asks for whole
        prompts' (`Decoder.needs_lengths`); `None`: up to and with the token.
    """

    k_pages: Tensor  # [num_pages, num_kv_heads, page_size, head_dim]
    v_pages: Tensor  # [num_pages, num_kv_heads, page_size, head_dim]
    slots: Tensor  # [tokens] int64: page * page_size + offset; -1 writes nothing
    batch: PagedBatch
    lengths: Tensor | None = None  # [tokens] int64
    plan: AttentionPlan | None = None  # of the step, for layers of equal shapes; None: each its own


class AttentionLayer:
    """Causal grouped-query attention: fused q, k, v projection, norms, rotation, pages, output.

    The heads are this rank's. `cos_sin` None means that positions are not encoded here. Calls the
    operators' unchecked handles: whoever makes a step's `LayerKV`s validates them once for all
    layers (`Decoder.forward` says what must hold).

    operator: what attends. Of a layer that follows plans, `call` are the static properties that
    choose a kernel, and layers with equal calls may share a step's plan.
    """

    operator: Operator = PAGED_ATTENTION

    def __init__(
        self,
        qkv: Linear,  # rows: all q heads, then all k heads, then all v heads
        out: RowParallelLinear,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        cos_sin: Tensor | None,  # [max_position, 2, rotary_dim / 2] float32
        window: int | None = None,
        softmax_scale: float | None = None,
        softcap: float = 0.0,
        q_norm: RMSNorm | ProjectionNorm | None = None,
        k_norm: RMSNorm | ProjectionNorm | None = None,
    ) -> None:
        self.qkv = qkv
        self.out = out
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.cos_sin = cos_sin
        self.left_window = -1 if window is None else window
        self.softmax_scale = head_dim**-0.5 if softmax_scale is None else softmax_scale
        self.softcap = softcap
        self.q_norm = q_norm
        self.k_norm = k_norm

    def kv_spec(self, dtype: torch.dtype, window: int | None) -> KVSpec:
        """What it keeps per token."""
        return KVSpec(self.num_kv_heads, self.head_dim, self.head_dim, dtype, window)

    def __call__(
        self,
        x: Tensor,  # [tokens, hidden]
        positions: Tensor,  # [tokens]
        kv: LayerKV,
    ) -> Tensor:
        return self.finish(self.qkv(x), positions, kv, x)

    @property
    def needs_hidden(self) -> bool:
        """Whether it takes more of a token than its queries, keys and values."""
        return False

    @property
    def _joins(self) -> bool:
        """Whether one operator does all between the q, k, v product and attention."""
        norms = (self.q_norm, self.k_norm)
        return norms == (None, None) or all(type(norm) is RMSNorm for norm in norms)

    @property
    def _chunks(self) -> tuple[int, int, int]:
        """chunk_size, local_size and original_max_position of a layer with dual chunk attention."""
        return 0, 0, 0

    def finish(
        self,
        qkv: Tensor,  # [tokens, (num_heads + 2 * num_kv_heads) * head_dim]
        positions: Tensor,  # [tokens]
        kv: LayerKV,
        x: Tensor | None = None,  # [tokens, hidden], what qkv was made of; where `needs_hidden`
    ) -> Tensor:  # [tokens, hidden]
        """All after the q, k, v product."""
        if qkv.is_cuda and self._joins:
            q = self._norm_rotate_append(qkv, positions, kv)
        else:
            heads, kv_heads = self.num_heads, self.num_kv_heads
            qkv = qkv.unflatten(-1, (heads + 2 * kv_heads, self.head_dim))
            q, k, v = qkv.split((heads, kv_heads, kv_heads), dim=1)  # [tokens, heads, head_dim]
            if self.q_norm is not None:
                q = self.q_norm(q)
            if self.k_norm is not None:
                k = self.k_norm(k)
            q = self.rotate_append(q, k, v, positions, kv)
        return self.out(self.attend(q, kv, x).flatten(1))

    def _norm_rotate_append(
        self,
        qkv: Tensor,  # [tokens, (num_heads + 2 * num_kv_heads) * head_dim]
        positions: Tensor,  # [tokens]
        kv: LayerKV,
    ) -> Tensor:  # what `attend` takes
        q_norm, k_norm = self.q_norm, self.k_norm
        assert not isinstance(q_norm, ProjectionNorm)
        assert not isinstance(k_norm, ProjectionNorm)
        q: Tensor = NORM_ROTATE_APPEND.handle(
            qkv,
            None if q_norm is None else q_norm.weight,
            None if k_norm is None else k_norm.weight,
            0.0 if q_norm is None else q_norm.eps,
            0.0 if q_norm is None else q_norm.offset,
            *(positions, self.cos_sin, kv.k_pages, kv.v_pages, kv.slots),
            *(self.num_heads, self.num_kv_heads, *self._chunks, kv.lengths, "auto"),
        )
        return q

    def rotate_append(
        self,
        q: Tensor,  # [tokens, num_heads, head_dim], not rotated
        k: Tensor,  # [tokens, num_kv_heads, head_dim], not rotated
        v: Tensor,  # [tokens, num_kv_heads, head_dim]
        positions: Tensor,  # [tokens]
        kv: LayerKV,
    ) -> Tensor:  # what `attend` takes
        """Writes k and v into their slots; returns the queries as they meet the keys."""
        if self.cos_sin is not None:
            q = ROTARY_EMBEDDING.handle(q, positions, self.cos_sin, False, False, "auto")
        key_positions = None if self.cos_sin is None else positions
        APPEND_KV.handle(
            *(k, v, kv.k_pages, kv.v_pages, kv.slots, key_positions, self.cos_sin, False),
            *(None, None, "auto"),
        )
        return q

    def call(self, hidden: Tensor, k_pages: Tensor, v_pages: Tensor) -> Hashable:
        """The static properties of `operator` on such hidden states and pages."""
        q = hidden.new_empty(0, self.num_heads, self.head_dim)
        return paged_call(q, k_pages, v_pages, None, self.left_window, 0, self.softcap)

    def plan(self, call: Any, batch: PagedBatch, tokens: int) -> tuple[PagedBatch, AttentionPlan]:
        """A step's plan, and the batch as `attend` then takes it. tokens: those of the step, with
        padding."""
        return batch, make_plan(call, batch, tokens, "auto")

    def attend(
        self,
        q: Tensor,  # [tokens, num_heads, head_dim], rotated
        kv: LayerKV,
        x: Tensor | None,  # [tokens, hidden], what they were made of; where `needs_hidden`
    ) -> Tensor:  # [tokens, heads, dim], as many numbers a token as the output matrix takes
        """Of the step's queries to what lies in the pages."""
        batch = kv.batch
        out, _ = PAGED_ATTENTION.handle(
            *(q, kv.k_pages, kv.v_pages, batch.cu_seqlens_q, batch.kv_lens, batch.page_table),
            *(batch.max_q_len, batch.max_kv_len, None, self.left_window, 0, self.softcap),
            *(self.softmax_scale, None, None, False, *plan_arguments(kv.plan), False),
            "auto" if kv.plan is None else kv.plan.kernel,
        )
        return out
