"""From an operator's arguments to a launch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rooftile.kernels.gluon.attention.config import UNBOUNDED, Short
from rooftile.kernels.gluon.attention.short.kernel import short_attention_kernel
from rooftile.kernels.gluon.launch import Launch
from rooftile.kernels.gluon.tile.divisor import divisor_fields
from rooftile.kernels.gluon.tile.rows import describe

_LOG2_E = 1.4426950408889634


def constants(short: Short, has_right: bool) -> tuple[tuple[str, Any], ...]:
    """The compile-time arguments of `short_attention_kernel`, in its order."""
    return (("dim", short.dim), ("keys", short.keys), ("has_right", has_right))


def bind_short(
    q: Tensor,  # [batch, q_len, num_q_heads, dim]
    k: Tensor,  # [batch, kv_len, num_kv_heads, dim]
    v: Tensor,  # [batch, kv_len, num_kv_heads, dim]
    right: int,
    scale: float,  # above 0
    short: Short,
    units: int,  # streaming multiprocessors
    results: int = 2,
) -> Callable[..., None]:
    """Attention for tensors like these, which the copy engine can address: a function of q, k, v, the
    output [batch, q_len, num_q_heads, dim] and the lse [batch, q_len, num_q_heads] float32 to fill.

    results: 1 where nobody reads the lse, which may then be `None`."""
    batch, q_len, num_heads, dim = q.shape
    kv_len, num_kv_heads = k.shape[1], k.shape[2]
    q_tiles = -(-q_len // short.rows)
    num_tiles = q_tiles * batch * num_heads
    launch = Launch(
        short_attention_kernel,
        min(num_tiles, units * short.ctas),
        q.device,
        q.dtype,
        (
            describe(q, short.rows, dim),
            describe(k, short.keys, dim),
            describe(v, short.keys, dim),
            describe(q.new_empty(batch, q_len, num_heads, dim), short.rows, dim),
        ),
        (
            num_tiles,
            *(*divisor_fields(q_tiles), *divisor_fields(num_heads)),
            *divisor_fields(num_heads // num_kv_heads),
            *(q_len, kv_len, min(right, UNBOUNDED), results - 1, scale * _LOG2_E),
        ),
        constants(short, right >= 0),
        short.most_registers,
        dependent=True,
    )

    def run(q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor | None) -> None:
        if lse is None and launch.is_ready:
            launch.at((q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr()), (0,))
            return
        if lse is None:
            lse = q.new_empty(q.shape[:-1], dtype=torch.float32)
        launch((q, k, v, out), (lse,))

    return run
