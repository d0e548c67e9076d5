"""From an operator's arguments to a launch: descriptors, the order of tiles, the grid."""

from typing import Any

import torch
from torch import Tensor

from rooftile.kernels.gluon.attention.config import (
    CONFIGS,
    IN_TURN_Q_LEN,
    SECTION_BYTES,
    UNBOUNDED,
    Config,
    config_of,
)
from rooftile.kernels.gluon.attention.kernel import attention_kernel, constants
from rooftile.kernels.gluon.attention.tile_list import NUM_FIELDS, list_tiles_kernel
from rooftile.kernels.gluon.launch import launch, multiprocessors
from rooftile.kernels.gluon.tile.rows import addressable, describe, describe_ragged

_LOG2_E = 1.4426950408889634


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
) -> tuple[Tensor, Tensor]:  # [batch, q_len, num_q_heads, v_dim], [batch, q_len, num_q_heads]
    out, lse = _outputs(q, v)
    if out.numel() == 0 or k.shape[1] == 0:
        return _without_keys(out, lse, sink)
    config = config or config_of(q.shape[3], v.shape[3], q.shape[1], right)
    q, scale = _positive_scale(q, scale)
    q, k, v = addressable(q), addressable(k), addressable(v)
    batch, q_len, num_heads, _ = q.shape
    kv_len, num_kv_heads = k.shape[1], k.shape[2]
    q_tiles = -(-q_len // config.tile_rows)
    num_tiles = q_tiles * batch * num_heads
    kv_heads_at_a_time = 1
    if right >= 0:
        section_bytes = next(size for longest, size in SECTION_BYTES if q_len <= longest)
        head_bytes = kv_len * (k.shape[3] + v.shape[3]) * k.element_size()
        kv_heads_at_a_time = max(section_bytes // head_bytes, 1)
    group_size = num_heads // num_kv_heads
    unequal = (left >= 0 or right >= 0) and q_len > IN_TURN_Q_LEN
    dynamic = (config.dynamic == "always" or (config.dynamic == "unequal" and unequal)) and (
        num_tiles > multiprocessors(q.device)
    )
    _launch(
        config,
        num_tiles,
        (
            describe(q, 64, config.dim),
            describe(k, config.block, config.dim),
            describe(v, config.block, config.dim),
            describe(out, 64, config.dim),
            lse,
            lse if sink is None else sink.float(),
            lse.new_zeros(2, dtype=torch.int32) if dynamic else lse,
            num_tiles,
            num_heads,
            group_size,
            q_len,
            kv_len,
            q_tiles,
            batch * num_heads,
            min(kv_heads_at_a_time * group_size, batch * num_heads),
        ),
        ragged=False,
        dynamic=dynamic,
        sink=sink,
        left=left,
        right=right,
        softcap=softcap,
        scale=scale,
    )
    return out, lse


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
) -> tuple[Tensor, Tensor]:  # [tokens_q, num_q_heads, v_dim], [tokens_q, num_q_heads]
    out, lse = _outputs(q, v)
    if out.numel() == 0:
        return out, lse
    config = config or config_of(q.shape[2], v.shape[2], max_q_len, right)
    q, scale = _positive_scale(q, scale)
    if k.shape[0] == 0:  # a descriptor needs memory, though no row of it will be visible
        k, v = k.new_zeros(1, *k.shape[1:]), v.new_zeros(1, *v.shape[1:])
    q, k, v = addressable(q), addressable(k), addressable(v)
    tokens, num_heads, _ = q.shape
    batch = cu_seqlens_q.shape[0] - 1
    # Every sequence, and the padding after the last, ends in at most one tile that is not full.
    capacity = tokens // config.tile_rows + min(batch + 1, tokens)
    entries = torch.empty(1 + capacity, NUM_FIELDS, dtype=torch.int32, device=q.device)
    launch(
        list_tiles_kernel,
        batch + 1,
        q.device,
        (entries, cu_seqlens_q.to(torch.int32), cu_seqlens_k.to(torch.int32), batch, tokens),
        (("tile_rows", config.tile_rows),),
    )
    _launch(
        config,
        capacity * num_heads,
        (
            describe_ragged(q, 64, config.dim),
            describe_ragged(k, config.block, config.dim),
            describe_ragged(v, config.block, config.dim),
            describe_ragged(out, 64, config.dim),
            lse,
            lse if sink is None else sink.float(),
            entries,
            0,
            num_heads,
            num_heads // k.shape[1],
            *(0, 0, 0, 0, 0),
        ),
        ragged=True,
        dynamic=config.dynamic != "never",
        sink=sink,
        left=left,
        right=right,
        softcap=softcap,
        scale=scale,
    )
    return out, lse


def _outputs(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    out = q.new_empty(*q.shape[:-1], v.shape[-1])
    return out, q.new_empty(q.shape[:-1], dtype=torch.float32)


def _without_keys(out: Tensor, lse: Tensor, sink: Tensor | None) -> tuple[Tensor, Tensor]:
    lse.fill_(-torch.inf) if sink is None else lse.copy_(sink.expand_as(lse))
    return out.zero_(), lse


def _positive_scale(q: Tensor, scale: float) -> tuple[Tensor, float]:
    """The row maximum is taken of raw scores, which needs a positive scale."""
    if scale > 0:
        return q, scale
    return (-q, -scale) if scale < 0 else (q * 0, 1.0)


def _launch(
    config: Config,
    most_tiles: int,
    arguments: tuple[Any, ...],
    *,
    ragged: bool,
    dynamic: bool,
    sink: Tensor | None,
    left: int,
    right: int,
    softcap: float,
    scale: float,
) -> None:
    device = arguments[4].device
    launch(
        attention_kernel,
        min(most_tiles, multiprocessors(device)),
        device,
        (
            *arguments,
            min(left, UNBOUNDED),
            min(right, UNBOUNDED),
            # With a cap, what goes into tanh, and the log2 units that come out.
            scale / softcap if softcap else scale * _LOG2_E,
            softcap * _LOG2_E,
        ),
        constants(config, ragged, dynamic, left >= 0, right >= 0, softcap != 0, sink is not None),
    )


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
