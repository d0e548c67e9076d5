"""What a server did under load: percentiles, JSON lines, a plot."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rooftile.bench.serve_load import Load, Record

PERCENTILES = (50, 90, 99)
KINDS = {
    "ttft": "time to first token",
    "itl": "time between tokens",
    "e2e": "time of a request",
}


def percentile(values: Sequence[float], percent: float) -> float:
    """Linear between the two nearest ranks; NaN of nothing."""
    if not values:
        return float("nan")
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


@dataclass(frozen=True)
class Report:
    """Times in seconds, by kind: ttft, itl (between arrivals of text), e2e."""

    load: Load
    records: list[Record]

    @property
    def good(self) -> list[Record]:
        return [record for record in self.records if record.error is None]

    @property
    def errors(self) -> dict[str, int]:
        counts: dict[str, int] = {}
        for record in self.records:
            if record.error is not None:
                counts[record.error] = counts.get(record.error, 0) + 1
        return counts

    @property
    def seconds(self) -> float:
        """From the first arrival to the last end."""
        start = min(record.start for record in self.records)
        return max(record.end for record in self.records) - start

    def values(self, kind: str) -> list[float]:
        if kind == "ttft":
            return [record.time_to_first_token for record in self.good]
        if kind == "itl":
            return [gap for record in self.good for gap in record.inter_token_latencies]
        return [record.latency for record in self.good]

    def summary(self) -> dict[str, Any]:
        output = sum(record.output_tokens for record in self.good)
        prompt = sum(record.prompt_tokens for record in self.good)
        return {
            "requests": len(self.records),
            "failed": len(self.records) - len(self.good),
            "seconds": self.seconds,
            "requests_per_second": len(self.good) / self.seconds,
            "output_tokens_per_second": output / self.seconds,
            "total_tokens_per_second": (output + prompt) / self.seconds,
            "prompt_tokens": prompt,
            "cached_tokens": sum(record.cached_tokens for record in self.good),
            "output_tokens": output,
            **{
                kind: {
                    "mean": sum(values) / len(values) if values else None,
                    **{
                        f"p{percent}": percentile(values, percent) if values else None
                        for percent in PERCENTILES
                    },
                }
                for kind in KINDS
                for values in [self.values(kind)]
            },
        }

    def write_json(self, path: Path, about: dict[str, Any]) -> None:
        """Append a line of the whole run, and one of each request. about: added to the former."""
        run = {"kind": "run", **about, "load": asdict(self.load), **self.summary()}
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(run) + "\n")
            for record in self.records:
                file.write(json.dumps({"kind": "request", **asdict(record)}) + "\n")

    def plot(self, path: Path, title: str) -> None:
        """How many of the requests (or gaps) took at most so long; the format by the file's name.

        Raises:
            ModuleNotFoundError: matplotlib is not installed.
        """
        try:
            from matplotlib.figure import Figure
        except ModuleNotFoundError:
            raise ModuleNotFoundError(
                "matplotlib is missing: a plot needs pip install 'rooftile[plot]'"
            ) from None

        figure = Figure(figsize=(10, 3.6), layout="constrained")
        figure.suptitle(title)
        for axes, (kind, name) in zip(figure.subplots(1, len(KINDS)), KINDS.items(), strict=True):
            values = sorted(self.values(kind))
            shares = [(rank + 1) / len(values) * 100 for rank in range(len(values))]
            axes.step([value * 1000 for value in values], shares, where="post")
            for percent in PERCENTILES:
                axes.axvline(percentile(values, percent) * 1000, color="grey", lw=0.5)
            axes.set(xlabel=f"{name} [ms]", ylim=(0, 101), xscale="log")
            axes.grid(alpha=0.3)
        figure.axes[0].set_ylabel("at most so long [%]")
        figure.savefig(path, dpi=120)
