"""Dual chunk attention for a model that was not configured for it."""

from __future__ import annotations

from dataclasses import replace

from rooftile.models.config import DecoderConfig, LayerSpec
from rooftile.ops.dual_chunk_rotary import DualChunkConfig


def with_dual_chunk(config: DecoderConfig, dual_chunk: DualChunkConfig, name: str) -> DecoderConfig:
    """The model with dual chunk attention in every layer that turns its keys by positions without a
    bound. Layers with a window keep it: it bounds relative positions by itself.

    name: of the model, for the error.

    Raises:
        ValueError: there is no such layer.
    """
    layers = tuple(_with(layer, dual_chunk) for layer in config.layers)
    if all(layer.attention.dual_chunk is None for layer in layers):
        raise ValueError(
            f"{name}: dual_chunk is given, but no layer has plain attention with rotary positions and "
            f"without a window; leave it out"
        )
    return replace(config, layers=layers)


def _with(layer: LayerSpec, dual_chunk: DualChunkConfig) -> LayerSpec:
    spec = layer.attention
    if spec.rotary is None or spec.window is not None or spec.differential is not None:
        return layer
    return replace(layer, attention=replace(spec, dual_chunk=dual_chunk))
