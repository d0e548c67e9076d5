"""Qwen3, dense: norms over each head of q and k, and windows in the layers that say so."""

from __future__ import annotations

from rooftile.models.config import DecoderConfig
from rooftile.models.families.common import (
    activation,
    gguf_decoder,
    rotary,
    uniform_decoder,
    window_of,
)
from rooftile.models.families.family import Family
from rooftile.models.families.fields import Fields
from rooftile.models.gguf import GGUFFile


def config(fields: Fields) -> DecoderConfig:
    fields.refuse(mlp_bias=(False,))
    num_layers = fields.integer("num_hidden_layers", 32)
    head_dim = fields.integer("head_dim", 128)
    max_position = fields.integer("max_position_embeddings", 32768)
    bias = fields.flag("attention_bias", False)
    return uniform_decoder(
        fields,
        num_layers=num_layers,
        hidden=fields.integer("hidden_size", 4096),
        vocab_size=fields.integer("vocab_size", 151936),
        max_position=max_position,
        intermediate=fields.integer("intermediate_size", 22016),
        activation=activation(fields),
        num_heads=fields.integer("num_attention_heads", 32),
        num_kv_heads=fields.integer("num_key_value_heads", 32),
        head_dim=head_dim,
        rotary=rotary(fields, head_dim, max_position),
        qk_norm=True,
        qkv_bias=bias,
        out_bias=bias,
        windows=_windows(fields, num_layers),
    )


def _windows(fields: Fields, num_layers: int) -> tuple[int | None, ...]:
    window = None
    if fields.flag("use_sliding_window", False):
        window = window_of(fields, 4096)
    kinds = fields.get("layer_types")
    if kinds is None:
        first = fields.integer("max_window_layers", 28, least=0)
        return tuple(window if index >= first else None for index in range(num_layers))
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        raise fields.error("layer_types", f"is {kinds!r}; expected a list of {num_layers} names")
    for kind in kinds:
        if kind not in ("full_attention", "sliding_attention"):
            raise fields.error(
                "layer_types",
                f"holds {kind!r}; supported are 'full_attention' and 'sliding_attention'",
            )
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def gguf_config(file: GGUFFile, fields: Fields) -> DecoderConfig:
    return gguf_decoder(file, fields, qk_norm=True)


QWEN3 = Family(
    model_type="qwen3",
    architectures=("Qwen3ForCausalLM",),
    config=config,
    gguf_architecture="qwen3",
    gguf_config=gguf_config,
)
