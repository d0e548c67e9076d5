"""The precision that reference kernels accumulate in."""

from __future__ import annotations

import torch
from torch import Tensor


def widen(x: Tensor) -> Tensor:
    """x in float32, or unchanged where it is float64 (so that float64 inputs make an oracle)."""
    return x if x.dtype == torch.float64 else x.float()
