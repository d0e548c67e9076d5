"""Counters in GPU memory that are zero whenever no kernel uses them.

A kernel that counts leaves zeros behind (tile/schedule.py, attention/shares.py), so none has to be
cleared before a launch. Kernels of one stream run one after another and share their counters; a call
that is captured into a CUDA graph gets some for itself, since its graph may be replayed on any stream.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class _Pool:
    """Slots of int32 that are handed out from the front, for each device."""

    slots: int
    fields: int  # of a slot
    memory: dict[torch.device, Tensor] = field(default_factory=dict)  # [slots, fields] int32
    handed_out: dict[torch.device, int] = field(default_factory=dict)
    of_stream: dict[tuple[int, int], Tensor] = field(default_factory=dict)  # by device and stream
    addresses: dict[tuple[int, int], int] = field(default_factory=dict)  # of those
    lock: threading.Lock = field(default_factory=threading.Lock)  # of handing out

    def slot(self, device: torch.device) -> Tensor:  # [fields] int32
        if device.type != "cuda":
            return torch.zeros(self.fields, dtype=torch.int32, device=device)
        capturing = torch._C._cuda_isCurrentStreamCapturing()
        key = (device.index, torch._C._cuda_getCurrentRawStream(device.index))
        if not capturing:
            known = self.of_stream.get(key)
            if known is not None:
                return known
        with self.lock:
            slot = self._new_slot(device, capturing)
        if not capturing:
            self.of_stream[key] = slot
        return slot

    def address(self, index: int) -> int:
        """Where `slot` lies for GPU `index`, found in less time."""
        capturing = torch._C._cuda_isCurrentStreamCapturing()
        key = (index, torch._C._cuda_getCurrentRawStream(index))
        if not capturing:
            known = self.addresses.get(key)
            if known is not None:
                return known
        address = self.slot(torch.device("cuda", index)).data_ptr()
        if not capturing:
            self.addresses[key] = address
        return address

    def _new_slot(self, device: torch.device, capturing: bool) -> Tensor:
        used = self.handed_out.get(device, 0)
        if used == self.slots or (capturing and device not in self.memory):
            # In a graph: cleared at each replay.
            return torch.zeros(self.fields, dtype=torch.int32, device=device)
        if device not in self.memory:
            self.memory[device] = torch.zeros(
                self.slots, self.fields, dtype=torch.int32, device=device
            )
            torch.cuda.synchronize(device)  # once: other streams take their slots from it
        self.handed_out[device] = used + 1
        return self.memory[device][used]


MOST_COUNTERS = 1024
_one = _Pool(4096, 4)  # 16 bytes: what Triton supposes of a pointer
_many = _Pool(512, MOST_COUNTERS)


def counter(device: torch.device) -> Tensor:  # [4] int32
    """A counter, and what its kernel counts besides, for the next launch on `device`'s current stream."""
    return _one.slot(device)


def address_of_counter(index: int) -> int:
    """Where `counter` lies for GPU `index`."""
    return _one.address(index)


def counters(device: torch.device) -> Tensor:  # [MOST_COUNTERS] int32
    """Many counters for the next launch on the current stream of `device`."""
    return _many.slot(device)


def address_of_counters(index: int) -> int:
    """Where `counters` lie for GPU `index`."""
    return _many.address(index)
