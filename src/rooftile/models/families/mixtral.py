"""Mixtral: Mistral with a mixture of experts (its GGUF files call themselves "llama")."""

from __future__ import annotations

from rooftile.models.config import DecoderConfig, MoeSpec
from rooftile.models.families.common import activation, rotary, uniform_decoder, window_of
from rooftile.models.families.family import HF_NAMES, Family
from rooftile.models.families.fields import Fields

DEFAULTS = {
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "vocab_size": 32000,
    "max_position_embeddings": 131072,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_experts_per_tok": 2,
    "num_local_experts": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
}


def config(fields: Fields) -> DecoderConfig:
    fields = fields.filled(DEFAULTS)
    fields.refuse(attention_bias=(False,), mlp_bias=(False,), layer_types=())
    try:
        experts = MoeSpec(
            num_experts=fields.count("num_local_experts"),
            top_k=fields.integer("num_experts_per_tok"),
            intermediate=fields.integer("intermediate_size"),
            activation=activation(fields),
        )
    except ValueError as error:
        raise fields.located(error) from None
    return uniform_decoder(
        fields,
        rotary=rotary(fields),
        mlp=experts,
        windows=window_of(fields),
        understood=("num_local_experts",),
    )


MIXTRAL = Family(
    model_type="mixtral",
    architectures=("MixtralForCausalLM",),
    config=config,
    hf_names={
        **HF_NAMES,
        "layers.{i}.router": "model.layers.{i}.block_sparse_moe.gate",
        "layers.{i}.experts.{e}.gate": "model.layers.{i}.block_sparse_moe.experts.{e}.w1",
        "layers.{i}.experts.{e}.up": "model.layers.{i}.block_sparse_moe.experts.{e}.w3",
        "layers.{i}.experts.{e}.down": "model.layers.{i}.block_sparse_moe.experts.{e}.w2",
    },
)
