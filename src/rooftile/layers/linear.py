"""Linear layers over packed weights: plain or column-parallel, and row-parallel."""

from __future__ import annotations

from torch import Tensor

from rooftile.distributed.group import ParallelGroup
from rooftile.layers.norm import RMSNorm
from rooftile.ops.linear import LINEAR
from rooftile.ops.normed_linear import NORMED_LINEAR
from rooftile.ops.packed_weight import check_packed
from rooftile.types import PackedWeight


def _apply(x: Tensor, weight: PackedWeight, tensors: list[Tensor], bias: Tensor | None) -> Tensor:
    return LINEAR.handle(x, tensors, weight.format, weight.shape[0], bias, "auto")


class Linear:
    """y = x W^T + b. With this rank's rows of W it is a column-parallel layer: nothing else changes."""

    def __init__(self, weight: PackedWeight, bias: Tensor | None = None) -> None:
        check_packed("Linear", "weight", weight)
        self.weight = weight  # [out, in]
        self.bias = bias  # [out]
        self._tensors = list(weight.tensors.values())

    def __call__(self, x: Tensor) -> Tensor:  # [..., in] -> [..., out]
        return _apply(x, self.weight, self._tensors, self.bias)

    def after_norm(
        self, x: Tensor, residual: Tensor | None, norm: RMSNorm, activation: str = ""
    ) -> tuple[Tensor, Tensor]:
        """This layer of the norm of x + residual, gated where there is an activation, and x +
        residual, in one operator; for dense weights.
        """
        out, stream = NORMED_LINEAR.handle(
            *(x, residual, norm.weight, norm.eps, norm.offset, self._tensors[0], self.bias),
            *(activation, "auto"),
        )
        return out, stream


class RowParallelLinear:
    """y = sum over ranks of x_r W_r^T, + b: each rank holds some columns of W, and all of b."""

    def __init__(self, weight: PackedWeight, bias: Tensor | None, group: ParallelGroup) -> None:
        check_packed("RowParallelLinear", "weight", weight)
        self.weight = weight  # [out, in of this rank]
        self.bias = bias  # [out]
        self.group = group
        self._tensors = list(weight.tensors.values())

    def __call__(self, x: Tensor) -> Tensor:  # [..., in of this rank] -> [..., out]
        if self.group.size == 1:
            return _apply(x, self.weight, self._tensors, self.bias)
        y = self.group.all_reduce(_apply(x, self.weight, self._tensors, None))
        return y if self.bias is None else y + self.bias
