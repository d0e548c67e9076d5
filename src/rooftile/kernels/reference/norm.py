"""Root-mean-square norm in plain PyTorch, accumulated in float32 or wider."""

from __future__ import annotations

import torch
from torch import Tensor

from rooftile.kernels import Kernel, anything
from rooftile.kernels.reference.precision import widen


def rms_norm(
    x: Tensor, weight: Tensor | None, residual: Tensor | None, eps: float, weight_offset: float
) -> tuple[Tensor, Tensor]:
    total = widen(x) if residual is None else widen(x) + widen(residual)
    # The stream that later layers add to is kept in x's dtype, and it is what gets normalised.
    stream = total.to(x.dtype, copy=True)
    y = widen(stream)
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
    if weight is not None:
        y = y * (widen(weight) + weight_offset)
    return y.to(x.dtype), stream


def rms_norm_backward(
    grad_out: Tensor,
    grad_stream: Tensor,
    stream: Tensor,
    weight: Tensor | None,
    eps: float,
    weight_offset: float,
) -> tuple[Tensor, Tensor]:
    g, y = widen(grad_out), widen(stream)
    rstd = torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
    normed = y * rstd
    grad_normed = g if weight is None else g * (widen(weight) + weight_offset)
    grad_x = rstd * (grad_normed - normed * (grad_normed * normed).mean(-1, keepdim=True))
    grad_weight = (g * normed).flatten(0, -2).sum(0)
    if weight is not None:
        grad_weight = grad_weight.to(weight.dtype)
    return (grad_x + widen(grad_stream)).to(stream.dtype), grad_weight


KERNELS = {
    "rms_norm": Kernel(rms_norm, anything, efficiency=0.1),
    "rms_norm_backward": Kernel(rms_norm_backward, anything, efficiency=0.1),
}
