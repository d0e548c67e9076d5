"""What the metadata of GGUF files have in common over the families."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch

from rooftile.models.config import AttentionSpec, DecoderConfig, LayerSpec, MlpSpec, MoeSpec
from rooftile.models.families.fields import Fields
from rooftile.models.gguf import GGUFFile
from rooftile.models.gguf_weights import read_vector
from rooftile.ops.rotary_table import Llama3Scaling, RotaryConfig, rotary_table

# Every Llama 3.x release has these; its GGUF files keep only the divisors that follow from them.
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position": 8192}
ROPE_FREQS = "rope_freqs.weight"
# Tensors of angles, which families read as configuration.
ROPE_TENSORS = (ROPE_FREQS, "rope_factors_long.weight", "rope_factors_short.weight")
SCALES = ("embedding_scale", "residual_scale", "attention.scale", "logit_scale")


def gguf_decoder(
    file: GGUFFile,
    fields: Fields,
    *,
    mlp: MoeSpec | None = None,
    activation: str = "silu",
    rotary: RotaryConfig | None = None,
    attention: Mapping[str, Any] | None = None,
    layer: Mapping[str, bool] | None = None,
    understood: Collection[str] = (),
    **options: float,
) -> DecoderConfig:
    """Layers that are all alike, from a file's metadata under its architecture's prefix.

    mlp: instead of a dense one of this `activation`. rotary: instead of `gguf_rotary`. attention,
    layer, options: further fields of `AttentionSpec`, `LayerSpec` and `DecoderConfig`.
    understood: those of `SCALES` that the family takes care of itself.
    """
    if mlp is None and fields.get("expert_count", 0):
        raise fields.error(
            "expert_count",
            f"is {fields.get('expert_count')}; this architecture is only supported without experts",
        )
    for name in SCALES:
        if name not in understood and fields.get(name) not in (None, 0, 1):
            raise fields.error(
                name, f"is {fields.get(name)}; scales are not supported for this architecture"
            )
    num_heads, head_dim = fields.integer("attention.head_count"), gguf_head_dim(fields)
    embedding = file.tensors.get("token_embd.weight")
    biases = {
        "qkv_bias": any(f"blk.0.attn_{name}.bias" in file.tensors for name in ("q", "qkv")),
        "out_bias": "blk.0.attn_output.bias" in file.tensors,
    }
    try:
        spec = AttentionSpec(
            num_heads=num_heads,
            num_kv_heads=fields.integer("attention.head_count_kv", num_heads),
            head_dim=head_dim,
            rotary=gguf_rotary(file, fields) if rotary is None else rotary,
            window=gguf_window(fields),
            **{**biases, **(attention or {})},
        )
        dense = MlpSpec(
            fields.integer("feed_forward_length") if mlp is None else 1,
            activation,
            bias="blk.0.ffn_up.bias" in file.tensors,
        )
        one = LayerSpec(spec, dense if mlp is None else mlp, **(layer or {}))
        return DecoderConfig(
            layers=(one,) * fields.count("block_count"),
            hidden=fields.integer("embedding_length"),
            vocab_size=embedding.shape[0] if embedding else fields.integer("vocab_size"),
            max_position=fields.integer("context_length"),
            norm_eps=fields.number("attention.layer_norm_rms_epsilon"),
            tie_embeddings="output.weight" not in file.tensors,
            **options,
        )
    except ValueError as error:
        raise fields.located(error) from None


def gguf_head_dim(fields: Fields) -> int:
    hidden, num_heads = fields.integer("embedding_length"), fields.integer("attention.head_count")
    if hidden % num_heads and not fields.has("attention.key_length"):
        raise fields.error(
            "embedding_length",
            f"is {hidden}, not a multiple of {num_heads} heads, and no key_length",
        )
    head_dim = fields.integer("attention.key_length", max(1, hidden // num_heads))
    value_dim = fields.integer("attention.value_length", head_dim)
    if value_dim != head_dim:
        raise fields.error(
            "attention.value_length",
            f"is {value_dim}; only {head_dim}, the key_length, is supported",
        )
    return head_dim


def gguf_window(fields: Fields) -> int | None:
    """Earlier tokens that stay visible; the file's number counts the token itself, 0 is none."""
    window = fields.integer("attention.sliding_window", 0, least=0)
    return window - 1 if window else None


