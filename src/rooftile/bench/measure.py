"""Time contenders on a workload: in turn, several repeats, warm-up excluded, results checked."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from rooftile.bench.contenders import Contender
from rooftile.bench.failure import MeasurementFailed
from rooftile.bench.workloads import Request, Workload

WARM_UP_TOKENS = 4


@dataclass(frozen=True)
class Timing:
    """Seconds of each repeat, and the tokens that count in one (they may differ per repeat)."""

    contender: str
    seconds: tuple[float, ...]
    tokens: tuple[int, ...]

    @property
    def rates(self) -> list[float]:
        """Tokens per second of each repeat."""
        return [count / second for count, second in zip(self.tokens, self.seconds, strict=True)]

    @property
    def rate(self) -> float:
        return statistics.median(self.rates)

    def microseconds(self, share: float = 0.5) -> float:
        """A quantile of the repeats' times, by linear interpolation."""
        return 1e6 * quantile(self.seconds, share)


def quantile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    position = share * (len(ordered) - 1)
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (position - below) * (ordered[above] - ordered[below])


def measure(
    contenders: Sequence[Contender],
    workload: Workload,
    draw: Callable[[int], list[Request]],
    repeats: int,
) -> list[Timing]:
    """One Timing per contender. draw: seed -> requests; seed 0 warms up, repeats use 1, 2, ...

    All contenders get the same requests, and take turns within each repeat, so that a machine
    that slows down slows all of them.

    Raises:
        MeasurementFailed: a contender did not make the tokens that were asked for.
    """
    if repeats < 1:
        raise ValueError(f"repeats is {repeats}; it must be at least 1")
    warm_up = [replace(r, max_tokens=min(r.max_tokens, WARM_UP_TOKENS)) for r in draw(0)]
    for contender in contenders:
        _run(contender, warm_up, workload.temperature)
    seconds: dict[str, list[float]] = {contender.name: [] for contender in contenders}
    tokens = []
    for repeat in range(1, repeats + 1):
        requests = draw(repeat)
        tokens.append(counted_tokens(requests, workload.measure))
        for contender in contenders:
            seconds[contender.name].append(_run(contender, requests, workload.temperature))
    return [Timing(name, tuple(times), tuple(tokens)) for name, times in seconds.items()]


def counted_tokens(requests: Sequence[Request], measure: str) -> int:
    prompt = sum(len(r.prompt_token_ids) for r in requests)
    output = sum(r.max_tokens * r.n for r in requests)
    return {"prefill": prompt, "output": output, "total": prompt + output}[measure]


def _run(contender: Contender, requests: list[Request], temperature: float) -> float:
    start = time.perf_counter()
    made = contender.run(requests, temperature)
    elapsed = time.perf_counter() - start
    for position, (request, count) in enumerate(zip(requests, made, strict=True)):
        if count != request.max_tokens * request.n:
            raise MeasurementFailed(
                f"{contender.name} made {count} tokens for request {position} instead of "
                f"{request.n} x {request.max_tokens}; the result does not count"
            )
    return elapsed
