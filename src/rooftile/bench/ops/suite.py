"""What the measurements of one operator consist of."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rooftile.ops.operator import Operator
from rooftile.planning.roofline import Work

Run = Callable[[], Any]


def families_of(
    operator: Operator,
    call: Hashable,
    device: torch.device,
    asked: Sequence[str] | None,
    left_out: Collection[str] = (),
) -> list[str]:
    """The kernels asked for; `None`: all but `left_out` that take the call, the plain reference only on
    a CPU.

    Raises:
        ValueError, NotImplementedError: one that was asked for does not exist, or refuses the call.
    """
    if asked is None:
        return [
            family
            for family in operator.families
            if operator.refusal(call, family) is None
            and family not in left_out
            and (family != "reference" or device.type == "cpu")
        ]
    for family in asked:
        operator.choose(call, family)
    return list(asked)


def check_peers(operator: str, peers: Sequence[str], known: Collection[str]) -> None:
    """Raises ValueError for the first that is not known."""
    for peer in peers:
        if peer not in known:
            raise ValueError(
                f"there is no peer {peer!r} for {operator}; choose from {', '.join(known)}"
            )


@dataclass(frozen=True)
class Problem:
    """One case on one device, with everybody who computes it.

    kernels: family -> a call of our operator with that kernel; peers: name -> the same work by
    somebody else. check: takes what any of them returned and gives its error; raises
    `WrongResult` where that is too large. absent: peer -> why it cannot run this case.
    """

    case: str
    work: Work
    kernels: Mapping[str, Run]
    peers: Mapping[str, Run]
    absent: Mapping[str, str]
    check: Callable[[Any], float]


@dataclass(frozen=True)
class Suite:
    """groups: name -> cases; gpu, cpu: the groups that run when none is asked for.

    make: (case, device, dtype, kernels or None for all that support it, peers) -> `Problem`.
    bandwidth: of a suite that memory binds: device -> bytes a second that reading alone reaches,
        measured when it is called.
    beside: peers that are timed on a GPU when none is asked for.
    build: (case, dtype, family) -> calls that family's host code on CPU tensors without contents,
        inside `rooftile.kernels.offline`; families: those that are compiled.
    """

    name: str
    groups: Mapping[str, tuple[str, ...]]
    gpu: tuple[str, ...]
    cpu: tuple[str, ...]
    peers: tuple[str, ...]
    make: Callable[[str, torch.device, torch.dtype, Sequence[str] | None, Sequence[str]], Problem]
    families: tuple[str, ...] = ()
    build: Callable[[str, torch.dtype, str], None] | None = None
    bandwidth: Callable[[torch.device], float] | None = None
    beside: tuple[str, ...] = ()

    def cases(self, names: Sequence[str]) -> list[tuple[str, str]]:
        """(name that rows are filed under, case); groups are replaced by their cases.

        Whatever is no group is a case itself, filed under the operator's name like `forward`.
        """
        return [
            (
                self.name
                if name == "forward" or name not in self.groups
                else f"{self.name}_{name}",
                case,
            )
            for name in names
            for case in self.groups.get(name, (name,))
        ]


class WrongResult(ValueError):
    """A result that is further from the oracle than rounding explains; it is not timed."""
