"""Linear layers of several groups in plain PyTorch, accumulated in float32 or wider."""

from __future__ import annotations

import torch
from torch import Tensor

from rooftile.kernels import Kernel, anything
from rooftile.kernels.reference.precision import widen


def grouped_linear(x: Tensor, weight: Tensor, group_sizes: Tensor) -> Tensor:
    # Every row's own matrix, row by row: memory for clarity.
    group = torch.repeat_interleave(group_sizes, output_size=x.shape[0])
    return torch.einsum("ri,roi->ro", widen(x), widen(weight)[group]).to(x.dtype)


KERNELS = {"grouped_linear": Kernel(grouped_linear, anything, efficiency=0.01)}
