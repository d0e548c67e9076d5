"""How the portable attention runs each head dim. Needs no Triton, so that `rooftile explain` can read it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from rooftile.kernels.triton.interpreter import INTERPRETED

LARGEST_DIM = 256  # of keys and of values


@dataclass(frozen=True)
class Config:
    """One CTA: rows of queries, keys at a time, warps, blocks of K and V in flight."""

    tile_rows: int
    block: int
    num_warps: int
    num_stages: int


SHORT_Q_LEN = 512


@cache
def _config_of(dim: int, itemsize: int, short_causal: bool) -> Config:
    if INTERPRETED:
        return Config(32, 32, 4, 1)
    if itemsize == 4:
        return Config(64, 32, 4, 2)
    # Several small CTAs share an SM, so that one's beginning and end hide behind another's loop.
    # H200, geometric mean over FA2 of the forward table, 64x64 with 4 warps against 128x64 with 8:
    # d64 1.41, 1.18; d128 1.49, 1.27; d256 1.14, 1.47 (there only one CTA fits either way).
    if dim <= 128:
        return Config(64, 64, 4, 3)
    # Without a second stage two CTAs fit at d256: causal s512 246 TFLOP/s against 238 (FA2 208).
    return Config(64, 64, 4, 1) if short_causal else Config(128, 64, 8, 2)


def config_of(
    dim: int, itemsize: int, q_len: int = SHORT_Q_LEN + 1, causal: bool = False
) -> Config:
    """dim: the larger head dim, as a power of two; itemsize: bytes of an element; q_len: the most
    rows of a sequence."""
    return _config_of(dim, itemsize, causal and q_len <= SHORT_Q_LEN)
