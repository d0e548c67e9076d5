"""How one row is multiplied with an int4 weight."""

from __future__ import annotations

from dataclasses import dataclass, replace

from rooftile.planning.hardware import H200

BLOCK = 128  # along k, whose words lie together
BLOCK_WORDS = 16


@dataclass(frozen=True)
class RowPlan:
    """Measurements: docs/performance.md.

    warps: of a CTA, which share k; each takes `blocks` of 128 at a time. stages: of the ring. tile: rows
    of the weight at a time, 8 or 16. ctas: each takes every so many-th tile. once: all codes of a CTA
    become operands before the activations are there; the ring has to hold them.
    """

    warps: int
    blocks: int
    stages: int
    tile: int
    ctas: int
    once: bool = False

    def parts(self, k: int) -> int:
        """Of k, which all warps take together."""
        return -(-k // (self.warps * self.blocks * BLOCK))

    def tiles(self, n: int) -> int:
        """Of a CTA at most."""
        return -(-n // (self.tile * self.ctas))

    def room(self, n: int) -> int:
        """Tiles that there is room for: a power of two."""
        return 1 << (self.tiles(n) - 1).bit_length()


_BESIDE = 72 * 1024  # bytes of a ring that leaves as much to the next kernel's
_ALONE = 216 * 1024  # and of one that does not, with the sums of all tiles
_MOST_STAGES = 8
_MOST_HELD = 4  # tiles whose sums a CTA holds in registers while it goes through k
_MOST_TILES = 64  # and in shared memory


def plan_of_row(n: int, k: int) -> RowPlan | None:
    """For a weight [n, k]; `None` where the copy engine cannot address its scales.

    As many CTAs as multiprocessors, with work or without, since with fewer some multiprocessors get two
    (6144 x 1024: 2.1 microseconds, 3.3 with 128 CTAs).
    """
    of_k = -(-k // BLOCK)
    if of_k % 2:
        return None
    tile = 8 if n <= 8 * H200.units else 16
    tiles = -(-n // (tile * H200.units))
    few = tiles <= _MOST_HELD
    if of_k <= 8:
        warps, blocks, once = (8, 1, True) if few and tiles > 2 else (4, 2, False)
    elif of_k <= 16:
        warps, blocks, once = 8, 2, tiles == 1
    elif of_k <= 32 and (tiles <= 2 or not few):
        warps, blocks, once = 8, 4, False
    else:
        warps, blocks, once = 4, 4, False
    plan = RowPlan(warps, blocks, 1, tile, H200.units, once)
    parts, most = plan.parts(k), _MOST_HELD if plan.parts(k) > 1 else _MOST_TILES
    plan = replace(plan, ctas=max(plan.ctas, -(-n // (tile * most))))
    tiles = plan.tiles(n)
    stage = warps * blocks * tile * (BLOCK_WORDS * 4 + 8)
    shared = _BESIDE if tiles <= _MOST_HELD else _ALONE - plan.room(n) * warps * tile * 4
    return replace(plan, stages=min(parts * tiles, shared // stage, _MOST_STAGES))
