"""What a kernel may access through an argument: the tensor it was given, not the memory around it.

A GPU answers an access beyond a tensor with a fault only where the allocator's segment ends, and a read of
memory that nobody wrote with whatever was there. Here both are errors, for every lane that a mask lets
through, whether what it read is used or not.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.gluon_sim.errors import SimulationError

_VECTOR_BYTES = 16
_EMPTY = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")


class _Written(TorchDispatchMode):
    """Which bytes somebody has written, of memory that host code allocates without filling it.

    Such memory is filled with NaN or the least integer. It is kept until the simulation ends, so that
    nothing else comes to lie at its address.
    """

    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[int, tuple[Any, Tensor]] = {}  # by address: storage, [bytes] bool

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ in _EMPTY:
            storage = result.untyped_storage()
            if storage.nbytes():
                torch.as_strided(
                    result, (storage.nbytes() // result.element_size(),), (1,), 0
                ).fill_(nothing(result.dtype))
                written = torch.zeros(storage.nbytes(), dtype=torch.bool)
                self.storages[storage.data_ptr()] = storage, written
            return result
        arguments = zip(func._schema.arguments, args, strict=False)
        given = {a.name: a for a in func._schema.arguments}
        for argument, value in (*arguments, *((given[k], v) for k, v in (kwargs or {}).items())):
            if argument.alias_info is not None and argument.alias_info.is_write:
                for x in value if isinstance(value, (list, tuple)) else [value]:
                    if isinstance(x, Tensor):
                        self.storages.pop(x.untyped_storage().data_ptr(), None)  # all of it, say
        return result


_now: list[_Written] = []


@contextmanager
def watching_what_is_written() -> Iterator[None]:
    """Inside, reads of memory that host code allocates and nobody writes are found."""
    mode = _Written()
    _now.append(mode)
    try:
        with mode:
            yield
    finally:
        _now.pop()


def nothing(dtype: torch.dtype) -> float | int:
    """What memory that nobody wrote is filled with."""
    if dtype == torch.bool:
        return 0
    return math.nan if dtype.is_floating_point else torch.iinfo(dtype).min


def flat(x: Tensor) -> Tensor:
    """All of a tensor's storage, so that strides and wrong addresses act as on a GPU."""
    size = x.untyped_storage().nbytes() // x.element_size()
    return torch.as_strided(x.detach(), (size,), (1,), 0)


class Region:
    """The elements of a storage from a tensor's first to its last.

    A tensor that ends where its storage ends may be read up to a multiple of 16 bytes (`last_vector`):
    allocators give memory in larger units, and kernels that move rows read whole vectors. What is
    there is `nothing`.
    """

    def __init__(self, x: Tensor, name: str = "a tensor") -> None:
        self.name = name
        self.memory = flat(x)
        steps = [(n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True)]
        self.first = x.storage_offset() + sum(min(step, 0) for step in steps)
        self.end = x.storage_offset() + sum(max(step, 0) for step in steps) + 1
        if x.numel() == 0:
            self.end = self.first
        self._size = x.element_size()
        is_all = self.end == self.memory.numel()
        unit = _VECTOR_BYTES // self._size
        self.last_vector = int(-(-self.end // unit) * unit if is_all else self.end)
        self._written: Tensor | None = None
        if _now:
            _, self._written = _now[-1].storages.get(x.untyped_storage().data_ptr(), (None, None))

    def check(self, places: Tensor, what: str, reads: bool) -> None:
        """Raises where one of these elements is beyond the tensor, or is read and was never written."""
        if places.numel() == 0:
            return
        low, high = torch.aminmax(places)
        self.check_span(int(low), int(high), what, self.last_vector if reads else None)
        if reads:
            self.check_written(places, what)

    def check_span(self, low: int, high: int, what: str, end: int | None = None) -> None:
        """The same of all that lies from element `low` to element `high`, as far as the tensor goes."""
        if low < self.first or high >= (self.end if end is None else end):
            wrong = low if low < self.first else high
            raise SimulationError(
                f"{what} reaches beyond its tensor: element {wrong - self.first} of {self.name}, which has "
                f"{self.end - self.first}"
            )

    def check_written(self, places: Tensor, what: str) -> None:
        if self._written is not None:
            there = self._written[places[places < self.end] * self._size]
            if not bool(there.all()):
                never = int(places[places < self.end][~there].min()) - self.first
                raise SimulationError(f"{what} of element {never} of {self.name}: nobody wrote it")

    def read(self, places: Tensor) -> Tensor:
        """What is there."""
        if self.last_vector == self.end:
            return self.memory[places]
        beyond = places >= self.memory.numel()
        values = self.memory[places.clamp(max=self.memory.numel() - 1)]
        return values.masked_fill(beyond, nothing(values.dtype)) if bool(beyond.any()) else values

    def wrote(self, places: Tensor) -> None:
        if self._written is not None:
            self._written.view(-1, self._size)[places] = True
