"""Launching kernels with little work on the host.

Triton's own launch binds, specialises and hashes some forty arguments every time, and encodes a
tensor map for each descriptor. Here a `Launch` holds everything about a kind of call that does not
depend on where its tensors lie: calls of that kind hand addresses straight to the compiled kernel,
and tensor maps of addresses seen before are reused.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from rooftile.kernels.gluon.first_call import sooner, unchecked
from rooftile.kernels.triton_version import BareKernel, TensorDescriptor, bare_kernel, relaunch

_MOST_DESCRIBED = 128  # sets of addresses whose tensor maps are kept


@dataclass(frozen=True)
class Box:
    """A tensor descriptor before it has an address.

    copied: what is copied at a time where Triton, whose tiles are powers of two, is told another
        `block_shape`; kernels that take such a box copy it by assembly.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    block_shape: tuple[int, ...]
    layout: Any
    copied: tuple[int, ...] | None = None

    def at(self, base: Tensor) -> Any:
        lists = (list(x) for x in (self.shape, self.strides, self.block_shape))
        return TensorDescriptor(base, *lists, self.layout)


_compiled: dict[tuple[Any, ...], Any] = {}


class Launch:
    """A kernel with all of its arguments but the addresses.

    The kernel's arguments are, in this order: a descriptor for each of `boxes`, pointers, `numbers`,
    `constants`. Types may depend only on the constants and on `dtype`.
    """

    def __init__(
        self,
        kernel: Any,
        ctas: int,
        device: torch.device,
        dtype: Hashable,  # of the tensors, as far as they may differ
        boxes: tuple[Box, ...],
        numbers: tuple[int | float | tuple[()], ...],
        constants: tuple[tuple[str, Any], ...],
        most_registers: int | None = None,  # of a thread at launch; None: the compiler's choice
        warps: int = 4,  # of a CTA, before a kernel adds roles
        dependent: bool = False,  # it may start under the end of another: tile/dependent.py
        stages: int | None = None,  # of loads that the compiler pipelines; None: its choice
        cluster: int = 1,  # CTAs of a cluster, of which Triton need not know: tile/cluster.py
        absent: int = 0,  # descriptors after the last box that this kind of call does without
    ) -> None:
        self._kernel = kernel
        self._ctas = ctas
        self._cluster = cluster
        self._index = device.index if device.type == "cuda" else None
        self._boxes = boxes
        self._numbers = numbers
        self._constants = constants
        self._options: dict[str, int] = {"num_warps": warps, **unchecked()}
        if dependent:
            self._options["launch_pdl"] = True
        if most_registers:
            self._options["maxnreg"] = most_registers
        if stages:
            self._options["num_stages"] = stages
        options = (most_registers, warps, dependent, stages, absent)
        self._key = (kernel, device, dtype, constants, options)
        self._absent = (None,) * absent
        self._tail = (*numbers, *(value for _, value in constants))
        self._maps: dict[tuple[int, int], Any] = {}  # by argument and address
        self._described: dict[tuple[int, ...], tuple[Any, ...]] = {}  # by addresses of all
        self._bare: BareKernel | None = None

    def __call__(self, bases: tuple[Tensor, ...], pointers: tuple[Tensor, ...]) -> None:
        """Runs it on the current stream of its device.

        bases: the tensors that the boxes describe, on multiples of 16 bytes.
        pointers: the tensors that the kernel takes as plain pointers.
        """
        index = self._index
        if index is not None and index != torch._C._cuda_getDevice():
            with torch.cuda.device(index):  # Triton launches on the current one
                self(bases, pointers)
            return
        if self._bare is None or index is None:
            self._run_through_triton(bases, pointers)
            return
        self.at(tuple([x.data_ptr() for x in bases]), [x.data_ptr() for x in pointers])

    @property
    def is_ready(self) -> bool:
        """Whether `at` can be called: not before the kernel ran once, and on the current device only."""
        return self._bare is not None and self._index == torch._C._cuda_getDevice()

    def at(self, bases: tuple[int, ...], pointers: Sequence[int]) -> None:
        """The same with addresses instead of tensors, for callers that have them at hand."""
        bare = self._bare
        assert bare is not None
        assert self._index is not None
        described = self._described.get(bases)
        if described is None:
            described = self._describe(bare, bases)
        bare.launch(
            *(self._ctas // self._cluster, 1, 1, bare.current_stream(self._index)),
            *bare.handles,
            *described,
            *pointers,
            *self._tail,
        )

    def with_captured(
        self,
        bases: tuple[Tensor, ...],
        pointers: tuple[Tensor, ...],
        captured: tuple[tuple[Tensor, ...], ...],  # instead of the last of `numbers`
    ) -> None:
        """The same through Triton's own launch, for tensors whose number and types it has to see."""
        descriptors = self._descriptors(bases)
        numbers = self._numbers[: len(self._numbers) - len(captured)]
        with torch.cuda.device(self._index) if self._index is not None else nullcontext():
            self._kernel[(self._ctas,)](
                *(*descriptors, *pointers, *numbers, *captured),
                **(dict(self._constants) | self._options),
            )

    def _describe(self, bare: BareKernel, addresses: tuple[int, ...]) -> tuple[Any, ...]:
        """The arguments that stand for the descriptors of tensors at these addresses."""
        if len(self._described) >= _MOST_DESCRIBED:
            self._described.clear()
            self._maps.clear()
        described: list[Any] = []
        for i, (address, box) in enumerate(zip(addresses, self._boxes, strict=True)):
            found = self._maps.get((i, address))  # another thread may clear what it was in
            if found is None:
                found = bare.tensor_map(i, address, box.shape, box.strides, box.copied)
                self._maps[i, address] = found
            described += (found, *box.shape, *box.strides)
        self._described[addresses] = whole = (*described, *self._absent)
        return whole

    def _descriptors(self, bases: tuple[Tensor, ...]) -> tuple[Any, ...]:
        boxes = zip(self._boxes, bases, strict=True)
        return (*(box.at(base) for box, base in boxes), *self._absent)

    def _run_through_triton(self, bases: tuple[Tensor, ...], pointers: tuple[Tensor, ...]) -> None:
        """The first call of a kind compiles, or finds what was compiled for another."""
        own_boxes = any(box.copied for box in self._boxes)
        later = self._cluster > 1 or own_boxes  # Triton's own launch would be another
        descriptors = self._descriptors(bases)
        compiled = _compiled.get(self._key)
        ran_before = compiled is not None
        if compiled is None:
            run = self._kernel[(self._ctas,)]
            if later and self._index is not None:
                run = partial(self._kernel.run, grid=(self._ctas,), warmup=True)
            constants = dict(self._constants)
            with sooner(self._kernel, constants):
                compiled = run(
                    *descriptors,
                    *pointers,
                    *self._numbers,
                    **constants,
                    **self._options,
                )
            if compiled is None:  # the simulator compiles nothing
                return
            _compiled[self._key] = compiled
        self._bare = bare_kernel(compiled, self._cluster)
        if own_boxes:
            self.at(tuple([x.data_ptr() for x in bases]), [x.data_ptr() for x in pointers])
        elif self._cluster > 1 or ran_before:
            arguments = (*descriptors, *pointers, *self._tail)
            relaunch(compiled, self._ctas, arguments, self._cluster)


@cache
def multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
