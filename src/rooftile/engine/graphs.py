"""CUDA graphs of the parts of a step, by capacity; without a GPU the same parts, run as they are."""

from __future__ import annotations

import bisect
import gc
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import torch


def decode_sizes(most: int) -> list[int]:
    """Capacities for steps of one token a request: padding is at most 7 requests, or an eighth."""
    return sorted({*(n for n in (1, 2, 4) if n < most), *_sizes(8, most), most})


def mixed_sizes(most: int) -> list[int]:
    """Capacities in tokens for steps with prompts: padding is at most an eighth from 128 on."""
    return sorted({*_sizes(16, most), most})


def _sizes(step: int, most: int) -> Iterable[int]:
    size = step
    while size < most:
        yield size
        while size >= 16 * step:
            step *= 2
        size += step


def fitting(sizes: Sequence[int], needed: int) -> int:
    """The smallest capacity that holds so many. The last one holds whatever may come."""
    return sizes[bisect.bisect_left(sizes, needed)]


class Graphs:
    """Captured parts by key. What was not captured, or cannot be, is run."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}
        self._pool: Any = None

    def run(self, key: Hashable, part: Callable[[], object]) -> None:
        graph = self._graphs.get(key)
        if graph is None:
            part()
        else:
            graph.replay()

    def capture(self, parts: Sequence[tuple[Hashable, Callable[[], object]]]) -> Iterable[Hashable]:
        """Capture each part; yields its key. The largest first: all share the memory of their
        intermediates, so no two may be in flight at once.
        """
        stream = torch.cuda.Stream(self._device)
        torch.cuda.synchronize(self._device)
        collecting = gc.isenabled()
        gc.disable()  # freeing device memory within a capture breaks it
        try:
            for key, part in parts:
                self._pool = self._pool or torch.cuda.graph_pool_handle()
                try:
                    self._graphs[key] = self._captured(part, stream)
                except torch.OutOfMemoryError:
                    raise
                except RuntimeError:
                    # Something was loaded or compiled on the way, which a capture does not allow.
                    part()
                    torch.cuda.synchronize(self._device)
                    self._graphs[key] = self._captured(part, stream)
                yield key
        finally:
            if collecting:
                gc.enable()

    def _captured(
        self, part: Callable[[], object], stream: torch.cuda.Stream
    ) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(stream):
            graph.capture_begin(self._pool, capture_error_mode="thread_local")
            try:
                part()
            finally:
                graph.capture_end()
        return graph
