"""What the config.json files of Llama's relatives have in common."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any

from rooftile.models.config import AttentionSpec, DecoderConfig, LayerSpec, MlpSpec, MoeSpec
from rooftile.models.families.fields import Fields
from rooftile.ops.dual_chunk_rotary import DualChunkConfig
from rooftile.ops.rotary_table import RotaryConfig

ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}
FULL, SLIDING = "full_attention", "sliding_attention"
ORIGINAL = "original_max_position_embeddings"
DUAL_CHUNK = "dual_chunk_attention_config"
DUAL_CHUNK_FIELDS = ("chunk_size", "local_size", ORIGINAL)
# Features of a config.json that change the result: refused by every family that does not name them.
FEATURES: dict[str, tuple[Any, ...]] = {
    "quantization_config": (),
    "num_experts": (0,),
    "num_local_experts": (0, 1),
    "attn_logit_softcapping": (0,),
    "final_logit_softcapping": (0,),
    "query_pre_attn_scalar": (),
    "use_bidirectional_attention": (False,),
    "embedding_multiplier": (1,),
    "residual_multiplier": (1,),
    "attention_multiplier": (),
    "logits_scaling": (1,),
    "clip_qkv": (),
    "rope_interleaved": (False,),
    "is_encoder_decoder": (False,),
    "no_rope_layers": ([],),
    DUAL_CHUNK: ({},),
}


def uniform_decoder(
    fields: Fields,
    *,
    rotary: RotaryConfig,
    mlp: MlpSpec | MoeSpec,
    windows: tuple[int | None, ...] | int | None = None,
    attention: Mapping[str, Any] | None = None,
    layer: Mapping[str, bool] | None = None,
    understood: Collection[str] = (),
    **options: float,
) -> DecoderConfig:
    """Layers that differ in their windows at most.

    fields: with the family's defaults filled in. windows: one for all layers, or one for each.
    attention, layer, options: further fields of `AttentionSpec`, `LayerSpec` and `DecoderConfig`.
    understood: those of `FEATURES` that the family takes care of itself.
    """
    fields.refuse(**{name: off for name, off in FEATURES.items() if name not in understood})
    num_heads = fields.integer("num_attention_heads")
    num_layers = fields.count("num_hidden_layers")
    each = windows if isinstance(windows, tuple) else (windows,) * num_layers
    kv_heads, head_dim = fields.integer("num_key_value_heads", num_heads), head_dim_of(fields)
    try:
        spec = AttentionSpec(num_heads, kv_heads, head_dim, rotary, **(attention or {}))
        layers = tuple(LayerSpec(_windowed(spec, window), mlp, **(layer or {})) for window in each)
        return DecoderConfig(
            layers=layers,
            hidden=fields.integer("hidden_size"),
            vocab_size=fields.integer("vocab_size"),
            max_position=fields.integer("max_position_embeddings"),
            norm_eps=fields.number("rms_norm_eps", 1e-6),
            tie_embeddings=fields.flag("tie_word_embeddings", False),
            **options,
        )
    except ValueError as error:
        raise fields.located(error) from None


def _windowed(spec: AttentionSpec, window: int | None) -> AttentionSpec:
    """A window bounds relative positions by itself, so such layers have no chunks."""
    if window is None:
        return spec
    return replace(spec, window=window, dual_chunk=None)


def head_dim_of(fields: Fields) -> int:
    if fields.get("head_dim") is not None:
        return fields.integer("head_dim")
    hidden, num_heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    if hidden % num_heads:
        raise fields.error(
            "hidden_size",
            f"is {hidden}, not a multiple of {num_heads} heads, and head_dim is missing",
        )
    return hidden // num_heads


def dense_mlp(fields: Fields, bias: bool = False, field: str = "hidden_act") -> MlpSpec:
    return MlpSpec(fields.integer("intermediate_size"), activation(fields, field), bias)


def activation(fields: Fields, field: str = "hidden_act") -> str:
    name = fields.get(field, "silu")
    if not isinstance(name, str) or name not in ACTIVATIONS:
        raise fields.error(field, f"is {name!r}; supported are {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def window_of(fields: Fields) -> int | None:
    """Earlier tokens that stay visible; Hugging Face's sliding_window counts the token itself."""
    if fields.get("sliding_window") is None:
        return None
    return fields.integer("sliding_window") - 1


