"""How a product of few rows is cut: tiles of the weight's rows, parts of k, stages of the ring."""

from __future__ import annotations

from dataclasses import dataclass

MOST_ROWS = 64
BOX_BYTES = 128  # along k
# Two CTAs, one of this launch and one of the next, share a multiprocessor's 227 KiB.
HALF = 112 * 1024
_BARRIERS = 256


@dataclass(frozen=True)
class FewRowsPlan:
    """How it is run. Measurements: docs/performance.md.

    tile: rows of the weight that a CTA multiplies. splits: CTAs that share a tile's k.
    pieces: boxes of 128 bytes along k of a stage. warps: four or eight.
    seconds: that it is predicted to take.
    """

    tile: int
    splits: int
    pieces: int = 1
    stages: int = 4
    warps: int = 4
    seconds: float = 0.0


def padded_rows(m: int) -> int:
    """Columns of the right operand: what the matrix unit takes, and the copy engine's box."""
    return max(8, 1 << (m - 1).bit_length())


def shared_bytes(plan: FewRowsPlan, m: int) -> int:
    """Of a CTA's ring."""
    return plan.stages * plan.pieces * (plan.tile + padded_rows(m)) * BOX_BYTES + _BARRIERS


def most_stages(tile: int, m: int, pieces: int, shared: int = HALF) -> int:
    return (shared - _BARRIERS) // (pieces * (tile + padded_rows(m)) * BOX_BYTES)
