"""Linear layers through torch: its own matrix product, or oneDNN's on a prepacked weight."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rooftile.kernels import Kernel

FORMATS = ("dense", "onednn")


def linear(
    x: Tensor, weight: list[Tensor], format: str, out_features: int, bias: Tensor | None
) -> Tensor:
    if format == "dense":
        return F.linear(x, weight[0], bias)
    return torch.ops.mkldnn._linear_pointwise(x, weight[0], bias, "none", [], "")


def supports(call: Any) -> str | None:
    if call.format not in FORMATS:
        return f"it reads weights packed as {' or '.join(FORMATS)} only"
    return None


KERNELS = {"linear": Kernel(linear, supports, efficiency=0.5)}
