"""The one decoder that runs every model family."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rooftile.layers.attention import AttentionLayer, LayerKV
from rooftile.layers.embedding import Embedding, Head, PackedEmbedding
from rooftile.layers.mlp import GatedMlp
from rooftile.layers.moe import MixtureOfExperts
from rooftile.layers.norm import NoNorm, RMSNorm
from rooftile.models.config import DecoderConfig
from rooftile.types import KVSpec


@dataclass(frozen=True)
class DecoderLayer:
    """Two branches off the residual stream, each with what comes before and after it."""

    attention_norm: RMSNorm | NoNorm
    attention: AttentionLayer
    attention_post_norm: RMSNorm | None
    mlp_norm: RMSNorm | NoNorm
    mlp: GatedMlp | MixtureOfExperts
    mlp_post_norm: RMSNorm | None


class Decoder:
    """Embedding, layers around one residual stream, final norm, head.

    Under tensor parallelism it holds this rank's heads and columns; `forward` and `logits` return
    the same on every rank.
    """

    def __init__(
        self,
        config: DecoderConfig,
        embedding: Embedding | PackedEmbedding,
        layers: Sequence[DecoderLayer],
        norm: RMSNorm,
        head: Head,
    ) -> None:
        self.config = config
        self.embedding = embedding
        self.layers = tuple(layers)
        self.norm = norm
        self.head = head
        self._joined = [_has_joined_norms(layer) for layer in self.layers]

    @property
    def dtype(self) -> torch.dtype:
        """Of hidden states and KV."""
        return self.embedding.dtype

    @property
    def kv_specs(self) -> tuple[KVSpec, ...]:
        """What each layer keeps per token, in layer order."""
        dtype = self.dtype
        return tuple(
            layer.attention.kv_spec(dtype, spec.attention.window)
            for spec, layer in zip(self.config.layers, self.layers, strict=True)
        )

    @property
    def needs_lengths(self) -> bool:
        """Whether each `LayerKV` must have `lengths`, which are whole prompts'."""
        return self.config.depends_on_prompt_length

    def forward(
        self,
        token_ids: Tensor,  # [tokens] int64
        positions: Tensor,  # [tokens] int64
        kv: Sequence[LayerKV],  # one per layer
    ) -> Tensor:
        """Hidden states [tokens, hidden] after the final norm: what `logits` takes.

        Writes the tokens' keys and values into their slots, then attends over the pages. Nothing
        is checked here: token ids lie in the vocabulary, positions below config.max_position,
        and each `LayerKV` satisfies what `ops.append_kv` and `ops.paged_attention` ask of it.
        """
        scale = self.config.residual_scale
        x, stream = self.embedding(token_ids), None
        for layer, joined, layer_kv in zip(self.layers, self._joined, kv, strict=True):
            if joined and x.is_cuda:
                x, stream = _run_joined(layer, x, stream, positions, layer_kv, scale)
                continue
            x, stream = layer.attention_norm.add(x, stream)
            x = _leave(layer.attention(x, positions, layer_kv), layer.attention_post_norm, scale)
            x, stream = layer.mlp_norm.add(x, stream)
            x = _leave(layer.mlp(x), layer.mlp_post_norm, scale)
        return self.norm.add(x, stream)[0]

    def logits(self, hidden: Tensor) -> Tensor:  # [rows, hidden] -> [rows, vocab] float32
        return self.head(hidden)


def _has_joined_norms(layer: DecoderLayer) -> bool:
    """Whether both norms go into one operator with the product after them, on a GPU."""
    return (
        isinstance(layer.attention_norm, RMSNorm)
        and not layer.attention.needs_hidden
        and layer.attention.qkv.weight.format == "dense"
        and isinstance(layer.mlp_norm, RMSNorm)
        and isinstance(layer.mlp, GatedMlp)
        and layer.mlp.gate_up.weight.format == "dense"
        and layer.mlp.activation in ("silu", "gelu_tanh")
    )


def _run_joined(
    layer: DecoderLayer,
    x: Tensor,
    stream: Tensor | None,
    positions: Tensor,
    kv: LayerKV,
    scale: float,
) -> tuple[Tensor, Tensor]:
    assert isinstance(layer.attention_norm, RMSNorm)
    assert isinstance(layer.mlp_norm, RMSNorm)
    assert isinstance(layer.mlp, GatedMlp)
    attention, mlp = layer.attention, layer.mlp
    qkv, stream = attention.qkv.after_norm(x, stream, layer.attention_norm)
    x = _leave(attention.finish(qkv, positions, kv), layer.attention_post_norm, scale)
    inner, stream = mlp.gate_up.after_norm(x, stream, layer.mlp_norm, mlp.activation)
    return _leave(mlp.down(inner), layer.mlp_post_norm, scale), stream


def _leave(x: Tensor, post_norm: RMSNorm | None, scale: float) -> Tensor:
    """What a branch adds to the residual stream; the next norm adds it."""
    if post_norm is not None:
        x = post_norm(x)
    return x if scale == 1 else x * scale
