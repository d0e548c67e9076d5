"""Writes small GGUF files the way llama.cpp's converter does, out of transformers' random models."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType

ARCHITECTURES = {
    "llama": "llama",
    "mistral": "llama",
    "mixtral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
    "phi3": "phi3",
    "olmo2": "olmo2",
    "granite": "granite",
}
INTERLEAVED = ("llama", "granite")
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.experts.gate": "ffn_gate_exps",
    "mlp.experts.up": "ffn_up_exps",
    "mlp.experts.down": "ffn_down_exps",
}
AFTER_NAMES = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def gguf_name(name: str, has_post_norms: bool) -> str:
    stem, _, kind = name.rpartition(".")
    parts = stem.split(".")
    names = {**NAMES, **(AFTER_NAMES if has_post_norms else {})}
    if parts[1:2] == ["layers"]:
        return f"blk.{parts[2]}.{names['.'.join(parts[3:])]}.{kind}"
    return f"{names[stem]}.{kind}"


def tensors(model: Any) -> dict[str, torch.Tensor]:
    """The model's parameters under their names, with the experts' gate and up apart; views."""
    found = {}
    for name, parameter in model.state_dict().items():
        stem = name.removesuffix("_proj")
        if ".experts." not in name:
            found[name] = parameter
        elif stem.endswith("gate_up"):
            gate, up = parameter.chunk(2, 1)
            found[stem.replace("gate_up", "gate.weight")] = gate
            found[stem.replace("gate_up", "up.weight")] = up
        else:
            found[f"{stem}.weight"] = parameter
    return found


def family_fields(config: Any) -> dict[str, Any]:
    """What only some architectures write."""
    kind = config.model_type
    fields: dict[str, Any] = {}
    if kind in ("gemma2", "gemma3_text"):
        fields["attention.sliding_window"] = config.sliding_window
    if kind == "gemma2":
        fields["attn_logit_softcapping"] = float(config.attn_logit_softcapping)
        fields["final_logit_softcapping"] = float(config.final_logit_softcapping)
    if kind == "granite":
        fields["embedding_scale"] = float(config.embedding_multiplier)
        fields["residual_scale"] = float(config.residual_multiplier)
        fields["attention.scale"] = float(config.attention_multiplier)
        fields["logit_scale"] = float(config.logits_scaling)
    if kind in ("mixtral", "qwen3_moe"):
        fields["expert_count"] = config.num_local_experts
        fields["expert_used_count"] = config.num_experts_per_tok
    if kind == "qwen3_moe":
        fields["expert_feed_forward_length"] = config.moe_intermediate_size
    return fields


def interleave(values: np.ndarray, heads: int) -> np.ndarray:
    """Llama's q and k as llama.cpp stores them: a head's rotary pairs side by side."""
    split = values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
    return split.swapaxes(1, 2).reshape(values.shape)


def write(
    path: Path,
    model: Any,
    quantise: GGMLQuantizationType = GGMLQuantizationType.F32,
    *,
    metadata: dict[str, Any] | None = None,
    extra: dict[str, np.ndarray] | None = None,
) -> None:
    """Write `model` with its matrices in `quantise`, and put into it what the file then holds.

    metadata: further fields, or other values; names without a dot of the architecture's prefix
        are put under it. extra: further float32 tensors.
    """
    config = model.config
    architecture = ARCHITECTURES[config.model_type]
    writer = gguf.GGUFWriter(path, architecture)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rotary = config.rope_parameters
    rotary = rotary.get("full_attention", rotary)
    fields = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "rope.freq_base": float(rotary["rope_theta"]),
        "rope.dimension_count": int(head_dim * rotary.get("partial_rotary_factor", 1.0)),
        **family_fields(config),
    }
    fields.update(metadata or {})
    for name, value in fields.items():
        key = (
            name
            if name.startswith(("tokenizer.", "general.", "split."))
            else f"{architecture}.{name}"
        )
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif value is not None:
            writer.add_array(key, value)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    tied = config.tie_word_embeddings
    parameters = tensors(model)
    has_post_norms = any("post_feedforward_layernorm" in name for name in parameters)
    for name, parameter in parameters.items():
        if tied and name == "lm_head.weight":
            continue
        values = parameter.detach().numpy().copy()
        count = heads.get(name.split(".")[-2]) if architecture in INTERLEAVED else None
        stored = values if count is None else interleave(values, count)
        offset = 1 if name.endswith("norm.weight") and architecture.startswith("gemma") else 0
        is_matrix = values.ndim > 1 and not name.endswith("mlp.gate.weight")
        kind = quantise if is_matrix else GGMLQuantizationType.F32
        data, back = encode(stored + np.float32(offset), kind)
        writer.add_tensor(gguf_name(name, has_post_norms), data, raw_dtype=kind)
        if count is not None:
            rows = interleave(np.arange(values.shape[0])[:, None], count)[:, 0]
            back = back[np.argsort(rows)]
        with torch.no_grad():
            parameter.copy_(torch.from_numpy(back.reshape(values.shape) - offset))
    for name, values in (extra or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def encode(values: np.ndarray, kind: GGMLQuantizationType) -> tuple[np.ndarray, np.ndarray]:
    """(the bytes of a file, the float32 values that they stand for)."""
    try:
        data = gguf.quants.quantize(values, kind)
    except NotImplementedError:  # a type that can only be read: any bytes with sane scales will do
        data = random_blocks(values, kind)
    back = gguf.quants.dequantize(data, kind).astype(np.float32)
    assert np.isfinite(back).all()
    return data, back


def random_blocks(values: np.ndarray, kind: GGMLQuantizationType) -> np.ndarray:
    """Bytes for as many values, of a standard deviation of 0.1 or so."""
    block, size = gguf.GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(zlib.crc32(values.tobytes()))
    data = rng.integers(0, 256, (*values.shape[:-1], values.shape[-1] // block, size), np.uint8)
    flat = data.reshape(*values.shape[:-1], -1)
    if kind == GGMLQuantizationType.NVFP4:  # 4 scales of 8 bits: exponents that mean 1/32 or so
        data[..., :4] = rng.integers(2 << 3, 3 << 3, data[..., :4].shape, np.uint8)
        return flat
    set_scales(data, kind, np.ones(data.shape[:-1]))
    unit = gguf.quants.dequantize(flat, kind).std()
    set_scales(data, kind, rng.uniform(0.05, 0.15, data.shape[:-1]) / unit)
    return flat


def set_scales(data: np.ndarray, kind: GGMLQuantizationType, scale: np.ndarray) -> None:
    bits = scale.astype(np.float16).view(np.uint16)
    if (
        kind == GGMLQuantizationType.IQ1_M
    ):  # four bits of it on top of each of the last 16-bit words
        words = np.ascontiguousarray(data[..., -8:]).view(np.uint16)
        for index in range(4):
            nibble = (bits >> 4 * index & 15) << 12
            words[..., index] = words[..., index] & 0x0FFF | nibble
        data[..., -8:] = words.view(np.uint8)
        return
    for start in SCALES.get(kind, (0,)):
        data[..., start : start + 2] = bits[..., None].view(np.uint8)


# Where the float16 scales of a block lie, if not in front (ggml-common.h).
SCALES = {
    GGMLQuantizationType.Q2_K: (80, 82),
    GGMLQuantizationType.Q3_K: (108,),
    GGMLQuantizationType.Q4_K: (0, 2),
    GGMLQuantizationType.Q5_K: (0, 2),
    GGMLQuantizationType.Q6_K: (208,),
}
