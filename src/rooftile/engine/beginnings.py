"""What two lists begin with in common."""

from __future__ import annotations

from collections.abc import Sequence


def common_length(one: Sequence[int], other: Sequence[int], most: int | None = None) -> int:
    """How many leading entries are equal, of the first `most`. By halves, since whole slices are
    compared much faster than entries.
    """
    least, end = 0, min(len(one), len(other))
    if most is not None:
        end = min(end, most)
    while least < end:
        middle = (least + end + 1) // 2
        if one[least:middle] == other[least:middle]:
            least = middle
        else:
            end = middle - 1
    return least
