"""Root-mean-square normalisation (Zhang and Sennrich 2019, eq. 4), with an optional fused residual."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rooftile.ops.check import check_float, check_same, check_shape, check_tensors, require
from rooftile.ops.operator import Operator


@dataclass(frozen=True)
class NormCall:
    """The static properties that choose a kernel."""

    device: str
    dtype: torch.dtype
    hidden: int
    has_weight: bool
    has_residual: bool
    has_offset: bool


def rms_norm(
    x: Tensor,  # [..., hidden]
    weight: Tensor | None,  # [hidden]
    eps: float = 1e-6,
    *,
    residual: Tensor | None = None,  # [..., hidden]
    weight_offset: float = 0.0,
    kernel: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """y = s / sqrt(mean(s^2) + eps) * (weight + weight_offset), with s = x, or x + residual.

    Statistics are taken in float32 or wider; weight_offset is 1 for models that store weight - 1.
    With `residual`, returns (y, s): s is the new residual stream, in x's dtype. Differentiable in
    x, residual and weight.

    Args:
        x: [..., hidden]
        weight: [hidden]
        residual: [..., hidden]

    Raises:
        ValueError: shapes, dtypes or devices that do not fit together, or eps < 0.
    """
    check_tensors("rms_norm", x=x)
    check_float("rms_norm", x=x)
    check_same("rms_norm", x=x, residual=residual, weight=weight)
    require(x.dim() > 0, lambda: "rms_norm: x is a scalar; give it at least the hidden dimension")
    if weight is not None:
        check_shape("rms_norm", "weight", weight, (x.shape[-1],), "[hidden]")
    if residual is not None:
        check_shape("rms_norm", "residual", residual, tuple(x.shape), "the shape of x")
    require(eps >= 0, lambda: f"rms_norm: eps is {eps}; it must not be negative")
    out, stream = RMS_NORM.handle(x, weight, residual, eps, weight_offset, kernel)
    return out if residual is None else (out, stream)


def _call(
    x: Tensor, weight: Tensor | None, residual: Tensor | None, eps: float, weight_offset: float
) -> NormCall:
    return NormCall(
        x.device.type,
        x.dtype,
        x.shape[-1],
        has_weight=weight is not None,
        has_residual=residual is not None,
        has_offset=weight_offset != 0,
    )


RMS_NORM = Operator(
    "rms_norm",
    "(Tensor x, Tensor? weight, Tensor? residual, float eps, float weight_offset)"
    " -> (Tensor, Tensor)",
    module="norm",
    families=("triton", "cpu", "torch", "reference"),
    call=_call,
    fake=lambda x, *_: (torch.empty_like(x), torch.empty_like(x)),
)

RMS_NORM_BACKWARD = Operator(
    "rms_norm_backward",
    "(Tensor grad_out, Tensor grad_stream, Tensor stream, Tensor? weight, float eps,"
    " float weight_offset) -> (Tensor, Tensor)",
    module="norm",
    families=("reference",),
    call=lambda grad_out, grad_stream, stream, weight, *rest: _call(
        stream, weight, grad_stream, *rest
    ),
    fake=lambda grad_out, grad_stream, stream, weight, *_: (
        torch.empty_like(stream),
        stream.new_empty(stream.shape[-1:]) if weight is None else torch.empty_like(weight),
    ),
).record_kernels()


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    _, weight, residual, ctx.eps, ctx.weight_offset, _ = inputs
    ctx.has_residual = residual is not None
    ctx.save_for_backward(output[1], weight)


def _backward(ctx: Any, grad_out: Tensor, grad_stream: Tensor) -> tuple[Any, ...]:
    stream, weight = ctx.saved_tensors
    grad_x, grad_weight = RMS_NORM_BACKWARD.handle(
        grad_out, grad_stream, stream, weight, ctx.eps, ctx.weight_offset, "auto"
    )
    return (
        grad_x,
        None if weight is None else grad_weight,
        grad_x if ctx.has_residual else None,
        None,
        None,
        None,
    )


RMS_NORM.register_autograd(_backward, _setup_context)
