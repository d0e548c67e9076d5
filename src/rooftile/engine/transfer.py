"""Small tensors between host and device, without either waiting for the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor


def upload(values: Any, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """A list or array on the device; on a GPU through pinned memory, behind the work queued there."""
    tensor = (
        torch.from_numpy(values)
        if isinstance(values, np.ndarray)
        else torch.tensor(values, dtype=dtype)
    )
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


class Readback:
    """Copies of results to the host, on a stream of their own behind the work that makes them."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._begun: torch.cuda.Event | None = None

    def start(self, tensors: Sequence[Tensor]) -> Callable[[], list[Tensor]]:
        """Begin to copy; the returned function waits for the copies, and for nothing later."""
        if self._stream is None:
            copies = [tensor.clone() for tensor in tensors]
            return lambda: copies
        self._stream.wait_stream(torch.cuda.current_stream())
        host = [torch.empty(t.shape, dtype=t.dtype, pin_memory=True) for t in tensors]
        with torch.cuda.stream(self._stream):
            for target, source in zip(host, tensors, strict=True):
                target.copy_(source, non_blocking=True)
                source.record_stream(self._stream)
            done = torch.cuda.Event()
            done.record()
        self._begun = done

        def wait() -> list[Tensor]:
            done.synchronize()
            return host

        return wait

    def guard(self) -> None:
        """Work queued from here on may overwrite what is being copied: it waits on the device."""
        if self._begun is not None:
            torch.cuda.current_stream().wait_event(self._begun)
            self._begun = None
