"""A decoder whose layers run as one native call, where the machine and the model allow it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rooftile.kernels.cpu import library
from rooftile.kernels.cpu.arguments import ACTIVATIONS, DTYPES, FORMATS, TILE
from rooftile.kernels.cpu.decoder import (
    DecoderWeights,
    GroupBatch,
    LayerWeights,
    NativeDecoder,
)
from rooftile.layers.attention import AttentionLayer, LayerKV
from rooftile.layers.mlp import GatedMlp
from rooftile.layers.norm import RMSNorm
from rooftile.models.decoder import Decoder, DecoderLayer


def refusal(decoder: Decoder) -> str | None:
    """Why `NativeStep` cannot run this decoder, or `None`."""
    reason = library.refusal()
    if reason is not None:
        return reason
    if decoder.head.group.size > 1:
        return "its matrices are shared among several processes"
    if decoder.dtype not in DTYPES:
        return f"it computes in {decoder.dtype}"
    for index, layer in enumerate(decoder.layers):
        reason = _layer_refusal(layer)
        if reason is not None:
            return f"layer {index}: {reason}"
    if decoder.head.linear.weight.format not in FORMATS:
        return f"its head has the format {decoder.head.linear.weight.format!r}"
    if decoder.head.linear.bias is not None:
        return "its head has a bias"
    return None


def _layer_refusal(layer: DecoderLayer) -> str | None:
    if not isinstance(layer.attention_norm, RMSNorm) or not isinstance(layer.mlp_norm, RMSNorm):
        return "it has no norms before attention and feed-forward layer"
    if not isinstance(layer.mlp, GatedMlp):
        return "its feed-forward layer is a mixture of experts"
    if layer.mlp.activation not in ACTIVATIONS:
        return f"its activation is {layer.mlp.activation!r}"
    attention = layer.attention
    if type(attention) is not AttentionLayer:
        return f"its attention is a {type(attention).__name__}"
    for norm in (attention.q_norm, attention.k_norm):
        if norm is not None and not isinstance(norm, RMSNorm):
            return "its norms of q and k span all heads"
    for linear in (attention.qkv, attention.out, layer.mlp.gate_up, layer.mlp.down):
        if linear.weight.format not in FORMATS:
            return f"a matrix has the format {linear.weight.format!r}"
    if layer.mlp.gate_up.weight.shape[0] % (2 * TILE):
        return f"its feed-forward layer has a width that is no multiple of {TILE}"
    return None


class NativeStep:
    """What the runner needs of a `Decoder`, its layers in one native call.

    Equal to the decoder but for rounding: the residual stream and what is between two operators
    stay in float32.

    Raises:
        NotImplementedError: a decoder that `refusal` refuses.
    """

    def __init__(self, decoder: Decoder) -> None:
        reason = refusal(decoder)
        if reason is not None:
            raise NotImplementedError(f"the native step cannot run this decoder: {reason}")
        self.config = decoder.config
        self.kv_specs = decoder.kv_specs
        self.needs_lengths = decoder.needs_lengths
        self.embedding = decoder.embedding
        self._head = decoder.head
        embedding = decoder.embedding
        self._native = NativeDecoder(
            DecoderWeights(
                layers=tuple(_layer(layer) for layer in decoder.layers),
                embedding=embedding.weight,
                embedding_scale=embedding.scale,
                residual_scale=decoder.config.residual_scale,
                norm=_norm(decoder.norm),
                head=decoder.head.linear.weight,
                eps=decoder.config.norm_eps,
                dtype=decoder.dtype,
            )
        )

    def forward(
        self,
        token_ids: Tensor,  # [tokens] int64
        positions: Tensor,  # [tokens] int64
        kv: Sequence[LayerKV],  # one per layer
    ) -> Tensor:
        """As `Decoder.forward`."""
        groups: list[GroupBatch] = []
        of_slots: dict[int, int] = {}  # layers of one KV group share their tensors
        for index, layer in enumerate(kv):
            number = of_slots.setdefault(id(layer.slots), len(groups))
            if number == len(groups):
                table = layer.batch.page_table
                if table.dtype != torch.int32 or table.stride(1) != 1:
                    table = table.int().contiguous()
                slots = layer.slots.long().contiguous()
                groups.append(GroupBatch(slots, table, layer.k_pages.shape[2]))
            self._native.place_pages(index, number, layer.k_pages, layer.v_pages)
        batch = kv[0].batch
        return self._native.forward(
            token_ids.contiguous(),
            positions.contiguous(),
            batch.cu_seqlens_q.int().contiguous(),
            batch.kv_lens.int().contiguous(),
            groups,
        )

    def logits(self, hidden: Tensor) -> Tensor:  # [rows, hidden] -> [rows, vocab] float32
        return self._head.finish(self._native.logits(hidden))


def _norm(norm: RMSNorm) -> Tensor:
    return norm.weight.float() + norm.offset


def _optional(norm: RMSNorm | None) -> Tensor | None:
    return None if norm is None else _norm(norm)


def _bias(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else bias.float().contiguous()


def _layer(layer: DecoderLayer) -> LayerWeights:
    attention, mlp = layer.attention, layer.mlp
    assert isinstance(mlp, GatedMlp)
    assert isinstance(layer.attention_norm, RMSNorm)
    assert isinstance(layer.mlp_norm, RMSNorm)
    assert attention.q_norm is None or isinstance(attention.q_norm, RMSNorm)
    assert attention.k_norm is None or isinstance(attention.k_norm, RMSNorm)
    return LayerWeights(
        attention_norm=_norm(layer.attention_norm),
        attention_post_norm=_optional(layer.attention_post_norm),
        mlp_norm=_norm(layer.mlp_norm),
        mlp_post_norm=_optional(layer.mlp_post_norm),
        q_norm=_optional(attention.q_norm),
        k_norm=_optional(attention.k_norm),
        qkv=attention.qkv.weight,
        qkv_bias=_bias(attention.qkv.bias),
        out=attention.out.weight,
        out_bias=_bias(attention.out.bias),
        gate_up=mlp.gate_up.weight,
        gate_up_bias=_bias(mlp.gate_up.bias),
        down=mlp.down.weight,
        down_bias=_bias(mlp.down.bias),
        cos_sin=attention.cos_sin,
        num_q_heads=attention.num_heads,
        num_kv_heads=attention.num_kv_heads,
        head_dim=attention.head_dim,
        left_window=attention.left_window,
        softcap=attention.softcap,
        softmax_scale=attention.softmax_scale,
        activation=mlp.activation,
    )
