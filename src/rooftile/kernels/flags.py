"""Flags by which the CTAs of a launch tell each other that something is done.

Flags are 0 whenever no kernel uses them. Launches on one stream run one after another and share
theirs; a launch that is captured into a CUDA graph gets some for itself, since its graph may be
replayed on any stream. A launch that fails takes its stream's flags along.
"""

from __future__ import annotations

import threading

import torch
from torch import Tensor

FLAGS = 512  # of a launch: two for each of up to 256 CTAs
_LAUNCHES = 4096
_pools: dict[torch.device, Tensor] = {}  # [launches, FLAGS] int32, handed out from the front
_handed_out: dict[torch.device, int] = {}
_of_stream: dict[tuple[torch.device, int], Tensor] = {}
_lock = threading.Lock()  # of handing out


def flags(device: torch.device) -> Tensor:  # [FLAGS] int32
    """Flags for the next launch on the current stream of `device`."""
    if device.type != "cuda":
        return _of_stream.setdefault((device, 0), _zeros(device, FLAGS))
    capturing = torch.cuda.is_current_stream_capturing()
    key = (device, torch._C._cuda_getCurrentRawStream(device.index))
    if not capturing and key in _of_stream:
        return _of_stream[key]
    with _lock:
        found = _next(device, capturing)
    if not capturing:
        _of_stream[key] = found
    return found


def discard_flags(device: torch.device) -> None:
    """Forgets the flags of the device's current stream, which a failed launch may have left set."""
    stream = torch._C._cuda_getCurrentRawStream(device.index) if device.type == "cuda" else 0
    _of_stream.pop((device, stream), None)


def _next(device: torch.device, capturing: bool) -> Tensor:
    used = _handed_out.get(device, 0)
    if used == _LAUNCHES or (capturing and device not in _pools):
        return _zeros(device, FLAGS)  # in a graph: at each replay
    if device not in _pools:
        _pools[device] = _zeros(device, _LAUNCHES, FLAGS)
        torch.cuda.synchronize(device)  # once: other streams take theirs from it
    _handed_out[device] = used + 1
    return _pools[device][used]


def _zeros(device: torch.device, *shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int32, device=device)
