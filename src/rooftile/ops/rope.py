"""Rotary position embedding (Su et al. 2021, "RoFormer", eq. 34): the operator."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rooftile.ops.check import (
    check_device,
    check_flags,
    check_float,
    check_rotary_table,
    check_shape,
    check_tensors,
    refuse_gradient,
    require,
)
from rooftile.ops.operator import Operator, contents_checked


@dataclass(frozen=True)
class RotaryCall:
    """The static properties that choose a kernel."""

    device: str
    dtype: torch.dtype
    head_dim: int
    rotary_dim: int
    interleaved: bool


def rotary_embedding(
    x: Tensor,  # [tokens, heads, head_dim]
    positions: Tensor,  # [tokens] int32 or int64
    cos_sin: Tensor,  # [max_position, 2, rotary_dim / 2] float32
    *,
    interleaved: bool = False,
    kernel: str = "auto",
) -> Tensor:
    """x with its first rotary_dim dimensions turned by the angles of each token's position.

    Dimensions i and i + rotary_dim / 2 form a pair, or 2i and 2i + 1 with `interleaved`;
    dimensions from rotary_dim on stay as they are. `cos_sin` comes from `rotary_table`. Computed
    in float32 or wider, returned contiguous in x's dtype. Differentiable in x.

    Args:
        x: [tokens, heads, head_dim]
        positions: [tokens] int32 or int64
        cos_sin: [max_position, 2, rotary_dim / 2] float32

    Raises:
        ValueError: shapes, dtypes or devices that do not fit, or a position outside the table
            (checked on a CPU; on a GPU with ROOFTILE_CHECK=1).
    """
    check_tensors("rotary_embedding", x=x, positions=positions, cos_sin=cos_sin)
    check_float("rotary_embedding", x=x)
    check_device("rotary_embedding", x=x, positions=positions, cos_sin=cos_sin)
    require(
        x.dim() == 3,
        lambda: (
            f"rotary_embedding: x has shape {list(x.shape)}; expected [tokens, heads, head_dim]"
        ),
    )
    check_shape("rotary_embedding", "positions", positions, (x.shape[0],), "[tokens]")
    require(
        positions.dtype in (torch.int32, torch.int64),
        lambda: (
            f"rotary_embedding: positions has dtype {positions.dtype}; convert it to torch.int64"
        ),
    )
    check_rotary_table("rotary_embedding", cos_sin, x.shape[2])
    if contents_checked(positions) and positions.numel():
        low, high = (int(p) for p in positions.aminmax())
        require(
            low >= 0 and high < cos_sin.shape[0],
            lambda: (
                f"rotary_embedding: positions run from {low} to {high}, but cos_sin has the "
                f"positions 0 to {cos_sin.shape[0] - 1}; build a longer table"
            ),
        )
    refuse_gradient("rotary_embedding", cos_sin=cos_sin)
    check_flags("rotary_embedding", interleaved=interleaved)
    return ROTARY_EMBEDDING.handle(x, positions, cos_sin, interleaved, False, kernel)


ROTARY_EMBEDDING = Operator(
    "rotary_embedding",
    "(Tensor x, Tensor positions, Tensor cos_sin, bool interleaved, bool inverse) -> Tensor",
    module="rope",
    families=("triton", "cpu", "torch", "reference"),
    call=lambda x, positions, cos_sin, interleaved, inverse: RotaryCall(
        x.device.type, x.dtype, x.shape[-1], 2 * cos_sin.shape[-1], interleaved
    ),
    fake=lambda x, *_: x.new_empty(x.shape),
)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, positions, cos_sin, ctx.interleaved, ctx.inverse, _ = inputs
    ctx.save_for_backward(positions, cos_sin)


def _backward(ctx: Any, grad_out: Tensor) -> tuple[Any, ...]:
    positions, cos_sin = ctx.saved_tensors
    # A rotation's transpose is the rotation by the negated angle; a factor folded into the table
    # (YaRN) scales both alike.
    grad = ROTARY_EMBEDDING.handle(
        grad_out, positions, cos_sin, ctx.interleaved, not ctx.inverse, "auto"
    )
    return grad, None, None, None, None, None


ROTARY_EMBEDDING.register_autograd(_backward, _setup_context)
