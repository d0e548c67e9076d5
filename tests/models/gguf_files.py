"""Writes small GGUF files the way llama.cpp's converter does, out of transformers' random models."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    stem, _, kind = name.rpartition(".")
    parts = stem.split(".")
    if parts[1:2] == ["layers"]:
        return f"blk.{parts[2]}.{NAMES['.'.join(parts[3:])]}.{kind}"
    return f"{NAMES[stem]}.{kind}"


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
    architecture = "qwen3" if config.model_type == "qwen3" else "llama"
    writer = gguf.GGUFWriter(path, architecture)
    head_dim = config.head_dim
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
        "rope.freq_base": float(config.rope_parameters["rope_theta"]),
        "rope.dimension_count": head_dim,
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
    for name, parameter in model.state_dict().items():
        if tied and name == "lm_head.weight":
            continue
        values = parameter.detach().numpy().copy()
        count = heads.get(name.split(".")[-2]) if architecture == "llama" else None
        stored = values if count is None else interleave(values, count)
        kind = quantise if values.ndim == 2 else GGMLQuantizationType.F32
        data, back = encode(stored, kind)
        writer.add_tensor(gguf_name(name), data, raw_dtype=kind)
        if count is not None:
            rows = interleave(np.arange(values.shape[0])[:, None], count)[:, 0]
            back = back[np.argsort(rows)]
        with torch.no_grad():
            parameter.copy_(torch.from_numpy(back.reshape(values.shape)))
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
    except NotImplementedError:  # K-quants can only be read: any bytes with sane scales will do
        block, size = gguf.GGML_QUANT_SIZES[kind]
        rng = np.random.default_rng(zlib.crc32(values.tobytes()))
        data = rng.integers(0, 256, (*values.shape[:-1], values.shape[-1] // block, size), np.uint8)
        for start in SCALES[kind]:
            scale = rng.uniform(1e-4, 4e-4, data.shape[:-1]).astype(np.float16)
            data[..., start : start + 2] = scale[..., None].view(np.uint8)
        data = data.reshape(*values.shape[:-1], -1)
    back = gguf.quants.dequantize(data, kind).astype(np.float32)
    assert np.isfinite(back).all()
    return data, back


# Where the float16 scales of a block lie (ggml-common.h: block_q4_K begins with d and dmin, ...).
SCALES = {
    GGMLQuantizationType.Q2_K: (80, 82),
    GGMLQuantizationType.Q3_K: (108,),
    GGMLQuantizationType.Q4_K: (0, 2),
    GGMLQuantizationType.Q5_K: (0, 2),
    GGMLQuantizationType.Q6_K: (208,),
}
