"""Kernels: `kernels/<family>/<operator file>.py`, the same file name in every family.

A kernel module ends with a table `KERNELS` that names, for each operator it implements, the
function and, in one place, what that function supports. `rooftile.ops` reads the tables; kernels
never import from `rooftile.ops`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Kernel:
    """One implementation of one operator.

    run: takes the operator's private arguments (see its schema), without the `kernel` argument. On a
        GPU, tensors of one dimension come without a stride.
    supports: static properties of a call -> `None`, or the reason why this kernel cannot take it.
    efficiency: share of the roofline that it is known to reach, 0 to 1; `kernel="auto"` takes the
        highest, that is the least predicted time, among those that support the call.
    bind: where calls of one kind (equal shapes, strides, dtypes, devices and options) can share work
        on the host: takes what `run` takes and `results`, how many of its results the caller reads,
        and returns a function of the tensors alone. Results beyond these may be None.
    split: of a kernel that follows a plan, how it wants a call to be split: (call, batch, tokens,
        max_q_len, max_kv_len) -> types.SplitSpec, the last four being capacities.
    """

    run: Callable[..., Any]
    supports: Callable[[Any], str | None]
    efficiency: float | Callable[[Any], float]

    def efficiency_of(self, call: Any) -> float:
        return self.efficiency(call) if callable(self.efficiency) else self.efficiency

    split: Callable[..., Any] | None = None
    bind: Callable[..., Callable[..., Any]] | None = None


def anything(call: object) -> None:
    """`supports` of a kernel that takes every valid call."""
