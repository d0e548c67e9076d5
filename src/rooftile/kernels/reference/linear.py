"""Linear layers in plain PyTorch, accumulated in float32 or wider."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from rooftile.kernels import Kernel
from rooftile.kernels.cpu.arguments import FORMATS
from rooftile.kernels.cpu.weights import unpack
from rooftile.kernels.reference import int4_words
from rooftile.kernels.reference.precision import widen


def linear(
    x: Tensor, weight: list[Tensor], format: str, out_features: int, bias: Tensor | None
) -> Tensor:
    if format in FORMATS:
        dense = unpack(format, weight, out_features, x.shape[-1])
    elif format == "int4_words":
        words, scale = weight
        dense = int4_words.unpack(words, scale, x.shape[-1])
    else:
        dense = weight[0].to_dense() if format == "onednn" else weight[0]
    y = widen(x) @ widen(dense).T
    if bias is not None:
        y = y + widen(bias)
    return y.to(x.dtype)


def supports(call: Any) -> str | None:
    known = call.format in ("dense", "onednn", "int4_words", *FORMATS)
    return None if known else f"it cannot read {call.format!r}"


KERNELS = {"linear": Kernel(linear, supports, efficiency=0.1)}
