"""Results as data: one JSON line per measured case, in benchmarks/results/<machine>/<suite>.jsonl."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from rooftile.bench.host import Host, commit, versions

DIRECTORY = Path("benchmarks/results")


@dataclass(frozen=True, kw_only=True)
class Result:
    """A case that passed its check.

    us, us_p20, us_p80: microseconds of one run; tokens_per_second counts `counted` tokens
    ("prefill", "output" or "total"); peers: name -> us of the same run; roofline_share: least time
    over measured time, with the unit that binds in `bound`, where the machine is described;
    start_up_seconds, peak_bytes: of each engine in a process of its own, where that was asked for.
    """

    suite: str
    case: str
    kernel: str
    us: float
    us_p20: float
    us_p80: float
    tokens_per_second: float
    counted: str
    repeats: int
    threads: int
    roofline_share: float | None
    bound: str | None
    peers: dict[str, float]
    start_up_seconds: dict[str, float] = field(default_factory=dict)
    peak_bytes: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class SharingResult:
    """KV pages of a run: shares saved against a copy of each sequence, and the most at once."""

    suite: str
    case: str
    saved_average: float  # over the steps
    saved_peak: float
    pages_peak: int
    pages_peak_copied: int  # with a copy of each sequence
    steps: int


@dataclass(frozen=True, kw_only=True)
class OperatorResult:
    """One kernel of an operator on one case; `kernel` is the family.

    us: microseconds of a call, median, 20th and 80th percentile; tflops and tbps: the case's least
    work over the median; error: norm of the difference to float64 over the norm, on drawn rows;
    peers: name -> median microseconds of the same run.
    """

    suite: str
    case: str
    kernel: str
    us: float
    us_p20: float
    us_p80: float
    tflops: float
    tbps: float
    roofline_share: float | None
    bound: str | None
    peers: dict[str, float]
    error: float


def check_writable(machine: Host, root: Path = DIRECTORY) -> None:
    """Whether results of this machine can be added there, asked before anything is measured."""
    check_directory(root / machine.slug)


def check_directory(directory: Path) -> None:
    """Creates it where it is missing.

    Raises:
        ValueError: files cannot be written into it; says why.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise ValueError(
            f"{directory} cannot be written: {error.strerror}; give --output another directory"
        ) from error


def append(
    result: Result | SharingResult | OperatorResult, machine: Host, root: Path = DIRECTORY
) -> Path:
    """Add one line to the suite's file of this machine; returns the file.

    Raises:
        ValueError: faster than the machine can be: the roofline model is wrong.
    """
    share = None if isinstance(result, SharingResult) else result.roofline_share
    if share is not None and share > 1:
        raise ValueError(
            f"{result.case} reaches {share:.2f} of the roofline of {machine.slug}; "
            f"more than 1 means that rooftile.planning.hardware describes it wrongly"
        )
    row: dict[str, Any] = {
        **asdict(result),
        "gpu": machine.gpus[0].name if machine.gpus else None,
        "cpu": f"{machine.processor}, {machine.cores} cores",
        "versions": versions(),
        "commit": commit(),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }
    path = root / machine.slug / f"{result.suite}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")
    return path
