"""Qwen3 with a mixture of experts in all layers, or in all but some."""

from __future__ import annotations

from dataclasses import replace

from rooftile.models.config import DecoderConfig, MoeSpec
from rooftile.models.families.common import (
    DUAL_CHUNK,
    activation,
    dense_mlp,
    dual_chunk,
    rotary,
    uniform_decoder,
    window_of,
)
from rooftile.models.families.family import Family
from rooftile.models.families.fields import Fields
from rooftile.models.families.gguf_common import gguf_decoder, gguf_experts
from rooftile.models.gguf import GGUFFile

DEFAULTS = {
    "num_hidden_layers": 24,
    "hidden_size": 2048,
    "vocab_size": 151936,
    "max_position_embeddings": 32768,
    "intermediate_size": 6144,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "sliding_window": 4096,
    "moe_intermediate_size": 768,
    "num_experts_per_tok": 8,
}


def config(fields: Fields) -> DecoderConfig:
    fields = fields.filled(DEFAULTS)
    fields.refuse(mlp_bias=(False,), layer_types=())
    bias = fields.flag("attention_bias", False)
    name = "num_local_experts" if fields.get("num_local_experts") is not None else "num_experts"
    try:
        experts = MoeSpec(
            num_experts=fields.count(name, 128),
            top_k=fields.integer("num_experts_per_tok"),
            intermediate=fields.integer("moe_intermediate_size"),
            activation=activation(fields),
            renormalise=fields.flag("norm_topk_prob", False),
        )
    except ValueError as error:
        raise fields.located(error) from None
    uniform = uniform_decoder(
        fields,
        rotary=rotary(fields),
        mlp=experts,
        attention={
            "qk_norm": "head",
            "qkv_bias": bias,
            "out_bias": bias,
            "dual_chunk": dual_chunk(fields),
        },
        windows=window_of(fields) if fields.flag("use_sliding_window", False) else None,
        understood=("num_experts", "num_local_experts", DUAL_CHUNK),
    )
    every = fields.integer("decoder_sparse_step", 1)
    dense_layers = fields.get("mlp_only_layers", [])
    if not isinstance(dense_layers, list) or any(type(item) is not int for item in dense_layers):
        raise fields.error(
            "mlp_only_layers", f"is {dense_layers!r:.200}; expected a list of layers"
        )
    layers = tuple(
        replace(layer, mlp=dense_mlp(fields))
        if index in dense_layers or (index + 1) % every
        else layer
        for index, layer in enumerate(uniform.layers)
    )
    return replace(uniform, layers=layers)


def gguf_config(file: GGUFFile, fields: Fields) -> DecoderConfig:
    return gguf_decoder(file, fields, mlp=gguf_experts(fields), attention={"qk_norm": "head"})


QWEN3_MOE = Family(
    model_type="qwen3_moe",
    architectures=("Qwen3MoeForCausalLM",),
    config=config,
    gguf_architecture="qwen3moe",
    gguf_config=gguf_config,
)
