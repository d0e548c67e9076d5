"""What the configurations of Llama's relatives have in common."""

from __future__ import annotations

from typing import Any

import torch

from rooftile.models.config import AttentionSpec, DecoderConfig, LayerSpec, MlpSpec
from rooftile.models.families.fields import Fields
from rooftile.models.gguf import GGUFFile
from rooftile.models.gguf_weights import read_vector
from rooftile.ops.rotary_table import Llama3Scaling, RotaryConfig, rotary_table

ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}
# Every Llama 3.x release has these; its GGUF files keep only the divisors that follow from them.
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position": 8192}
ROPE_FREQS = "rope_freqs.weight"


def uniform_decoder(
    fields: Fields,
    *,
    num_layers: int,
    hidden: int,
    vocab_size: int,
    max_position: int,
    intermediate: int,
    activation: str,
    mlp_bias: bool = False,
    windows: tuple[int | None, ...] | int | None = None,
    **attention: Any,
) -> DecoderConfig:
    """Layers that differ in their windows at most. windows: one for all layers, or one for each."""
    fields.refuse(
        quantization_config=(),
        num_experts=(0,),
        num_local_experts=(0, 1),
        attn_logit_softcapping=(0,),
        final_logit_softcapping=(0,),
        rope_interleaved=(False,),
        is_encoder_decoder=(False,),
        no_rope_layers=([],),
    )
    each = windows if isinstance(windows, tuple) else (windows,) * num_layers
    try:
        mlp = MlpSpec(intermediate, activation, mlp_bias)
        layers = tuple(LayerSpec(AttentionSpec(window=window, **attention), mlp) for window in each)
    except ValueError as error:
        raise ValueError(f"{fields.where}: {error}") from None
    return DecoderConfig(
        layers=layers,
        hidden=hidden,
        vocab_size=vocab_size,
        max_position=max_position,
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        tie_embeddings=fields.flag("tie_word_embeddings", False),
    )


def head_dim_of(fields: Fields, num_heads: int, hidden: int) -> int:
    if fields.get("head_dim") is not None:
        return fields.integer("head_dim")
    if hidden % num_heads:
        raise fields.error(
            "hidden_size",
            f"is {hidden}, not a multiple of {num_heads} heads, and head_dim is missing",
        )
    return hidden // num_heads


def activation(fields: Fields) -> str:
    name = fields.get("hidden_act", "silu")
    if name not in ACTIVATIONS:
        raise fields.error("hidden_act", f"is {name!r}; supported are {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def window_of(fields: Fields, default: int | None = None) -> int | None:
    """Earlier tokens that stay visible; Hugging Face's sliding_window counts the token itself."""
    if fields.get("sliding_window", default) is None:
        return None
    return fields.integer("sliding_window", default) - 1


def rotary(fields: Fields, head_dim: int, max_position: int) -> RotaryConfig:
    parameters = dict(fields.table("rope_scaling") or fields.table("rope_parameters"))
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind in ("llama3", "yarn"):
        name = "original_max_position_embeddings"
        original = fields.get(name, parameters.get(name))
        parameters[name] = max_position if original is None else original
    share = parameters.get("partial_rotary_factor", fields.get("partial_rotary_factor", 1.0))
    if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 < share <= 1:
        raise fields.error("partial_rotary_factor", f"is {share!r}; expected a number in (0, 1]")
    try:
        return RotaryConfig.from_hugging_face(
            parameters,
            dim=int(head_dim * share),
            base=fields.number("rope_theta", 10000.0),
            max_position=max_position,
        )
    except (ValueError, NotImplementedError) as error:
        name = "rope_scaling" if fields.get("rope_scaling") else "rope_parameters"
        raise type(error)(f"{fields.where}: {name}: {error}") from None


def gguf_decoder(file: GGUFFile, fields: Fields, *, qk_norm: bool = False) -> DecoderConfig:
    """The configuration in a GGUF file's metadata under its architecture's prefix."""
    for name in ("expert_count", "expert_used_count"):
        if fields.get(name, 0):
            raise fields.error(
                name, f"is {fields.get(name)}; mixtures of experts are not supported"
            )
    for name in ("embedding_scale", "residual_scale", "attention.scale", "logit_scale"):
        if fields.get(name) not in (None, 0, 1):
            raise fields.error(name, f"is {fields.get(name)}; scaled models are not supported")
    hidden = fields.integer("embedding_length")
    num_heads = fields.integer("attention.head_count")
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
    num_layers = fields.integer("block_count")
    max_position = fields.integer("context_length")
    embedding = file.tensors.get("token_embd.weight")
    vocab_size = embedding.shape[0] if embedding else fields.integer("vocab_size")
    window = fields.integer("attention.sliding_window", 0, least=0)
    spec = AttentionSpec(
        num_heads=num_heads,
        num_kv_heads=fields.integer("attention.head_count_kv", num_heads),
        head_dim=head_dim,
        rotary=_gguf_rotary(file, fields, head_dim, max_position),
        window=window - 1 if window else None,
        qk_norm=qk_norm,
        qkv_bias="blk.0.attn_q.bias" in file.tensors,
        out_bias="blk.0.attn_output.bias" in file.tensors,
    )
    mlp = MlpSpec(fields.integer("feed_forward_length"), bias="blk.0.ffn_up.bias" in file.tensors)
    return DecoderConfig(
        layers=(LayerSpec(spec, mlp),) * num_layers,
        hidden=hidden,
        vocab_size=vocab_size,
        max_position=max_position,
        norm_eps=fields.number("attention.layer_norm_rms_epsilon"),
        tie_embeddings="output.weight" not in file.tensors,
    )


def _gguf_rotary(file: GGUFFile, fields: Fields, head_dim: int, max_position: int) -> RotaryConfig:
    dim = fields.integer("rope.dimension_count", head_dim)
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
        parameters, dim=dim, base=base, max_position=max_position
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
