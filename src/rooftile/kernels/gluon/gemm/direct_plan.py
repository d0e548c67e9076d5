"""Tiles of a product of int4 weights."""

from __future__ import annotations

from dataclasses import dataclass

_FEW_TILES = 2 * 132  # two for every multiprocessor of an H200


@dataclass(frozen=True)
class DirectPlan:
    """How it is run. Measurements: docs/performance.md.

    `warps` warps share k, each of which takes `tile_k` of it at a time, of `tile` rows of the weight and
    `rows` of the activations. most_ctas: that run at one time.
    """

    tile: int
    rows: int
    tile_k: int
    warps: int
    most_ctas: int


def plan_of_codes(m: int, n: int) -> DirectPlan:
    """For a weight [n, k] and m rows of activations. The order of a sum depends on n alone."""
    rows = 8 if m <= 8 else 16
    # Where every multiprocessor has two tiles at most, more warps share them.
    if -(-n // 16) <= _FEW_TILES:
        return DirectPlan(16, rows, 256, 8, 2 * 132)
    return DirectPlan(16, rows, 256, 4, 4 * 132)
