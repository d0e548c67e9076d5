"""Tensors as the copy engine addresses them (compute capability 9.0 and later)."""

from typing import Any

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from rooftile.kernels.offline import capability


def has_copy_engine(device: torch.device) -> bool:
    return capability(device) >= (9, 0)


def unit_stride(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def is_addressable(x: Tensor) -> bool:
    """Whether the copy engine can load from x [a, b, c, dim]: whole 16 bytes, and something to load."""
    unit = 16 // x.element_size()
    return (
        x.numel() > 0
        and x.data_ptr() % 16 == 0
        and all(
            size == 1 or (stride > 0 and stride % unit == 0)
            for size, stride in zip(x.shape[:3], x.stride()[:3], strict=True)
        )
    )


def describe(
    x: Tensor,  # [batch, length, heads, dim]
    block: int,
    tile: int,
) -> Any:
    """[batch, heads, length, dim], loaded in boxes of [1, 1, block, tile]."""
    batch, length, heads, dim = x.shape
    unit = 16 // x.element_size()
    # A dimension of size 1 is never stepped over, so any legal stride will do.
    strides = [x.stride(i) if x.shape[i] > 1 else unit for i in (0, 2, 1)]
    return TensorDescriptor(x, [batch, heads, length, dim], [*strides, 1], [1, 1, block, tile])
