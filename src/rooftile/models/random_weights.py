"""Random weights of any decoder, made where they are used: for benchmarks and tests."""

from __future__ import annotations

import zlib

import torch
from torch import Tensor

from rooftile.models.config import DecoderConfig
from rooftile.models.weights import WHOLE, weight_shapes

STANDARD_DEVIATION = 0.02  # the usual initializer_range of model cards
# Larger tensors repeat this many values: random numbers cost twenty times as much as copying them.
# A prime, so that rows do not line up with the period and no two of a matrix are alike.
PERIOD = 1_000_003


class RandomWeights:
    """Matrices and biases uniform with a standard deviation of 0.02; norms multiply by 1.

    A tensor depends on the seed, its name, its dtype and its device only, so every rank of a
    parallel group cuts its share out of the same matrix.
    """

    def __init__(self, config: DecoderConfig, seed: int) -> None:
        self.shapes = weight_shapes(config)
        self.norm_weight = 1.0 - config.norm_offset
        self.seed = seed

    def read(self, name: str, out: Tensor, rows: slice = WHOLE, columns: slice = WHOLE) -> None:
        if name.endswith("norm"):
            out.fill_(self.norm_weight)
            return
        seed = zlib.crc32(name.encode(), self.seed & 0xFFFFFFFF) ^ (self.seed >> 32)
        generator = torch.Generator(out.device).manual_seed(seed)
        whole = torch.empty(self.shapes[name], dtype=out.dtype, device=out.device)
        flat = whole.view(-1)
        half_width = STANDARD_DEVIATION * 3**0.5
        flat[:PERIOD].uniform_(-half_width, half_width, generator=generator)
        for start in range(PERIOD, flat.numel(), PERIOD):
            flat[start : start + PERIOD] = flat[: min(PERIOD, flat.numel() - start)]
        out.copy_(whole[rows] if whole.dim() == 1 else whole[rows, columns])
