"""Tiles of a product whose operands go straight to registers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DirectPlan:
    """How it is run. Measurements: docs/performance.md.

    x and y are the weight and the activations if `transposed`, else a and b; `warps_k` warps share k,
    each of which takes `tile_k` of it at a time; `warps_x` and `warps_y` share the tile.
    early: codes of int4 weights are fetched a step before they are multiplied.
    seconds: that it is predicted to take.
    """

    tile_x: int
    tile_y: int
    tile_k: int
    warps_k: int
    warps_x: int = 1
    warps_y: int = 1
    transposed: bool = False
    early: bool = False
    seconds: float = 0.0

    @property
    def warps(self) -> int:
        return self.warps_k * self.warps_x * self.warps_y


_EARLY_TILES = 2 * 132  # two for every multiprocessor of an H200


def plan_of_codes(m: int, n: int) -> DirectPlan:
    """For a weight [n, k] in int4 and m rows of activations. The order of a sum depends on n alone."""
    tile_y = 8 if m <= 8 else 16
    tiles = -(-n // 16)
    # Tiles that all run at one time have their codes fetched early; more of them, with the fewer
    # registers of those that do not, hide each other's waiting.
    if tiles <= _EARLY_TILES:
        return DirectPlan(16, tile_y, 256, 8, transposed=True, early=True)
    return DirectPlan(16, tile_y, 256, 8 if tiles <= 2 * _EARLY_TILES else 4, transposed=True)
