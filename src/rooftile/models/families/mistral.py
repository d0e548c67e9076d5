"""Mistral 7B and its successors of the same shape (its GGUF files call themselves "llama")."""

from __future__ import annotations

from rooftile.models.config import DecoderConfig
from rooftile.models.families.common import dense_mlp, rotary, uniform_decoder, window_of
from rooftile.models.families.family import Family
from rooftile.models.families.fields import Fields

DEFAULTS = {
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "vocab_size": 32000,
    "max_position_embeddings": 131072,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "sliding_window": 4096,  # the first Mistral 7B; later models say null for no window
}


def config(fields: Fields) -> DecoderConfig:
    fields = fields.filled(DEFAULTS)
    fields.refuse(attention_bias=(False,), mlp_bias=(False,), layer_types=())
    return uniform_decoder(
        fields, rotary=rotary(fields), mlp=dense_mlp(fields), windows=window_of(fields)
    )


MISTRAL = Family(model_type="mistral", architectures=("MistralForCausalLM",), config=config)
