"""Tiles of a product whose loads the compiler pipelines (kernels/triton/gemm_tiles.py)."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

from torch import Tensor

from rooftile.planning.tile_cost import STAGES

UNIT = 8  # elements of 2 bytes that are loaded at a time, at most


@dataclass(frozen=True)
class TilePlan:
    """seconds: that it is predicted to take."""

    block_m: int
    block_n: int
    seconds: float = 0.0
    block_k: int = 64
    warps: int = 4
    stages: int = STAGES


def row_unit(x: Tensor) -> int:  # [rows, columns] of 2-byte elements, columns contiguous
    """Elements that can be loaded at a time: rows begin, and end, on multiples of them."""
    stride = x.stride(0) if x.shape[0] > 1 else 0
    return gcd(stride, x.data_ptr() // x.element_size(), x.shape[1], UNIT)
