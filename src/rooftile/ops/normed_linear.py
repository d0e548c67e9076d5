"""A norm with its residual add, the linear layer after it, and a gate after that, in one operator."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rooftile.ops.operator import Operator


@dataclass(frozen=True)
class NormedLinearCall:
    """The static properties that choose a kernel."""

    device: str
    dtype: torch.dtype
    activation: str  # "": there is no gate


# x, residual [..., in_features]; weight [out_features, in_features]. Equal to `rms_norm` with residual,
# `linear` and, with an activation, `silu_and_mul` or `gelu_and_mul` in turn. Returns the result and the
# residual stream.
NORMED_LINEAR = Operator(
    "normed_linear",
    "(Tensor x, Tensor? residual, Tensor norm_weight, float eps, float weight_offset, Tensor weight,"
    " Tensor? bias, str activation) -> (Tensor, Tensor)",
    module="normed_linear",
    families=("gluon", "triton", "reference"),
    call=lambda x, *rest: NormedLinearCall(x.device.type, x.dtype, rest[-1]),
    fake=lambda x, residual, norm_weight, eps, offset, weight, bias, activation: (
        x.new_empty((*x.shape[:-1], weight.shape[0] // (2 if activation else 1))),
        torch.empty_like(x),
    ),
)
