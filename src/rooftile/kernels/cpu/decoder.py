"""The native decoder step: all layers in one call, over tensors that stay where they are."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rooftile.kernels.cpu import arguments, library
from rooftile.kernels.cpu.arguments import ACTIVATIONS, DTYPES
from rooftile.types import PackedWeight


@dataclass(frozen=True)
class LayerWeights:
    """One decoder layer. Norms are float32, with any offset added; `None`: there is none."""

    attention_norm: Tensor  # [hidden]
    attention_post_norm: Tensor | None
    mlp_norm: Tensor
    mlp_post_norm: Tensor | None
    q_norm: Tensor | None  # [head_dim]
    k_norm: Tensor | None
    qkv: PackedWeight
    qkv_bias: Tensor | None  # float32, as are the other biases
    out: PackedWeight
    out_bias: Tensor | None
    gate_up: PackedWeight
    gate_up_bias: Tensor | None
    down: PackedWeight
    down_bias: Tensor | None
    cos_sin: Tensor | None  # [max_position, 2, rotary_dim / 2] float32
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    left_window: int  # -1: none
    softcap: float
    softmax_scale: float
    activation: str


@dataclass(frozen=True)
class DecoderWeights:
    layers: tuple[LayerWeights, ...]
    embedding: PackedWeight | Tensor  # [vocab, hidden]
    embedding_scale: float
    residual_scale: float
    norm: Tensor  # [hidden] float32
    head: PackedWeight
    eps: float
    dtype: torch.dtype  # of pages and hidden states


@dataclass(frozen=True)
class GroupBatch:
    """A KV group's tensors of one step."""

    slots: Tensor  # [tokens] int64
    page_table: Tensor  # [batch, max_pages] int32, dense rows
    page_size: int


class NativeDecoder:
    """Holds the weights' places; `forward` gives the rest."""

    def __init__(self, weights: DecoderWeights) -> None:
        self._weights = weights  # keeps the memory that the structures point to
        self._layers = (arguments.Layer * len(weights.layers))()
        for place, layer in zip(self._layers, weights.layers, strict=True):
            _fill(place, layer)
        hidden = weights.norm.shape[0]
        self._decoder = arguments.Decoder(
            layers=self._layers,
            num_layers=len(weights.layers),
            norm=weights.norm.data_ptr(),
            hidden=hidden,
            eps=weights.eps,
            embedding_scale=weights.embedding_scale,
            residual_scale=weights.residual_scale,
            dtype=DTYPES[weights.dtype],
        )
        embedding = weights.embedding
        if isinstance(embedding, Tensor):
            self._decoder.embedding_rows = embedding.data_ptr()
            self._decoder.embedding_dtype = DTYPES[embedding.dtype]
        else:
            self._decoder.embedding = _weight(embedding, None)
        self._head = _weight(weights.head, None)
        self._hidden = hidden
        self._dtype = weights.dtype
        self._pages: list[tuple[Tensor, Tensor] | None] = [None] * len(weights.layers)

    def place_pages(self, layer: int, group: int, k_pages: Tensor, v_pages: Tensor) -> None:
        """Tell where a layer's pages lie; costs next to nothing where they have not moved."""
        known = self._pages[layer]
        if known is not None and known[0] is k_pages and known[1] is v_pages:
            return
        self._pages[layer] = (k_pages, v_pages)
        place = self._layers[layer]
        place.k, place.v, place.group = arguments.pages(k_pages), arguments.pages(v_pages), group

    def forward(
        self,
        token_ids: Tensor,  # [tokens] int64
        positions: Tensor,  # [tokens] int64
        cu_seqlens_q: Tensor,  # [batch + 1] int32
        kv_lens: Tensor,  # [batch] int32
        groups: Sequence[GroupBatch],
    ) -> Tensor:  # [tokens, hidden]
        places = (arguments.KvGroup * len(groups))()
        for place, group in zip(places, groups, strict=True):
            place.slots = group.slots.data_ptr()
            place.page_table = group.page_table.data_ptr()
            place.table_row = group.page_table.stride(0)
            place.page_size = group.page_size
        out = torch.empty((token_ids.shape[0], self._hidden), dtype=self._dtype)
        step = arguments.Step(
            token_ids.data_ptr(),
            positions.data_ptr(),
            cu_seqlens_q.data_ptr(),
            kv_lens.data_ptr(),
            places,
            token_ids.shape[0],
            kv_lens.shape[0],
            out.data_ptr(),
        )
        library.native().rooftile_step(
            ctypes.byref(self._decoder), ctypes.byref(step), torch.get_num_threads()
        )
        return out

    def logits(self, hidden: Tensor) -> Tensor:  # [rows, hidden] -> [rows, vocab] float32
        hidden = hidden.contiguous()
        out = torch.empty((hidden.shape[0], self._head.rows), dtype=torch.float32)
        library.native().rooftile_linear(
            *(hidden.data_ptr(), self._hidden, DTYPES[hidden.dtype], hidden.shape[0]),
            *(ctypes.byref(self._head), out.data_ptr(), 0, torch.get_num_threads()),
        )
        return out


def _fill(place: arguments.Layer, layer: LayerWeights) -> None:
    for name in (
        *("attention_norm", "attention_post_norm", "mlp_norm", "mlp_post_norm"),
        *("q_norm", "k_norm", "cos_sin"),
    ):
        tensor = getattr(layer, name)
        setattr(place, name, None if tensor is None else tensor.data_ptr())
    for name in ("qkv", "out", "gate_up", "down"):
        setattr(place, name, _weight(getattr(layer, name), getattr(layer, f"{name}_bias")))
    place.rotary_half = 0 if layer.cos_sin is None else layer.cos_sin.shape[2]
    place.num_q_heads, place.num_kv_heads = layer.num_q_heads, layer.num_kv_heads
    place.head_dim = layer.head_dim
    place.left = layer.left_window
    place.softcap, place.scale = layer.softcap, layer.softmax_scale
    place.activation = ACTIVATIONS[layer.activation]


def _weight(packed: PackedWeight, bias: Tensor | None) -> arguments.Weight:
    weight = arguments.weight(packed.format, list(packed.tensors.values()), *packed.shape)
    weight.bias = None if bias is None else bias.data_ptr()
    return weight
