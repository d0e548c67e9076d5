"""RMS norm with its weight, with and without the fused residual add."""

from __future__ import annotations

from torch import Tensor

from rooftile.ops.norm import RMS_NORM


class RMSNorm:
    def __init__(self, weight: Tensor, eps: float) -> None:
        self.weight = weight  # [hidden]
        self.eps = eps

    def __call__(self, x: Tensor) -> Tensor:  # [..., hidden]
        return RMS_NORM.handle(x, self.weight, None, self.eps, 0.0, "auto")[0]

    def add(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """(the norm of x + residual, x + residual); without a residual yet, x starts the stream."""
        out, stream = RMS_NORM.handle(x, self.weight, residual, self.eps, 0.0, "auto")
        return out, stream
