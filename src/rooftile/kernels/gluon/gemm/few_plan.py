"""How a product of few rows is cut: tiles of the weight's rows, parts of k, stages of the ring."""

from __future__ import annotations

from dataclasses import dataclass

from rooftile.kernels.triton import few

MOST_ROWS = 64
BOX_K = 64  # elements along k of a box: 128 bytes
_SHARED_BYTES = 220 * 1024  # of one CTA
_HALF = 112 * 1024  # of one of two CTAs on a multiprocessor
_BARRIERS = 256
_MOST_SPLITS = 4
# Measured alone, as the costs in stream_k_costs.json were.
_SECONDS, _BANDWIDTH = 7.6e-6, 4.3e12
_ROW_SECONDS = 1.0e-8
_SPLIT_SECONDS, _SPLIT_ROW_SECONDS = 1.0e-6, 1.3e-8
_PORTABLE_SECONDS = 6.5e-6


@dataclass(frozen=True)
class PortablePlan:
    """One to four rows, by kernels/triton/linear.py. seconds: that it is predicted to take."""

    seconds: float


@dataclass(frozen=True)
class FewRowsPlan:
    """How it is run. Measurements: docs/performance.md.

    tile: rows of the weight that a CTA multiplies. splits: CTAs that share a tile's k.
    pieces: boxes of 128 bytes along k of a stage. warps: four or eight.
    seconds: that it is predicted to take.
    """

    tile: int
    splits: int
    pieces: int = 2
    stages: int = 4
    warps: int = 4
    seconds: float = 0.0


def padded_rows(m: int) -> int:
    """Columns of the right operand: what the matrix unit takes, and the copy engine's box."""
    return max(8, 1 << (m - 1).bit_length())


def most_stages(tile: int, m: int, pieces: int, shared: int = _HALF) -> int:
    return (shared - _BARRIERS) // (pieces * (tile + padded_rows(m)) * 2 * BOX_K)


def plan_of_few_rows(m: int, n: int, k: int, num_sms: int, gated: bool) -> FewRowsPlan | None:
    """For a weight [n, k] and m rows; `None` where another kernel is faster, or none of this can.

    gated: half of n are a gate for the other half, and lie in the same tiles.
    """
    if m > MOST_ROWS or (gated and n <= 64 * num_sms):
        return None
    rows = padded_rows(m)
    tiles = -(-n // 64)
    if tiles <= num_sms and not gated:
        tile, warps, shared = 64, 4, _SHARED_BYTES
    elif tiles <= 2 * num_sms and not gated:
        tile, warps, shared = 64, 4, _HALF
    elif rows < MOST_ROWS:
        tile, warps, shared = 128, 4, _HALF
    else:
        tile, warps, shared = 256, 8, _SHARED_BYTES
    tiles = -(-n // tile)
    splits = max(min(num_sms // tiles, _MOST_SPLITS, -(-k // (2 * BOX_K))), 1)
    # As much of a row at a time as may be, but three stages at least or all there is.
    pieces = 4 if tile == 64 and (rows <= 16 or k <= splits * 12 * BOX_K) else 2
    steps = -(-k // (BOX_K * pieces))
    splits = min(splits, steps)
    stages = max(min(most_stages(tile, m, pieces, shared), -(-steps // splits)), 2)
    if tile > 64:
        stages = 2  # more CTAs at a time instead
    seconds = _SECONDS + 2.0 * (n * k + m * k + m * n) / _BANDWIDTH + _ROW_SECONDS * rows
    if splits > 1:
        seconds += _SPLIT_SECONDS + _SPLIT_ROW_SECONDS * rows
    return FewRowsPlan(tile, splits, pieces, stages, warps, seconds)


def plan_of_portable(m: int, n: int, k: int) -> PortablePlan | None:
    if not few.takes(m, k):
        return None
    return PortablePlan(_PORTABLE_SECONDS + 2.0 * n * k / _BANDWIDTH)
