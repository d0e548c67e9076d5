"""Tiles of matrix products of any width, in clusters of CTAs one below the other and side by side.

A matrix instruction takes any multiple of eight columns, so that tiles can be as wide as makes them
fill the machine once, twice or three times: of 904 x 2280 in tiles of 128 x 128 and 132 CTAs at a
time, 12 wait for a second turn; in tiles of 128 x 144 there are 128. The CTAs of a cluster that are one
below the other load the columns of their tiles together, those side by side the rows.
"""

from __future__ import annotations

PIECE = 8  # columns
# By rows: narrower ones load more than they multiply, wider ones need more registers than there are.
NARROWEST, WIDEST = {256: 96, 128: 72, 64: 48}, {256: 200, 128: 240, 64: 240}
# CTAs one below the other, and side by side, by rows of a tile: those that gained something.
TOGETHER = {
    256: ((1, 1), (2, 1), (1, 2)),
    128: ((1, 1), (2, 1), (1, 2), (1, 4), (2, 2), (2, 4)),
    64: ((2, 1), (1, 2), (4, 1), (1, 4), (2, 2), (4, 2), (2, 4)),
}
MOST_IN_TURN = 64  # columns
# Turns in which all tiles are computed, and parts along k of each.
FILLS = ((1, 1), (2, 1), (3, 1), (1, 2), (1, 3), (1, 4), (1, 6), (1, 8))


def is_odd(columns: int) -> bool:
    """Whether it is no power of two."""
    return columns & (columns - 1) != 0


def power_below(columns: int) -> int:
    """The largest power of two that is no more."""
    return 1 << (columns.bit_length() - 1)


def step_of(rows: int, sharers: int) -> int:
    """What widths are multiples of: whole pieces for each CTA that loads some of the columns, and where
    there are 64 rows for both warpgroups, which share the columns."""
    return PIECE * max(sharers, 128 // rows, 1)


def takes_turns(rows: int, columns: int) -> bool:
    """Whether the two warpgroups of a tile multiply all of its columns, and take the steps along K in turn."""
    return rows == 64 and columns <= MOST_IN_TURN
