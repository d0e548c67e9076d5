"""Gated activations of the decoder's MLP (Shazeer 2020, "GLU variants improve Transformer")."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rooftile.ops.check import check_float, check_tensors, require
from rooftile.ops.operator import Operator

APPROXIMATIONS = {"none": "gelu", "tanh": "gelu_tanh"}


@dataclass(frozen=True)
class ActivationCall:
    """The static properties that choose a kernel."""

    device: str
    dtype: torch.dtype
    activation: str


def silu_and_mul(x: Tensor, *, kernel: str = "auto") -> Tensor:  # x [..., 2 * size]
    """silu(x[..., :size]) * x[..., size:] -> [..., size], computed in float32 or wider.

    Differentiable. Raises ValueError where the last dimension of x is odd or missing.
    """
    _check("silu_and_mul", x)
    return GATED_ACTIVATION.handle(x, "silu", kernel)


def gelu_and_mul(  # x [..., 2 * size]
    x: Tensor, approximate: str = "none", *, kernel: str = "auto"
) -> Tensor:
    """gelu(x[..., :size]) * x[..., size:] -> [..., size], computed in float32 or wider.

    approximate: "none" (with the error function) or "tanh", as in torch.nn.functional.gelu.
    Differentiable. Raises ValueError where the last dimension of x is odd or missing.
    """
    _check("gelu_and_mul", x)
    require(
        approximate in APPROXIMATIONS,
        lambda: f"gelu_and_mul: approximate is {approximate!r}; choose 'none' or 'tanh'",
    )
    return GATED_ACTIVATION.handle(x, APPROXIMATIONS[approximate], kernel)


def _check(name: str, x: Tensor) -> None:
    check_tensors(name, x=x)
    check_float(name, x=x)
    require(
        x.dim() > 0 and x.shape[-1] % 2 == 0,
        lambda: (
            f"{name}: x has shape {list(x.shape)}; its last dimension holds gate and value one after "
            f"the other, so it must be even"
        ),
    )


def _call(x: Tensor, activation: str) -> ActivationCall:
    return ActivationCall(x.device.type, x.dtype, activation)


GATED_ACTIVATION = Operator(
    "gated_activation",
    "(Tensor x, str activation) -> Tensor",
    module="activation",
    families=("triton", "cpu", "torch", "reference"),
    call=_call,
    fake=lambda x, activation: x.new_empty((*x.shape[:-1], x.shape[-1] // 2)),
)

GATED_ACTIVATION_BACKWARD = Operator(
    "gated_activation_backward",
    "(Tensor grad_out, Tensor x, str activation) -> Tensor",
    module="activation",
    families=("reference",),
    call=lambda grad_out, x, activation: _call(x, activation),
    fake=lambda grad_out, x, activation: x.new_empty(x.shape),
).record_kernels()


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, ctx.activation, _ = inputs
    ctx.save_for_backward(x)


def _backward(ctx: Any, grad_out: Tensor) -> tuple[Any, ...]:
    (x,) = ctx.saved_tensors
    return GATED_ACTIVATION_BACKWARD.handle(grad_out, x, ctx.activation, "auto"), None, None


GATED_ACTIVATION.register_autograd(_backward, _setup_context)
