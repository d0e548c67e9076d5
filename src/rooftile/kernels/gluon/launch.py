"""Launching kernels with little work on the host.

Triton's own launch binds, specialises and hashes some forty arguments every time, and encodes a
tensor map for each descriptor. Here a `Launch` holds everything about a kind of call that does not
depend on where its tensors lie: calls of that kind hand addresses straight to the compiled kernel,
and tensor maps of addresses seen before are reused.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from rooftile.kernels.triton_version import BareKernel, TensorDescriptor, bare_kernel, relaunch

_MOST_MAPS = 1024  # tensor maps that one argument keeps


@dataclass(frozen=True)
class Box:
    """A tensor descriptor before it has an address."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    block_shape: tuple[int, ...]
    layout: Any

    def at(self, base: Tensor) -> Any:
        lists = (list(x) for x in (self.shape, self.strides, self.block_shape))
        return TensorDescriptor(base, *lists, self.layout)


_compiled: dict[tuple[Any, ...], Any] = {}


class Launch:
    """A kernel of four warps with all of its arguments but the addresses.

    The kernel's arguments are, in this order: a descriptor for each of `boxes`, pointers, `numbers`,
    `constants`. Types may depend only on the constants and on `dtype`.
    """

    def __init__(
        self,
        kernel: Any,
        ctas: int,
        device: torch.device,
        dtype: torch.dtype,  # of the descriptors' tensors
        boxes: tuple[Box, ...],
        numbers: tuple[int | float, ...],
        constants: tuple[tuple[str, Any], ...],
        most_registers: int | None = None,  # of a thread at launch; None: the compiler's choice
        dependent: bool = False,  # may begin while the kernel before it ends (tile/dependent.py)
    ) -> None:
        self._kernel = kernel
        self._ctas = ctas
        self._device = device
        self._boxes = boxes
        self._numbers = numbers
        self._constants = constants
        self._options = {"num_warps": 4} | ({"maxnreg": most_registers} if most_registers else {})
        if dependent:
            self._options["launch_pdl"] = True
        self._key = (kernel, device, dtype, constants, most_registers, dependent)
        self._tail = (*numbers, *(value for _, value in constants))
        self._maps: tuple[dict[int, tuple[Any, ...]], ...] = tuple({} for _ in boxes)
        self._bare: BareKernel | None = None

    def __call__(self, bases: tuple[Tensor, ...], pointers: tuple[Tensor, ...]) -> None:
        """Runs it on the current stream of its device.

        bases: the tensors that the boxes describe, on multiples of 16 bytes.
        pointers: the tensors that the kernel takes as plain pointers.
        """
        device = self._device
        if device.type == "cuda" and device.index != torch._C._cuda_getDevice():
            with torch.cuda.device(device):  # Triton launches on the current one
                self._run(bases, pointers)
        else:
            self._run(bases, pointers)

    def _run(self, bases: tuple[Tensor, ...], pointers: tuple[Tensor, ...]) -> None:
        bare = self._bare
        if bare is None:
            self._run_through_triton(bases, pointers)
            return
        arguments: list[Any] = []
        for i, maps in enumerate(self._maps):
            address = bases[i].data_ptr()
            described = maps.get(address)
            if described is None:
                if len(maps) >= _MOST_MAPS:
                    maps.clear()
                described = bare.describe(i, address, self._boxes[i].shape, self._boxes[i].strides)
                maps[address] = described
            arguments += described
        for x in pointers:
            arguments.append(x.data_ptr())
        bare.run(self._ctas, self._device.index, arguments, self._tail)

    def _run_through_triton(self, bases: tuple[Tensor, ...], pointers: tuple[Tensor, ...]) -> None:
        """The first call of a kind compiles, or finds what was compiled for another."""
        descriptors = [box.at(base) for box, base in zip(self._boxes, bases, strict=True)]
        compiled = _compiled.get(self._key)
        if compiled is None:
            compiled = self._kernel[(self._ctas,)](
                *descriptors, *pointers, *self._numbers, **dict(self._constants), **self._options
            )
            if compiled is None:  # the simulator compiles nothing
                return
            _compiled[self._key] = compiled
        else:
            relaunch(compiled, self._ctas, (*descriptors, *pointers, *self._tail))
        self._bare = bare_kernel(compiled)


@cache
def multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
