"""DiffLlama: Llama whose heads come in pairs, of which one softmax is subtracted from the other."""

from __future__ import annotations

from dataclasses import replace

from rooftile.layers.differential import lambda_init
from rooftile.models.config import DecoderConfig, DifferentialSpec
from rooftile.models.families.common import dense_mlp, rotary, uniform_decoder
from rooftile.models.families.family import HF_NAMES, Family
from rooftile.models.families.fields import Fields
from rooftile.models.weights import LAMBDAS

DEFAULTS = {
    "num_hidden_layers": 16,
    "hidden_size": 2048,
    "vocab_size": 32000,
    "max_position_embeddings": 2048,
    "intermediate_size": 8192,
    "num_attention_heads": 32,
    "rms_norm_eps": 1e-5,
}


def config(fields: Fields) -> DecoderConfig:
    fields = fields.filled(DEFAULTS)
    fields.refuse(mlp_bias=(False,), layer_types=(), sliding_window=())
    kv_heads = fields.integer("num_key_value_heads", fields.integer("num_attention_heads"))
    if kv_heads % 2:
        raise fields.error(
            "num_key_value_heads", f"is {kv_heads}; heads come in pairs, so it must be even"
        )
    bias = fields.flag("attention_bias", False)
    uniform = uniform_decoder(
        fields,
        rotary=rotary(fields),
        mlp=dense_mlp(fields),
        attention={"qkv_bias": bias, "out_bias": bias},
    )
    layers = tuple(
        replace(
            layer,
            attention=replace(
                layer.attention, differential=DifferentialSpec(lambda_init(depth), halves=True)
            ),
        )
        for depth, layer in enumerate(uniform.layers)
    )
    return replace(uniform, layers=layers)


DIFFLLAMA = Family(
    model_type="diffllama",
    architectures=("DiffLlamaForCausalLM",),
    config=config,
    hf_names={
        **HF_NAMES,
        **{f"layers.{{i}}.{name}": f"model.layers.{{i}}.self_attn.{name}" for name in LAMBDAS},
    },
)
