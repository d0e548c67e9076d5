"""Granite: Llama with multipliers of embeddings, scores, residual branches and logits."""

from __future__ import annotations

from rooftile.models.config import DecoderConfig
from rooftile.models.families.common import dense_mlp, rotary, uniform_decoder
from rooftile.models.families.family import Family
from rooftile.models.families.fields import Fields
from rooftile.models.families.gguf_common import SCALES, gguf_decoder
from rooftile.models.gguf import GGUFFile

DEFAULTS = {
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "vocab_size": 32000,
    "max_position_embeddings": 2048,
    "intermediate_size": 11008,
    "num_attention_heads": 32,
}
UNDERSTOOD = (
    "embedding_multiplier",
    "attention_multiplier",
    "residual_multiplier",
    "logits_scaling",
)


def config(fields: Fields) -> DecoderConfig:
    fields = fields.filled(DEFAULTS)
    bias = fields.flag("attention_bias", False)
    return uniform_decoder(
        fields,
        rotary=rotary(fields),
        mlp=dense_mlp(fields, fields.flag("mlp_bias", False)),
        attention={
            "softmax_scale": fields.number("attention_multiplier", 1.0),
            "qkv_bias": bias,
            "out_bias": bias,
        },
        understood=UNDERSTOOD,
        embedding_scale=fields.number("embedding_multiplier", 1.0),
        residual_scale=fields.number("residual_multiplier", 1.0),
        logits_scale=1 / fields.number("logits_scaling", 1.0),
    )


def gguf_config(file: GGUFFile, fields: Fields) -> DecoderConfig:
    name = "attention.scale"
    return gguf_decoder(
        file,
        fields,
        understood=SCALES,
        attention={"softmax_scale": fields.number(name) if fields.get(name) else None},
        embedding_scale=fields.number("embedding_scale", 1.0),
        residual_scale=fields.number("residual_scale", 1.0),
        logits_scale=1 / fields.number("logit_scale", 1.0),
    )


GRANITE = Family(
    model_type="granite",
    architectures=("GraniteForCausalLM",),
    config=config,
    gguf_architecture="granite",
    gguf_config=gguf_config,
    gguf_interleaved=True,
)
