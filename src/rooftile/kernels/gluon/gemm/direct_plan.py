"""Tiles of a product with int4 weights, whose operands go straight to registers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DirectPlan:
    """How it is run. Measurements: docs/performance.md.

    x is the weight, y the activations; `warps_k` warps share k, each of which takes `tile_k` of it at a
    time. early: codes are fetched a step before they are multiplied.
    """

    tile_x: int
    tile_y: int
    tile_k: int
    warps_k: int
    early: bool = False


_EARLY_TILES = 2 * 132  # two for every multiprocessor of an H200


def plan_of_codes(m: int, n: int) -> DirectPlan:
    """For a weight [n, k] in int4 and m rows of activations. The order of a sum depends on n alone."""
    tile_y = 8 if m <= 8 else 16
    tiles = -(-n // 16)
    # Tiles that all run at one time have their codes fetched early; more of them, with the fewer
    # registers of those that do not, hide each other's waiting.
    if tiles <= _EARLY_TILES:
        return DirectPlan(16, tile_y, 256, 8, early=True)
    return DirectPlan(16, tile_y, 256, 8 if tiles <= 2 * _EARLY_TILES else 4)
