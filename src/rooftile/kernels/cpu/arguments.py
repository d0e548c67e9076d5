"""The structures of `native/common.h`, field by field, and how tensors become their fields."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_float, c_int32, c_int64, c_void_p
from typing import Any

import torch
from torch import Tensor

from rooftile.kernels.cpu import library
from rooftile.kernels.cpu.arena import ALIGNMENT

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
FORMATS = {"tiled": 0, "int8": 2, "int8_blocks": 3, "int4": 4}
ACTIVATIONS = {"silu": 0, "gelu_tanh": 1}
TILE, GROUP = 16, 32


class Weight(ctypes.Structure):
    _fields_ = (
        ("data", c_void_p),
        ("scales", c_void_p),
        ("bias", c_void_p),
        ("rows", c_int64),
        ("columns", c_int64),
        ("format", c_int32),
    )


class Pages(ctypes.Structure):
    _fields_ = (("data", c_void_p), ("page", c_int64), ("head", c_int64), ("slot", c_int64))


class Attention(ctypes.Structure):
    _fields_ = (
        ("q", c_void_p),
        ("q_token", c_int64),
        ("q_head", c_int64),
        ("k", Pages),
        ("v", Pages),
        ("cu_seqlens_q", c_void_p),
        ("kv_lens", c_void_p),
        ("page_table", c_void_p),
        ("table_row", c_int64),
        ("sink", c_void_p),
        ("out", c_void_p),
        ("lse", c_void_p),
        ("batch", c_int64),
        ("tokens", c_int64),
        ("num_q_heads", c_int32),
        ("num_kv_heads", c_int32),
        ("k_dim", c_int32),
        ("v_dim", c_int32),
        ("page_size", c_int32),
        ("left", c_int32),
        ("right", c_int32),
        ("softcap", c_float),
        ("scale", c_float),
        ("q_dtype", c_int32),
        ("dtype", c_int32),
        ("out_dtype", c_int32),
    )


class Layer(ctypes.Structure):
    _fields_ = (
        ("attention_norm", c_void_p),
        ("attention_post_norm", c_void_p),
        ("mlp_norm", c_void_p),
        ("mlp_post_norm", c_void_p),
        ("q_norm", c_void_p),
        ("k_norm", c_void_p),
        ("qkv", Weight),
        ("out", Weight),
        ("gate_up", Weight),
        ("down", Weight),
        ("cos_sin", c_void_p),
        ("k", Pages),
        ("v", Pages),
        ("rotary_half", c_int32),
        ("group", c_int32),
        ("num_q_heads", c_int32),
        ("num_kv_heads", c_int32),
        ("head_dim", c_int32),
        ("left", c_int32),
        ("softcap", c_float),
        ("scale", c_float),
        ("activation", c_int32),
    )


class KvGroup(ctypes.Structure):
    _fields_ = (
        ("slots", c_void_p),
        ("page_table", c_void_p),
        ("table_row", c_int64),
        ("page_size", c_int32),
    )


class Decoder(ctypes.Structure):
    _fields_ = (
        ("layers", POINTER(Layer)),
        ("num_layers", c_int64),
        ("embedding", Weight),
        ("embedding_rows", c_void_p),
        ("norm", c_void_p),
        ("hidden", c_int64),
        ("eps", c_float),
        ("embedding_scale", c_float),
        ("residual_scale", c_float),
        ("embedding_dtype", c_int32),
        ("dtype", c_int32),
    )


class Step(ctypes.Structure):
    _fields_ = (
        ("token_ids", c_void_p),
        ("positions", c_void_p),
        ("cu_seqlens_q", c_void_p),
        ("kv_lens", c_void_p),
        ("groups", POINTER(KvGroup)),
        ("tokens", c_int64),
        ("batch", c_int64),
        ("out", c_void_p),
    )


class Sampling(ctypes.Structure):
    _fields_ = (
        ("logits", c_void_p),
        ("scores", c_void_p),
        ("logits_row", c_int64),
        ("scores_row", c_int64),
        ("rows", c_int64),
        ("vocab", c_int64),
        ("temperature", c_void_p),
        ("top_k", c_void_p),
        ("top_p", c_void_p),
        ("min_p", c_void_p),
        ("seeds", c_void_p),
        ("sample_index", c_void_p),
        ("position", c_void_p),
        ("tokens", c_void_p),
        ("logprobs", c_void_p),
    )


def weight(format: str, tensors: list[Tensor], rows: int, columns: int) -> Weight:
    """A packed weight; the tensors must outlive it."""
    data = tensors[0]
    if data.data_ptr() % ALIGNMENT:
        raise ValueError(
            f"the memory of a {format} weight begins at {data.data_ptr():#x}, but must begin at a multiple "
            f"of {ALIGNMENT} bytes; clone it"
        )
    number = FORMATS[format] + (format == "tiled" and data.dtype == torch.bfloat16)
    scales = tensors[1].data_ptr() if len(tensors) > 1 else None
    return Weight(data.data_ptr(), scales, None, rows, columns, number)


def pages(tensor: Tensor) -> Pages:  # [num_pages, heads, page_size, dim], dim dense
    page, head, slot, _ = tensor.stride()
    return Pages(tensor.data_ptr(), page, head, slot)


def refusal(call: Any) -> str | None:
    """Why the native kernels cannot run a call of this device and dtype, or `None`."""
    if call.device != "cpu":
        return f"it runs on the CPU, not on {call.device!r}"
    if call.dtype not in DTYPES:
        return f"it has no {call.dtype}"
    return library.refusal()


def rows_of(x: Tensor) -> Tensor:
    """x as a matrix with dense rows."""
    x = x.reshape(-1, x.shape[-1])
    return x if x.stride(1) == 1 or x.shape[1] == 1 else x.contiguous()
