"""Mistral 7B and its successors of the same shape (its GGUF files call themselves "llama")."""

from __future__ import annotations

from rooftile.models.config import DecoderConfig
from rooftile.models.families.common import (
    activation,
    head_dim_of,
    rotary,
    uniform_decoder,
    window_of,
)
from rooftile.models.families.family import Family
from rooftile.models.families.fields import Fields


def config(fields: Fields) -> DecoderConfig:
    fields.refuse(attention_bias=(False,), mlp_bias=(False,), layer_types=())
    num_heads = fields.integer("num_attention_heads", 32)
    head_dim = head_dim_of(fields, num_heads, hidden=fields.integer("hidden_size", 4096))
    max_position = fields.integer("max_position_embeddings", 131072)
    # Absent it means 4096 (the first Mistral 7B); later models say null for no window.
    window = window_of(fields) if fields.has("sliding_window") else 4095
    return uniform_decoder(
        fields,
        num_layers=fields.integer("num_hidden_layers", 32),
        hidden=fields.integer("hidden_size", 4096),
        vocab_size=fields.integer("vocab_size", 32000),
        max_position=max_position,
        intermediate=fields.integer("intermediate_size", 14336),
        activation=activation(fields),
        num_heads=num_heads,
        num_kv_heads=fields.integer("num_key_value_heads", 8),
        head_dim=head_dim,
        rotary=rotary(fields, head_dim, max_position),
        windows=window,
    )


MISTRAL = Family(model_type="mistral", architectures=("MistralForCausalLM",), config=config)
