"""From an operator's arguments to a launch.

What shapes, strides and options decide (descriptors, the order of tiles, the grid) is worked out
once for each kind of call (dense.py, ragged.py); a call of a known kind only allocates and launches.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rooftile.kernels.gluon.attention import dense, ragged
from rooftile.kernels.gluon.attention.call import Result
from rooftile.kernels.gluon.attention.config import CONFIGS, Config
from rooftile.kernels.gluon.attention.mods import NO_MODS, Mods

_MOST_KINDS = 1024
_dense: dict[Any, Callable[..., Result]] = {}
_ragged: dict[Any, Callable[..., Result]] = {}


def attention(
    q: Tensor,  # [batch, q_len, num_q_heads, k_dim]
    k: Tensor,  # [batch, kv_len, num_kv_heads, k_dim]
    v: Tensor,  # [batch, kv_len, num_kv_heads, v_dim]
    sink: Tensor | None,  # [num_q_heads]
    left: int,
    right: int,
    softcap: float,
    scale: float,
    config: Config | None = None,
    slopes: Tensor | None = None,  # [num_q_heads] float32, of ALiBi
    mods: Mods = NO_MODS,
) -> Result:  # [batch, q_len, num_q_heads, v_dim], [batch, q_len, num_q_heads]
    options = (left, right, softcap, scale, config)
    kind = (
        *(
            q.shape,
            q.stride(),
            k.shape,
            k.stride(),
            v.shape,
            v.stride(),
            q.dtype,
            q.device,
        ),
        *(sink is None, slopes is None, options, mods.functions),
    )
    run = _dense.get(kind)
    if run is None:
        if len(_dense) >= _MOST_KINDS:
            _dense.clear()
        run = _dense[kind] = bind_attention(q, k, v, sink, *options, slopes, mods)
    return run(q, k, v, sink, slopes, mods)


def attention_varlen(
    q: Tensor,  # [tokens_q, num_q_heads, k_dim]
    k: Tensor,  # [tokens_k, num_kv_heads, k_dim]
    v: Tensor,  # [tokens_k, num_kv_heads, v_dim]
    cu_seqlens_q: Tensor,  # [batch + 1]
    cu_seqlens_k: Tensor,  # [batch + 1]
    max_q_len: int,
    max_kv_len: int,
    sink: Tensor | None,  # [num_q_heads]
    left: int,
    right: int,
    softcap: float,
    scale: float,
    config: Config | None = None,
    slopes: Tensor | None = None,  # [num_q_heads] float32, of ALiBi
    mods: Mods = NO_MODS,
) -> Result:  # [tokens_q, num_q_heads, v_dim], [tokens_q, num_q_heads]
    options = (left, right, softcap, scale, config)
    kind = (
        *(
            q.shape,
            q.stride(),
            k.shape,
            k.stride(),
            v.shape,
            v.stride(),
            q.dtype,
            q.device,
        ),
        *(
            cu_seqlens_q.shape,
            cu_seqlens_q.dtype,
            cu_seqlens_k.dtype,
            cu_seqlens_q.stride(),
            cu_seqlens_k.stride(),
            max_q_len,
            max_kv_len,
            sink is None,
            slopes is None,
            options,
            mods.functions,
        ),
    )
    run = _ragged.get(kind)
    if run is None:
        if len(_ragged) >= _MOST_KINDS:
            _ragged.clear()
        run = _ragged[kind] = bind_attention_varlen(
            *(q, k, v, cu_seqlens_q, cu_seqlens_k, max_q_len, max_kv_len, sink),
            *options,
            slopes,
            mods,
        )
    return run(q, k, v, cu_seqlens_q, cu_seqlens_k, sink, slopes, mods)


def bind_attention(*arguments: Any, **options: Any) -> Callable[..., Result]:
    """`attention` for tensors like these, with `results`: see dense.py."""
    return dense.bind(attention, *arguments, **options)


def bind_attention_varlen(*arguments: Any, **options: Any) -> Callable[..., Result]:
    """`attention_varlen` for tensors like these, with `results`: see ragged.py."""
    return ragged.bind(attention_varlen, *arguments, **options)


def supports(call: Any) -> str | None:
    if call.device != "cuda":
        return f"it needs an NVIDIA GPU of compute capability 9.0, not a {call.device}"
    capability = torch.cuda.get_device_capability()
    if capability != (9, 0):
        return f"it is for compute capability 9.0, this GPU has {capability[0]}.{capability[1]}"
    if call.dtype not in (torch.bfloat16, torch.float16):
        return f"it takes bfloat16 and float16, not {call.dtype}"
    largest = max(CONFIGS)
    for name, dim in (("k_dim", call.k_dim), ("v_dim", call.v_dim)):
        if dim % 8 or dim > largest:
            return f"{name} is {dim}; it takes multiples of 8 up to {largest}"
    if call.page_size:
        return "it reads dense and ragged keys, not pages"
    return None
