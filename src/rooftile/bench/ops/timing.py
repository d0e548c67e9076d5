"""Functions timed in turn, so that clocks, temperature and noise are the same for all.

On a GPU each is captured once as a CUDA graph and replayed, so that only the device's time counts;
before every replay a buffer larger than the L2 cache is written. On a CPU it is called, after a
buffer larger than the caches of its core has been written.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

Run = Callable[[], Any]
FLUSHED = {"cuda": 128 << 20, "cpu": 64 << 20}  # bytes
WARM_UP_ROUNDS = 2


@dataclass(frozen=True)
class Timing:
    """Microseconds of one call: the median, and the 20th and 80th percentile."""

    us: float
    us_p20: float
    us_p80: float
    rounds: int


def time_in_turn(
    functions: Mapping[str, Run],
    device: torch.device,
    *,
    seconds: float = 0.08,
    most_rounds: int = 40,
) -> dict[str, Timing]:
    """Times every function at least 5 times, and on until `seconds` for each have passed.

    Functions on a GPU must be capturable and must not depend on the host.
    """
    flush = torch.empty(FLUSHED[device.type], dtype=torch.int8, device=device)
    rounds = _gpu_rounds if device.type == "cuda" else _cpu_rounds
    measured = rounds(functions, flush, seconds * len(functions), most_rounds)
    return {name: _summary(values) for name, values in measured.items()}


def _summary(values: list[float]) -> Timing:
    values = sorted(values)
    n = len(values)
    return Timing(values[n // 2], values[n // 5], values[n * 4 // 5], n)


def _enough(done: int, began: float, seconds: float, most: int) -> bool:
    measured = done - WARM_UP_ROUNDS
    return measured >= most or (measured >= 5 and time.perf_counter() - began > seconds)


def _gpu_rounds(
    functions: Mapping[str, Run], flush: torch.Tensor, seconds: float, most: int
) -> dict[str, list[float]]:
    graphs = {}
    for name, run in functions.items():
        for _ in range(2):
            run()
        torch.cuda.synchronize()
        graphs[name] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[name]):
            run()
    times: dict[str, list[float]] = {name: [] for name in graphs}
    began, done = time.perf_counter(), 0
    while not _enough(done, began, seconds, most):
        events = []
        for name, graph in graphs.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            flush.zero_()
            start.record()
            graph.replay()
            end.record()
            events.append((name, start, end))
        torch.cuda.synchronize()
        done += 1
        if done > WARM_UP_ROUNDS:
            for name, start, end in events:
                times[name].append(start.elapsed_time(end) * 1e3)
    return times


def _cpu_rounds(
    functions: Mapping[str, Run], flush: torch.Tensor, seconds: float, most: int
) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in functions}
    began, done = time.perf_counter(), 0
    while not _enough(done, began, seconds, most):
        done += 1
        for name, run in functions.items():
            flush.zero_()
            start = time.perf_counter()
            run()
            if done > WARM_UP_ROUNDS:
                times[name].append((time.perf_counter() - start) * 1e6)
    return times
