"""Copies from global to shared memory that the threads of a role start and wait for (cp.async)."""

from __future__ import annotations

from typing import Any

import torch

from tests.support.gluon_sim import machine
from tests.support.gluon_sim.memory import Pointer, SharedTile


class Group:
    """Copies that are waited for together."""

    def __init__(self) -> None:
        self.left = 0


def _groups() -> list[Group]:
    """Of the current role, the last one still open."""
    role = machine.role()
    if not hasattr(role, "copy_groups"):
        role.copy_groups = [Group()]  # type: ignore[attr-defined]
    groups: list[Group] = role.copy_groups  # type: ignore[attr-defined]
    return groups


def start(shared: SharedTile, source: Pointer, mask: Any = None) -> None:
    """The target holds nothing until the copy has landed; what is masked away becomes 0."""
    group = _groups()[-1]
    group.left += 1
    shared.poison()
    places, wanted = source.places(mask, "a copy", reads=True)

    def complete() -> None:
        if wanted is None:
            shared.data.copy_(source.memory[places])
        elif bool(wanted.any()):
            values = source.memory[places]
            shared.data.copy_(torch.where(wanted, values, torch.zeros((), dtype=values.dtype)))
        else:  # the tensor may be empty
            shared.data.zero_()
        group.left -= 1

    machine.scheduler().events.append(complete)
    machine.scheduler().pause()


def commit() -> None:
    _groups().append(Group())


def wait(outstanding: int = 0) -> None:
    """Until at most that many of the groups committed last are still on their way."""
    closed = _groups()[:-1]
    covered = closed[: max(len(closed) - outstanding, 0)]
    machine.scheduler().pause(lambda: all(not group.left for group in covered), "copies to land")
