"""Phi-3 and Phi-4: q, k and v in one matrix, gate and up in another, LongRoPE for long contexts."""

from __future__ import annotations

from rooftile.models.config import DecoderConfig
from rooftile.models.families.common import ORIGINAL, dense_mlp, rotary, uniform_decoder, window_of
from rooftile.models.families.family import GGUF_NAMES, HF_NAMES, Family
from rooftile.models.families.fields import Fields
from rooftile.models.families.gguf_common import gguf_decoder, gguf_rotary, optional_vector
from rooftile.models.gguf import GGUFFile
from rooftile.ops.rotary_table import LongRopeScaling, RotaryConfig

DEFAULTS = {
    "num_hidden_layers": 32,
    "hidden_size": 3072,
    "vocab_size": 32064,
    "max_position_embeddings": 4096,
    ORIGINAL: 4096,
    "intermediate_size": 8192,
    "num_attention_heads": 32,
    "rms_norm_eps": 1e-5,
}
LONG, SHORT = "rope_factors_long.weight", "rope_factors_short.weight"


def config(fields: Fields) -> DecoderConfig:
    fields = fields.filled(DEFAULTS)
    fields.refuse(attention_bias=(False,), mlp_bias=(False,), layer_types=())
    return uniform_decoder(
        fields,
        rotary=_rotary(fields),
        mlp=dense_mlp(fields),
        windows=window_of(fields),
    )


def _rotary(fields: Fields) -> RotaryConfig:
    parameters = dict(fields.table("rope_scaling") or fields.table("rope_parameters"))
    # Older files call LongRoPE so.
    if parameters.get("rope_type", parameters.get("type")) in ("su", "yarn"):
        parameters |= {"rope_type": "longrope"}
    return rotary(fields, parameters)


def gguf_config(file: GGUFFile, fields: Fields) -> DecoderConfig:
    return gguf_decoder(file, fields, rotary=_gguf_rotary(file, fields))


def _gguf_rotary(file: GGUFFile, fields: Fields) -> RotaryConfig:
    plain = gguf_rotary(file, fields)
    short, long = optional_vector(file, SHORT), optional_vector(file, LONG)
    if short is None or long is None:
        return plain
    original = fields.integer("rope.scaling.original_context_length")
    attention_factor = None
    if fields.has("rope.scaling.attn_factor"):
        attention_factor = fields.number("rope.scaling.attn_factor")
    try:
        scaling = LongRopeScaling(
            short_factor=tuple(short),
            long_factor=tuple(long),
            factor=fields.integer("context_length") / original,
            original_max_position=original,
            attention_factor=attention_factor,
        )
        return RotaryConfig(plain.dim, plain.base, scaling)
    except ValueError as error:
        raise fields.located(error) from None


PHI3 = Family(
    model_type="phi3",
    architectures=("Phi3ForCausalLM",),
    config=config,
    gguf_architecture="phi3",
    gguf_config=gguf_config,
    hf_names={
        **HF_NAMES,
        **{f"layers.{{i}}.{part}": "model.layers.{i}.self_attn.qkv_proj" for part in "qkv"},
        "layers.{i}.gate": "model.layers.{i}.mlp.gate_up_proj",
        "layers.{i}.up": "model.layers.{i}.mlp.gate_up_proj",
    },
    gguf_names={
        **GGUF_NAMES,
        **{f"layers.{{i}}.{part}": "blk.{i}.attn_qkv" for part in "qkv"},
        "layers.{i}.gate": "blk.{i}.ffn_up",
        "layers.{i}.up": "blk.{i}.ffn_up",
    },
)
