"""Memory for weights in huge pages: a small model's speed is that of reading its weights.

A huge page is larger than many a matrix, so matrices share large allocations.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from math import prod

import torch
from torch import Tensor

CHUNK = 64 << 20
HUGE_PAGE = 2 << 20
ALIGNMENT = 64
SMALL = 1 << 16

_lock = threading.Lock()
_chunk = torch.empty(0, dtype=torch.uint8)
_used = 0


def allocate(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A tensor on the CPU, not initialised. An allocation lives as long as any tensor in it."""
    nbytes = prod(shape) * dtype.itemsize
    if nbytes < SMALL:
        return torch.empty(shape, dtype=dtype)
    return _take(nbytes).view(dtype).view(shape)


def _take(nbytes: int) -> Tensor:
    global _chunk, _used
    needed = -(-nbytes // ALIGNMENT) * ALIGNMENT
    if needed > CHUNK // 2:
        return huge(nbytes)
    with _lock:
        if _used + needed > _chunk.numel():
            _chunk, _used = huge(CHUNK), 0
        start = _used
        _used += needed
        return _chunk[start : start + nbytes]


@cache
def _malloc_trim() -> Callable[[int], int] | None:
    """glibc's function, where the process runs on glibc."""
    try:
        return ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError):
        return None


def trim() -> None:
    """Give memory that has been freed back to the system, as far as its C library can."""
    function = _malloc_trim()
    if function is not None:
        function(0)


def huge(nbytes: int) -> Tensor:
    """Bytes that begin at a huge page; the system gives memory as they are touched."""
    size = -(-nbytes // HUGE_PAGE) * HUGE_PAGE + HUGE_PAGE
    # Private: shared memory, which is mmap's default, has no huge pages.
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    start = -whole.data_ptr() % HUGE_PAGE
    return whole[start : start + nbytes]
