"""Llama 2 and 3.x, and models published under its name (SmolLM2, TinyLlama, Vicuna)."""

from __future__ import annotations

from rooftile.models.config import DecoderConfig
from rooftile.models.families.common import dense_mlp, rotary, uniform_decoder
from rooftile.models.families.family import Family
from rooftile.models.families.fields import Fields
from rooftile.models.families.gguf_common import gguf_decoder, gguf_experts
from rooftile.models.gguf import GGUFFile

DEFAULTS = {
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "vocab_size": 32000,
    "max_position_embeddings": 2048,
    "intermediate_size": 11008,
    "num_attention_heads": 32,
}


def config(fields: Fields) -> DecoderConfig:
    fields = fields.filled(DEFAULTS)
    bias = fields.flag("attention_bias", False)
    return uniform_decoder(
        fields,
        rotary=rotary(fields),
        mlp=dense_mlp(fields, fields.flag("mlp_bias", False)),
        attention={"qkv_bias": bias, "out_bias": bias},
    )


def gguf_config(file: GGUFFile, fields: Fields) -> DecoderConfig:
    """Files of Mistral and Mixtral call themselves "llama" too."""
    experts = gguf_experts(fields) if fields.get("expert_count") else None
    return gguf_decoder(file, fields, mlp=experts)


LLAMA = Family(
    model_type="llama",
    architectures=("LlamaForCausalLM",),
    config=config,
    gguf_architecture="llama",
    gguf_config=gguf_config,
    gguf_interleaved=True,
)