def layer_windows(
    fields: Fields, window: int | None, is_windowed: Callable[[int], bool]
) -> tuple[int | None, ...]:
    """The window of each layer, by `layer_types`, or where that is absent by its index."""
    kinds, num_layers = fields.get("layer_types"), fields.count("num_hidden_layers")
    if kinds is None:
        return tuple(window if is_windowed(index) else None for index in range(num_layers))
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        raise fields.error("layer_types", f"is {kinds!r}; expected a list of {num_layers} names")
    for kind in kinds:
        if kind not in (FULL, SLIDING):
            raise fields.error(
                "layer_types", f"holds {kind!r}; supported are {FULL!r} and {SLIDING!r}"
            )
    return tuple(window if kind == SLIDING else None for kind in kinds)


def qwen_windows(fields: Fields) -> tuple[int | None, ...]:
    """Qwen2 and Qwen3: windows only where use_sliding_window says so, in the upper layers."""
    window = window_of(fields) if fields.flag("use_sliding_window", False) else None
    first = fields.integer("max_window_layers", 28, least=0)
    return layer_windows(fields, window, lambda index: index >= first)


def dual_chunk(fields: Fields) -> DualChunkConfig | None:
    """Of the field of Qwen2.5-1M and of Qwen3's configurations for a million tokens.

    Raises:
        NotImplementedError: its sparse prefill is switched on.
        ValueError: a field that is missing, unknown or out of range.
    """
    given = fields.table(DUAL_CHUNK)
    if not given:
        return None
    table = Fields(given, f"{fields.where}: {DUAL_CHUNK}")
    for name in given:
        if name not in DUAL_CHUNK_FIELDS and not name.startswith("sparse_attention_"):
            raise table.error(
                name,
                f"is not known; its fields are {', '.join(DUAL_CHUNK_FIELDS)}, sparse_attention_*",
            )
    sparse = "sparse_attention_enabled"
    if table.flag(sparse, table.get("sparse_attention_config") is not None):
        name = sparse if table.has(sparse) else "sparse_attention_config"
        raise NotImplementedError(
            f"{table.where}: {name} asks for sparse prefill, which is not supported; set {sparse} to "
            f"false, and all keys are attended"
        )
    original = table.integer(ORIGINAL, 0, least=0)
    try:
        return DualChunkConfig(
            table.integer("chunk_size"), table.integer("local_size"), original or None
        )
    except ValueError as error:
        raise table.located(error) from None


def rotary(
    fields: Fields, parameters: Mapping[str, Any] | None = None, base: float | None = None
) -> RotaryConfig:
    """Of the whole model, or of one kind of layers with these `parameters` and default `base`."""
    name = "rope_scaling" if fields.table("rope_scaling") else "rope_parameters"
    given = dict(fields.table(name) if parameters is None else parameters)
    max_position = fields.integer("max_position_embeddings")
    kind = given.get("rope_type", given.get("type", "default"))
    if not isinstance(kind, str):
        raise fields.error(name, f"has rope_type {kind!r:.200}; expected a name")
    if kind in ("llama3", "yarn", "longrope"):
        original = fields.get(ORIGINAL, given.get(ORIGINAL))
        given[ORIGINAL] = max_position if original is None else original
    share = given.get("partial_rotary_factor", fields.get("partial_rotary_factor", 1.0))
    if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 < share <= 1:
        raise fields.error("partial_rotary_factor", f"is {share!r}; expected a number in (0, 1]")
    try:
        return RotaryConfig.from_hugging_face(
            given,
            dim=int(head_dim_of(fields) * share),
            base=fields.number("rope_theta", 10000.0) if base is None else base,
            max_position=max_position,
        )
    except (ValueError, NotImplementedError) as error:
        raise type(error)(f"{fields.where}: {name}: {error}") from None
