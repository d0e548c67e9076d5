"""Gemma 3, text: Gemma 2 without caps, with q and k norms and other angles in windowed layers."""

from __future__ import annotations

from dataclasses import replace

from rooftile.models.config import DecoderConfig
from rooftile.models.families.common import (
    FULL,
    SLIDING,
    layer_windows,
    rotary,
    uniform_decoder,
    window_of,
)
from rooftile.models.families.family import SANDWICH_HF_NAMES, Family
from rooftile.models.families.fields import Fields
from rooftile.models.families.gemma2 import gemma_options, gguf_gemma
from rooftile.models.gguf import GGUFFile
from rooftile.ops.rotary_table import RotaryConfig

DEFAULTS = {
    "num_hidden_layers": 26,
    "hidden_size": 2304,
    "vocab_size": 262208,
    "max_position_embeddings": 131072,
    "intermediate_size": 9216,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}
GLOBAL_BASE, LOCAL_BASE = 1e6, 1e4
PERIOD = 6  # one layer of six sees everything
LAYERS_27B = 62


def config(fields: Fields) -> DecoderConfig:
    fields = fields.filled(DEFAULTS)
    everywhere, local = _rotaries(fields)
    period = fields.integer("sliding_window_pattern", PERIOD)
    options = gemma_options(fields)
    options["attention"] |= {"qk_norm": "head"}
    fields.refuse(attn_logit_softcapping=())
    uniform = uniform_decoder(
        fields,
        rotary=everywhere,
        windows=layer_windows(fields, window_of(fields), lambda index: (index + 1) % period != 0),
        **options,
    )
    return _with_local_rotary(uniform, local)


def _rotaries(fields: Fields) -> tuple[RotaryConfig, RotaryConfig]:
    """Angles of the layers that see everything, and of those with a window."""
    given = fields.table("rope_parameters")
    if FULL in given or SLIDING in given:
        kinds = Fields(given, f"{fields.where}: rope_parameters")
        full, sliding = kinds.table(FULL), kinds.table(SLIDING)
        return rotary(fields, full, GLOBAL_BASE), rotary(fields, sliding, LOCAL_BASE)
    everywhere = rotary(fields, base=fields.number("rope_theta", GLOBAL_BASE))
    base = fields.number("rope_local_base_freq", LOCAL_BASE)
    try:
        return everywhere, RotaryConfig(fields.integer("head_dim"), base)
    except ValueError as error:
        raise fields.located(error) from None


def _with_local_rotary(config: DecoderConfig, local: RotaryConfig) -> DecoderConfig:
    layers = tuple(
        layer
        if layer.attention.window is None
        else replace(layer, attention=replace(layer.attention, rotary=local))
        for layer in config.layers
    )
    return replace(config, layers=layers)


def gguf_config(file: GGUFFile, fields: Fields) -> DecoderConfig:
    fields.refuse(attn_logit_softcapping=())
    plain = gguf_gemma(file, fields, PERIOD, LAYERS_27B, attention={"qk_norm": "head"})
    spec = plain.layers[0].attention
    base = fields.number("rope.freq_base_swa", LOCAL_BASE)
    try:
        return _with_local_rotary(plain, RotaryConfig(spec.head_dim, base))
    except ValueError as error:
        raise fields.located(error) from None


GEMMA3 = Family(
    model_type="gemma3_text",
    architectures=("Gemma3ForCausalLM",),
    config=config,
    gguf_architecture="gemma3",
    gguf_config=gguf_config,
    hf_names=SANDWICH_HF_NAMES,
)
