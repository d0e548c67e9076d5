"""Llama 2 and 3.x, and models published under its name (SmolLM2, TinyLlama, Vicuna)."""

from __future__ import annotations

from rooftile.models.config import DecoderConfig
from rooftile.models.families.common import (
    activation,
    gguf_decoder,
    head_dim_of,
    rotary,
    uniform_decoder,
)
from rooftile.models.families.family import Family
from rooftile.models.families.fields import Fields


def config(fields: Fields) -> DecoderConfig:
    num_heads = fields.integer("num_attention_heads", 32)
    head_dim = head_dim_of(fields, num_heads, hidden=fields.integer("hidden_size", 4096))
    max_position = fields.integer("max_position_embeddings", 2048)
    bias = fields.flag("attention_bias", False)
    return uniform_decoder(
        fields,
        num_layers=fields.integer("num_hidden_layers", 32),
        hidden=fields.integer("hidden_size", 4096),
        vocab_size=fields.integer("vocab_size", 32000),
        max_position=max_position,
        intermediate=fields.integer("intermediate_size", 11008),
        activation=activation(fields),
        mlp_bias=fields.flag("mlp_bias", False),
        num_heads=num_heads,
        num_kv_heads=fields.integer("num_key_value_heads", num_heads),
        head_dim=head_dim,
        rotary=rotary(fields, head_dim, max_position),
        qkv_bias=bias,
        out_bias=bias,
    )


LLAMA = Family(
    model_type="llama",
    architectures=("LlamaForCausalLM",),
    config=config,
    gguf_architecture="llama",
    gguf_config=gguf_decoder,
    gguf_interleaved=True,
)
