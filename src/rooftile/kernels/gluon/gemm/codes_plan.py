"""How one row is multiplied with an int4 weight."""

from __future__ import annotations

from dataclasses import dataclass

from rooftile.planning.hardware import H200

BLOCK = 128  # along k, whose words lie together
BLOCK_WORDS = 16
TILE = 16  # rows of the weight


@dataclass(frozen=True)
class RowPlan:
    """Measurements: docs/performance.md.

    warps: of a CTA, which share k; each takes `blocks` of 128 at a time. stages: of the ring.
    """

    warps: int
    stages: int
    blocks: int

    @property
    def step(self) -> int:
        """Of all warps, along k."""
        return self.warps * self.blocks * BLOCK


def plan_of_row(n: int, k: int) -> RowPlan | None:
    """For a weight [n, k]; `None` where the kernel for more rows (direct.py) is as fast.

    What a product takes in a chain is the time from its activations to its end, so warps are as many as
    run at a time, and steps as few as registers allow.
    """
    tiles = -(-n // TILE)
    if tiles > 6 * H200.units or (tiles > 2 * H200.units and k > 32 * BLOCK):
        return None
    if k <= 8 * BLOCK:  # one step
        return RowPlan(8, 1, 1)
    if tiles > 2 * H200.units:
        return RowPlan(8, 4, 1)
    if tiles <= H200.units and 16 * BLOCK < k <= 32 * BLOCK:  # one step
        return RowPlan(16, 1, 2)
    return RowPlan(8, 2, 2)
