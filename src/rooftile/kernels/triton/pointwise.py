"""What the memory-bound Triton kernels share: the device to launch on, how rows lie in memory, and
how one kernel starts under the end of another (programmatic dependent launch, on Hopper and later).
"""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda


@triton.jit
def early(overlapped: tl.constexpr):
    """Lets the next kernel start, and waits for what the ones before have written. To be called by
    every program, before it writes and before it reads anything but weights at rest.
    """
    if overlapped:
        cuda.gdc_launch_dependents()
        cuda.gdc_wait()


def overlap(tensor: Tensor) -> dict[str, bool]:
    """Launch arguments of a kernel that calls `early`."""
    if not tensor.is_cuda or not _has_dependent_launch(tensor.device.index):
        return {"overlapped": False}
    return {"overlapped": True, "launch_pdl": True}


@cache
def _has_dependent_launch(device: int) -> bool:
    return torch.version.cuda is not None and torch.cuda.get_device_capability(device) >= (9, 0)


def where(tensor: Tensor) -> AbstractContextManager[Any]:
    """The device to launch on, where it is not the current one."""
    if tensor.is_cuda and tensor.device.index != torch.cuda.current_device():
        return torch.cuda.device(tensor.device)
    return nullcontext()


def rows_of(x: Tensor) -> tuple[Tensor, int, int, int]:
    """x with dense rows, and where row r of its last dimension begins: (r // inner) * outer stride +
    (r % inner) * inner stride. Copies only what lies otherwise.
    """
    if x.dim() == 3 and x.stride(2) == 1:
        return x, x.shape[1], x.stride(0), x.stride(1)
    if x.dim() == 2 and x.stride(1) == 1:
        return x, 1, x.stride(0), 0
    return x.contiguous(), 1, x.shape[-1], 0
