"""Counters in GPU memory that are zero whenever no kernel uses them.

A kernel that draws its tiles from a counter leaves zeros behind (tile/schedule.py), so none has to
be cleared before a launch. Kernels of one stream run one after another and share a counter; a call
that is captured into a CUDA graph gets one for itself, since its graph may be replayed on any stream.
"""

from __future__ import annotations

import torch
from torch import Tensor

_SLOTS = 4096
_FIELDS = 4  # 16 bytes: what Triton supposes of a pointer
_pools: dict[torch.device, Tensor] = {}  # [slots, fields] int32, handed out from the front
_handed_out: dict[torch.device, int] = {}
_of_stream: dict[tuple[int, int], Tensor] = {}  # by device and stream


def counter(device: torch.device) -> Tensor:  # [fields] int32
    """A counter for the next launch on the current stream of `device`."""
    if device.type != "cuda":
        return torch.zeros(_FIELDS, dtype=torch.int32, device=device)
    capturing = torch._C._cuda_isCurrentStreamCapturing()
    key = (device.index, torch._C._cuda_getCurrentRawStream(device.index))
    if not capturing:
        known = _of_stream.get(key)
        if known is not None:
            return known
    slot = _new_slot(device, capturing)
    if not capturing:
        _of_stream[key] = slot
    return slot


def _new_slot(device: torch.device, capturing: bool) -> Tensor:
    used = _handed_out.get(device, 0)
    if used == _SLOTS or (capturing and device not in _pools):
        return torch.zeros(_FIELDS, dtype=torch.int32, device=device)  # in a graph: at each replay
    if device not in _pools:
        _pools[device] = torch.zeros(_SLOTS, _FIELDS, dtype=torch.int32, device=device)
        torch.cuda.synchronize(device)  # once: other streams take their slots from it
    _handed_out[device] = used + 1
    return _pools[device][used]
