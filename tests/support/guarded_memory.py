"""CUDA tensors with unmapped memory on both sides, so that whatever reads or writes outside of one is an error.

Each allocation of torch is pages of its own (the driver's virtual memory management), placed so that it ends, or
begins, where its pages do; what lies behind, or before, belongs to nothing, and the hardware refuses an access to
it by whatever unit: plain loads, the copy engine, atomics. After `free` the addresses stay unmapped for good, so that
late accesses are errors, too. New memory is full of bytes of 255, which are NaN in every floating-point type.

Ends are exact to 16 bytes, which the copy engine wants addresses to be a multiple of. What this does not see: accesses
inside of another part of the same tensor. Nothing may be captured into a graph: a graph keeps addresses, and `free`
waits for the device.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch

Side = Literal["end", "start"]
PAGE = 2 << 20  # bytes; the driver's granularity on every GPU so far
ALIGNMENT = 16  # bytes
POISON = 0xFF
_installed: list[Any] = []  # what the driver and torch call must live as long as they do


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Properties(ctypes.Structure):
    """CUmemAllocationProp of the driver's API."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("handles", ctypes.c_int),
        ("location", _Location),
        ("unused", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
    )


class _Access(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


_PINNED, _ON_A_DEVICE, _READ_AND_WRITE = 1, 1, 3
_Allocate = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)
_Free = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


class GuardedMemory:
    """What `torch.cuda.memory` calls. After an error of the device `allocate` gives no memory, and the error is
    torch's to report."""

    def __init__(self, side: Side) -> None:
        self._side = side
        self._driver = ctypes.CDLL("libcuda.so.1")
        self._mapped: dict[int, tuple[int, int, int]] = {}  # tensor: pages, bytes, handle
        self._contexts: dict[int, ctypes.c_void_p] = {}  # by device

    def _ok(self, name: str, *arguments: Any) -> bool:
        return getattr(self._driver, name)(*arguments) == 0

    @contextmanager
    def _current(self, device: int) -> Iterator[None]:
        """Within torch's context of a device, which the first allocation is the first to need."""
        context = self._contexts.get(device)
        if context is None:
            context, handle = ctypes.c_void_p(), ctypes.c_int()
            self._driver.cuInit(0)
            self._driver.cuDeviceGet(ctypes.byref(handle), device)
            self._driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), handle)
            self._contexts[device] = context
        self._driver.cuCtxPushCurrent_v2(context)
        try:
            yield
        finally:
            self._driver.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))

    def allocate(self, size: int, device: int, stream: int | None) -> int | None:
        if size <= 0:
            return None
        with self._current(device):
            return self._allocate(size, device, stream)

    def _allocate(self, size: int, device: int, stream: int | None) -> int | None:
        driver, location = self._driver, _Location(_ON_A_DEVICE, device)
        pages, handle = ctypes.c_uint64(), ctypes.c_uint64()
        n = ctypes.c_size_t(_round_up(size, PAGE))
        around = ctypes.c_size_t(n.value + 2 * PAGE)
        properties = _Properties(_PINNED, 0, location, None, 0)
        access = _Access(location, _READ_AND_WRITE)
        zero = ctypes.c_uint64(0)
        if driver.cuMemAddressReserve(ctypes.byref(pages), around, ctypes.c_size_t(0), zero, zero):
            return None
        at = ctypes.c_uint64(pages.value + PAGE)
        for name, *arguments in (
            ("cuMemCreate", ctypes.byref(handle), n, ctypes.byref(properties), zero),
            ("cuMemMap", at, n, ctypes.c_size_t(0), handle, zero),
            ("cuMemSetAccess", at, n, ctypes.byref(access), ctypes.c_size_t(1)),
            ("cuMemsetD8Async", at, ctypes.c_ubyte(POISON), n, ctypes.c_void_p(stream)),
        ):
            if not self._ok(name, *arguments):
                return None
        place = at.value
        if self._side == "end":
            place += n.value - _round_up(size, ALIGNMENT)
        self._mapped[place] = (at.value, n.value, handle.value)
        return place

    def free(self, tensor: int | None, size: int, device: int, stream: int | None) -> None:
        if tensor not in self._mapped:
            return
        at, n, handle = self._mapped.pop(tensor)
        # A kernel may still be at work on it. The addresses stay reserved, so that nobody gets them again.
        with self._current(device):
            if self._ok("cuCtxSynchronize"):
                self._ok("cuMemUnmap", ctypes.c_uint64(at), ctypes.c_size_t(n))
                self._ok("cuMemRelease", ctypes.c_uint64(handle))


def install(side: Side) -> None:
    """For the rest of the process, before the first tensor is on a GPU."""
    memory = GuardedMemory(side)
    allocate, free = _Allocate(memory.allocate), _Free(memory.free)
    addresses = (ctypes.cast(f, ctypes.c_void_p).value or 0 for f in (allocate, free))
    allocator = torch._C._cuda_customAllocator(*addresses)
    torch._C._cuda_changeCurrentAllocator(allocator)
    _installed.extend((memory, allocate, free, allocator))
