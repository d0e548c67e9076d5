"""Norm, linear layer and gate, one after the other."""

from __future__ import annotations

from torch import Tensor

from rooftile.kernels import Kernel, anything
from rooftile.kernels.reference.activation import gated_activation
from rooftile.kernels.reference.linear import linear
from rooftile.kernels.reference.norm import rms_norm


def normed_linear(
    x: Tensor,
    residual: Tensor | None,
    norm_weight: Tensor,
    eps: float,
    weight_offset: float,
    weight: Tensor,
    bias: Tensor | None,
    activation: str,
) -> tuple[Tensor, Tensor]:
    y, stream = rms_norm(x, norm_weight, residual, eps, weight_offset)
    y = linear(y, [weight], "dense", weight.shape[0], bias)
    return (gated_activation(y, activation) if activation else y), stream


KERNELS = {"normed_linear": Kernel(normed_linear, anything, efficiency=0.1)}
