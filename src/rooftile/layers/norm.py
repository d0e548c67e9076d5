"""RMS norm with its weight, with and without the fused residual add."""

from __future__ import annotations

from torch import Tensor

from rooftile.ops.norm import RMS_NORM


class RMSNorm:
    """x / rms(x) * (weight + offset), over the last dimension."""

    def __init__(self, weight: Tensor, eps: float, offset: float = 0.0) -> None:
        self.weight = weight  # [hidden]
        self.eps = eps
        self.offset = offset

    def __call__(self, x: Tensor) -> Tensor:  # [..., hidden]
        return RMS_NORM.handle(x, self.weight, None, self.eps, self.offset, "auto")[0]

    def add(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """(the norm of x + residual, x + residual); without a residual yet, x starts the stream."""
        out, stream = RMS_NORM.handle(x, self.weight, residual, self.eps, self.offset, "auto")
        return out, stream


class ProjectionNorm:
    """An RMS norm over all heads of a token at once."""

    def __init__(self, norm: RMSNorm) -> None:
        self.norm = norm  # of heads * head_dim values

    def __call__(self, x: Tensor) -> Tensor:  # [tokens, heads, head_dim]
        return self.norm(x.flatten(1)).view(x.shape)


class NoNorm:
    """Stands before a layer that takes the residual stream as it is."""

    def add(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        stream = x if residual is None else x + residual
        return stream, stream
