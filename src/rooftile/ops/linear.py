"""Linear layers over packed weights: y = x W^T + bias."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rooftile.ops.check import (
    check_device,
    check_float,
    check_same,
    check_shape,
    check_tensors,
    require,
)
from rooftile.ops.operator import Operator
from rooftile.ops.packed_weight import FORMATS, check_packed
from rooftile.types import PackedWeight


@dataclass(frozen=True)
class LinearCall:
    """The static properties that choose a kernel."""

    device: str
    dtype: torch.dtype
    format: str


def linear(
    x: Tensor,  # [..., in_features]
    weight: PackedWeight | Tensor,  # [out_features, in_features]
    bias: Tensor | None = None,  # [out_features]
    *,
    kernel: str = "auto",
) -> Tensor:
    """x W^T + bias -> [..., out_features] in x's dtype, accumulated in float32 or wider.

    A plain tensor is a "dense" weight. Differentiable in x, weight and bias for "dense".

    Args:
        x: [..., in_features]
        weight: [out_features, in_features]
        bias: [out_features]

    Raises:
        ValueError: shapes, dtypes, devices or a format that do not fit.
        NotImplementedError: a gradient is asked of a packed weight, or the kernel given cannot run
            the call.
    """
    if isinstance(weight, Tensor):
        require(
            weight.dim() == 2,
            lambda: (
                f"linear: weight has shape {list(weight.shape)}; expected [out_features, in_features]"
            ),
        )
        format, tensors = "dense", [weight]
    else:
        check_packed("linear", "weight", weight)
        format, tensors = weight.format, list(weight.tensors.values())
    out_features, in_features = weight.shape
    check_tensors("linear", x=x)
    check_float("linear", x=x)
    check_same("linear", x=x, bias=bias)
    if FORMATS[format].is_exact:
        check_same("linear", x=x, weight=tensors[0])
    else:
        check_device("linear", x=x, weight=tensors[0])
    require(
        x.dim() > 0 and x.shape[-1] == in_features,
        lambda: (
            f"linear: x has shape {list(x.shape)}; expected [..., in_features] with in_features = "
            f"{in_features}, as the weight has"
        ),
    )
    if bias is not None:
        check_shape("linear", "bias", bias, (out_features,), "[out_features]")
    if format != "dense" and torch.is_grad_enabled():
        for name, tensor in (("x", x), ("bias", bias)):
            if tensor is not None and tensor.requires_grad:
                raise NotImplementedError(
                    f"linear: {name} requires a gradient, but a weight of format "
                    f"{format!r} is for inference; pack it as 'dense' or use torch.no_grad()"
                )
    return LINEAR.handle(x, tensors, format, out_features, bias, kernel)


LINEAR = Operator(
    "linear",
    "(Tensor x, Tensor[] weight, str format, int out_features, Tensor? bias) -> Tensor",
    module="linear",
    families=("triton", "gluon", "cpu", "torch", "reference"),
    call=lambda x, weight, format, *_: LinearCall(x.device.type, x.dtype, format),
    fake=lambda x, weight, format, out_features, bias: x.new_empty((*x.shape[:-1], out_features)),
)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, format, _, bias, _ = inputs
    ctx.format, ctx.has_bias = format, bias is not None
    ctx.save_for_backward(x, *weight)


def _backward(ctx: Any, grad_out: Tensor) -> tuple[Any, ...]:
    if ctx.format != "dense":
        raise NotImplementedError(
            f"linear: a weight of format {ctx.format!r} has no gradient; pack it as 'dense'"
        )
    x, weight = ctx.saved_tensors
    needs_x, (needs_weight,), _, _, needs_bias, _ = ctx.needs_input_grad
    rows = grad_out.reshape(-1, grad_out.shape[-1])
    return (
        grad_out @ weight if needs_x else None,
        [rows.T @ x.reshape(-1, x.shape[-1]) if needs_weight else None],
        None,
        None,
        rows.sum(0) if needs_bias and ctx.has_bias else None,
        None,
    )


LINEAR.register_autograd(_backward, _setup_context)
