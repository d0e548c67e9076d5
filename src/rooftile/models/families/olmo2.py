"""OLMo 2: norms only after attention and mlp, and over all heads of q and of k together."""

from __future__ import annotations

from rooftile.models.config import DecoderConfig
from rooftile.models.families.common import dense_mlp, rotary, uniform_decoder
from rooftile.models.families.family import SANDWICH_HF_NAMES, Family
from rooftile.models.families.fields import Fields
from rooftile.models.families.gguf_common import gguf_decoder
from rooftile.models.gguf import GGUFFile

DEFAULTS = {
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "vocab_size": 50304,
    "max_position_embeddings": 2048,
    "intermediate_size": 11008,
    "num_attention_heads": 32,
    "rms_norm_eps": 1e-5,
}
LAYER = {"pre_norm": False, "post_norm": True}


def config(fields: Fields) -> DecoderConfig:
    fields = fields.filled(DEFAULTS)
    fields.refuse(mlp_bias=(False,), layer_types=(), sliding_window=())
    bias = fields.flag("attention_bias", False)
    return uniform_decoder(
        fields,
        rotary=rotary(fields),
        mlp=dense_mlp(fields),
        attention={"qk_norm": "projection", "qkv_bias": bias, "out_bias": bias},
        layer=LAYER,
    )


def gguf_config(file: GGUFFile, fields: Fields) -> DecoderConfig:
    fields.refuse(**{"attention.sliding_window": (0,)})  # of OLMo 3, which is not supported
    return gguf_decoder(file, fields, attention={"qk_norm": "projection"}, layer=LAYER)


OLMO2 = Family(
    model_type="olmo2",
    architectures=("Olmo2ForCausalLM",),
    config=config,
    gguf_architecture="olmo2",
    gguf_config=gguf_config,
    hf_names=SANDWICH_HF_NAMES,
)
