"""Gemma 2: capped scores and logits, every other layer with a window, norms around everything."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rooftile.models.config import DecoderConfig
from rooftile.models.families.common import (
    dense_mlp,
    layer_windows,
    rotary,
    uniform_decoder,
    window_of,
)
from rooftile.models.families.family import SANDWICH_HF_NAMES, Family
from rooftile.models.families.fields import Fields
from rooftile.models.families.gguf_common import (
    gguf_decoder,
    gguf_window,
    gguf_windowed_layers,
)
from rooftile.models.gguf import GGUFFile

DEFAULTS = {
    "num_hidden_layers": 26,
    "hidden_size": 2304,
    "vocab_size": 256000,
    "max_position_embeddings": 8192,
    "intermediate_size": 9216,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
}
CAPS = ("attn_logit_softcapping", "final_logit_softcapping")
UNDERSTOOD = (*CAPS, "query_pre_attn_scalar")
PERIOD = 2  # one layer of two sees everything
# Layers of the 27B model, whose queries are scaled by hidden / heads and not by head_dim.
LAYERS_27B = 46


def config(fields: Fields) -> DecoderConfig:
    fields = fields.filled(DEFAULTS)
    return uniform_decoder(
        fields,
        rotary=rotary(fields),
        windows=layer_windows(fields, window_of(fields), lambda index: (index + 1) % PERIOD != 0),
        **gemma_options(fields),
    )


def gemma_options(fields: Fields) -> dict[str, Any]:
    """What Gemma 2 and 3 have in common, for `uniform_decoder`."""
    bias = fields.flag("attention_bias", False)
    attention = {
        "softmax_scale": fields.number("query_pre_attn_scalar") ** -0.5,
        "softcap": cap(fields, "attn_logit_softcapping"),
        "qkv_bias": bias,
        "out_bias": bias,
    }
    return {
        "mlp": dense_mlp(fields, field="hidden_activation"),
        "attention": attention,
        "layer": {"post_norm": True},
        "understood": UNDERSTOOD,
        "norm_offset": 1.0,
        "embedding_scale": fields.integer("hidden_size") ** 0.5,
        "logits_softcap": cap(fields, "final_logit_softcapping"),
    }


def cap(fields: Fields, name: str) -> float:
    return 0.0 if fields.get(name) in (None, 0) else fields.number(name)


def gguf_config(file: GGUFFile, fields: Fields) -> DecoderConfig:
    # Files of the model's first weeks lack these.
    fields = fields.filled({name: DEFAULTS[name] for name in CAPS})
    fields = fields.filled({"attention.sliding_window": DEFAULTS["sliding_window"]})
    return gguf_gemma(file, fields, PERIOD, LAYERS_27B, attention={})


def gguf_gemma(
    file: GGUFFile, fields: Fields, period: int, layers_27b: int, attention: dict[str, Any]
) -> DecoderConfig:
    """Of Gemma 2 or 3; the file does not say how queries are scaled, so the size decides it."""
    plain = gguf_decoder(
        file,
        fields,
        activation="gelu_tanh",
        attention={"softcap": cap(fields, "attn_logit_softcapping"), **attention},
        layer={"post_norm": True},
        norm_offset=1.0,
        embedding_scale=fields.integer("embedding_length") ** 0.5,
        logits_softcap=cap(fields, "final_logit_softcapping"),
    )
    window = gguf_window(fields)
    spec = plain.layers[0].attention
    if len(plain.layers) == layers_27b:
        spec = replace(spec, softmax_scale=(plain.hidden / spec.num_heads) ** -0.5)
    layers = tuple(
        replace(layer, attention=replace(spec, window=window if windowed else None))
        for layer, windowed in zip(plain.layers, gguf_windowed_layers(fields, period), strict=True)
    )
    return replace(plain, layers=layers)


GEMMA2 = Family(
    model_type="gemma2",
    architectures=("Gemma2ForCausalLM",),
    config=config,
    gguf_architecture="gemma2",
    gguf_config=gguf_config,
    hf_names=SANDWICH_HF_NAMES,
)
