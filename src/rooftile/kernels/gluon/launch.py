"""Launching kernels with little work on the host.

Triton's own launch binds, specialises and hashes some forty arguments every time. Here that
happens once for each set of compile-time values; later calls hand their run-time arguments
straight to the compiled kernel.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor

from rooftile.kernels.triton_version import TensorDescriptor, relaunch


class Box:
    """A tensor descriptor before it is one: the fields that a launch reads, checked by nobody."""

    __slots__ = ("base", "block_shape", "layout", "padding", "shape", "strides")

    def __init__(
        self,
        base: Tensor,
        shape: list[int],
        strides: list[int],
        block_shape: list[int],
        layout: Any,
    ) -> None:
        self.base = base
        self.shape = shape
        self.strides = strides
        self.block_shape = block_shape
        self.layout = layout
        self.padding = "zero"

    def checked(self) -> Any:
        return TensorDescriptor(self.base, self.shape, self.strides, self.block_shape, self.layout)


_compiled: dict[tuple[Any, ...], Any] = {}


def launch(
    kernel: Any,
    ctas: int,
    device: torch.device,
    arguments: tuple[Any, ...],
    constants: tuple[tuple[str, Any], ...],
) -> None:
    """Runs `ctas` CTAs of a kernel of four warps on `device`'s current stream.

    arguments: the run-time ones in the kernel's order, descriptors as `Box`; their types may
        depend only on the constants and on the dtype of the first argument's tensor.
    constants: the compile-time ones, which follow them in the same order.
    """
    first = arguments[0]
    dtype = first.base.dtype if isinstance(first, Box) else first.dtype
    key = (kernel, device, dtype, constants)
    compiled = _compiled.get(key)
    with on(device):
        if compiled is not None:
            relaunch(compiled, ctas, (*arguments, *(value for _, value in constants)))
            return
        checked = (a.checked() if isinstance(a, Box) else a for a in arguments)
        compiled = kernel[(ctas,)](*checked, **dict(constants), num_warps=4)
    if compiled is not None:  # the simulator compiles nothing
        _compiled[key] = compiled


def on(device: torch.device) -> Any:
    """Makes a GPU the current one, which is where Triton launches."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(device)


@cache
def multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