def gguf_windowed_layers(fields: Fields, period: int) -> list[bool]:
    """Which layers have a window: as the file says, else all but one in `period`."""
    num_layers = fields.count("block_count")
    name = "attention.sliding_window_pattern"
    pattern = fields.get(name)
    if isinstance(pattern, list):
        if len(pattern) != num_layers or not all(isinstance(item, bool) for item in pattern):
            raise fields.error(name, f"is {pattern}; expected {num_layers} times true or false")
        return pattern
    period = fields.integer(name, period)
    return [(index + 1) % period != 0 for index in range(num_layers)]


def gguf_experts(fields: Fields) -> MoeSpec:
    """A mixture whose weights are a softmax, renormalised over those chosen (as llama.cpp does)."""
    fields.refuse(
        expert_shared_count=(0,),
        expert_group_count=(0, 1),
        expert_gating_func=(0, 1),
        expert_weights_scale=(0, 1),
        expert_weights_norm=(True,),
    )
    name = "expert_feed_forward_length"
    if not fields.get(name):
        name = "feed_forward_length"
    try:
        return MoeSpec(
            num_experts=fields.count("expert_count"),
            top_k=fields.integer("expert_used_count"),
            intermediate=fields.integer(name),
        )
    except ValueError as error:
        raise fields.located(error) from None


def gguf_rotary(file: GGUFFile, fields: Fields) -> RotaryConfig:
    dim = fields.integer("rope.dimension_count", gguf_head_dim(fields))
    base = fields.number("rope.freq_base", 10000.0)
    kind = fields.get("rope.scaling.type", "none")
    if kind not in ("none", "linear", "yarn"):
        raise fields.error("rope.scaling.type", f"is {kind!r}; supported are none, linear and yarn")
    parameters: dict[str, Any] = {"rope_type": "default"}
    if kind != "none":
        parameters = {"rope_type": kind, "factor": fields.number("rope.scaling.factor")}
    if kind == "yarn":
        parameters["original_max_position_embeddings"] = fields.integer(
            "rope.scaling.original_context_length"
        )
        if fields.has("rope.scaling.attn_factor"):
            parameters["attention_factor"] = fields.number("rope.scaling.attn_factor")
    elif fields.has("rope.scale_linear"):
        parameters = {"rope_type": "linear", "factor": fields.number("rope.scale_linear")}
    config = RotaryConfig.from_hugging_face(
        parameters, dim=dim, base=base, max_position=fields.integer("context_length")
    )
    if ROPE_FREQS not in file.tensors:
        return config
    return _llama3_rotary(file, config)


def _llama3_rotary(file: GGUFFile, plain: RotaryConfig) -> RotaryConfig:
    """Llama 3.x: the file has a divisor for each frequency; find the scaling that makes them."""
    divisors = read_vector(file, file.tensors[ROPE_FREQS])
    factor = float(divisors.max())
    if plain.scaling is not None or len(divisors) != plain.dim // 2 or not factor >= 1:
        raise ValueError(
            f"{file.path}: {ROPE_FREQS} holds {len(divisors)} divisors up to {factor:g} beside "
            f"{plain}; expected {plain.dim // 2} divisors of Llama 3's scaling alone"
        )
    scaled = RotaryConfig(plain.dim, plain.base, Llama3Scaling(factor, **LLAMA3))  # type: ignore[arg-type]
    cos, sin = rotary_table(plain, 2)[1].unbind(0)
    scaled_cos, scaled_sin = rotary_table(scaled, 2)[1].unbind(0)
    expected = torch.atan2(sin, cos) / torch.atan2(scaled_sin, scaled_cos)
    if not torch.allclose(expected, divisors, rtol=1e-3):
        raise ValueError(
            f"{file.path}: {ROPE_FREQS} does not follow from Llama 3's scaling by {factor:g} "
            f"({LLAMA3}); no other scaling by divisors is supported"
        )
    return scaled


def optional_vector(file: GGUFFile, name: str) -> list[float] | None:
    return read_vector(file, file.tensors[name]).tolist() if name in file.tensors else None
