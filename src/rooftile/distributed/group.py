"""The processes that share one model: who am I, and the two collectives the layers need."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class ParallelGroup:
    """Rank `rank` of `size` processes, over torch.distributed (its default group, or `process_group`).

    At size 1 every collective returns its argument and torch.distributed is never touched.

    Raises:
        ValueError: size < 1, or rank outside [0, size).
    """

    rank: int = 0
    size: int = 1
    process_group: ProcessGroup | None = None

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"ParallelGroup: size is {self.size}; it must be at least 1")
        if not 0 <= self.rank < self.size:
            raise ValueError(
                f"ParallelGroup: rank is {self.rank}; it must be in [0, {self.size}), the group's size"
            )

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of every rank's `x`, in place."""
        if self.size > 1:
            torch.distributed.all_reduce(x, group=self.process_group)
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        """Every rank's `x` [..., n] side by side, in rank order: [..., size * n]."""
        if self.size == 1:
            return x
        parts = [
            torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(self.size)
        ]
        torch.distributed.all_gather(parts, x.contiguous(), group=self.process_group)
        return torch.cat(parts, -1)

    def share(self, what: str, total: int) -> slice:
        """This rank's part of `total` things that only split evenly.

        Raises:
            ValueError: `total` is not a multiple of the group's size.
        """
        if total % self.size:
            raise ValueError(
                f"cannot split {total} {what} over {self.size} processes; "
                f"use a number of processes that divides {total}"
            )
        each = total // self.size
        return slice(self.rank * each, (self.rank + 1) * each)
