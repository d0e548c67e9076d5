"""A case from its name to rows: everybody checked first, then timed in turn."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rooftile.bench.ops.suite import Problem, WrongResult
from rooftile.bench.ops.timing import Timing, time_in_turn
from rooftile.bench.results import OperatorResult
from rooftile.planning.hardware import Machine
from rooftile.planning.roofline import least_time


@dataclass(frozen=True)
class Measured:
    """rows: one for each kernel of ours. absent: kernel or peer -> why it has no time.

    peers: timing and error of each peer that ran.
    """

    rows: list[OperatorResult]
    peers: dict[str, tuple[Timing, float]]
    absent: dict[str, str]


def measure(
    suite: str,
    problem: Problem,
    device: torch.device,
    *,
    machine: Machine | None,
    seconds: float = 0.08,
) -> Measured:
    """suite: the name that rows are filed under; seconds: of measuring, for each contender."""
    runs = {**problem.kernels, **problem.peers}
    absent = dict(problem.absent)
    errors: dict[str, float] = {}
    for name, run in runs.items():
        poison(device)
        try:
            errors[name] = problem.check(run())
        except WrongResult as error:
            absent[name] = f"wrong: {error}"
        except Exception as error:  # a peer raises what it likes; ours has been asked before
            if name in problem.kernels and not isinstance(error, RuntimeError):
                raise
            lines = str(error).splitlines() or [""]
            absent[name] = f"{type(error).__name__}: {lines[0][:200]}"
    sound = {name: run for name, run in runs.items() if name in errors}
    timings = time_in_turn(sound, device, seconds=seconds)
    bound = None if machine is None else least_time(problem.work, machine)
    peers = {name: (timings[name], errors[name]) for name in problem.peers if name in timings}
    rows = [
        OperatorResult(
            suite=suite,
            case=problem.case,
            kernel=name,
            us=timings[name].us,
            us_p20=timings[name].us_p20,
            us_p80=timings[name].us_p80,
            tflops=problem.work.flops / timings[name].us / 1e6,
            tbps=problem.work.bytes / timings[name].us / 1e6,
            roofline_share=None if bound is None else bound.seconds * 1e6 / timings[name].us,
            bound=None if bound is None else bound.unit,
            peers={peer: timing.us for peer, (timing, _) in peers.items()},
            error=errors[name],
        )
        for name in problem.kernels
        if name in timings
    ]
    return Measured(rows, peers, absent)


def poison(device: torch.device) -> None:
    """Fills memory that the next outputs are likely to be made of with NaN, and frees it."""
    torch.full((1 << (26 if device.type == "cuda" else 20),), torch.nan, device=device)
