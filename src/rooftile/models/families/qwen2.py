"""Qwen2 and Qwen2.5: biases on q, k and v only, and windows in the layers that say so."""

from __future__ import annotations

from rooftile.models.config import DecoderConfig
from rooftile.models.families.common import (
    DUAL_CHUNK,
    dense_mlp,
    dual_chunk,
    qwen_windows,
    rotary,
    uniform_decoder,
)
from rooftile.models.families.family import Family
from rooftile.models.families.fields import Fields
from rooftile.models.families.gguf_common import gguf_decoder

DEFAULTS = {
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "vocab_size": 151936,
    "max_position_embeddings": 32768,
    "intermediate_size": 22016,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "sliding_window": 4096,
}


def config(fields: Fields) -> DecoderConfig:
    fields = fields.filled(DEFAULTS)
    fields.refuse(mlp_bias=(False,))
    return uniform_decoder(
        fields,
        rotary=rotary(fields),
        mlp=dense_mlp(fields),
        attention={"qkv_bias": True, "dual_chunk": dual_chunk(fields)},
        windows=qwen_windows(fields),
        understood=(DUAL_CHUNK,),
    )


QWEN2 = Family(
    model_type="qwen2",
    architectures=("Qwen2ForCausalLM",),
    config=config,
    gguf_architecture="qwen2",
    gguf_config=gguf_decoder,
)
