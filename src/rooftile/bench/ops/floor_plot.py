"""Memory-bound rows as microseconds against those of reading the same bytes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rooftile.bench.ops.plot import COLOURS, load_matplotlib
from rooftile.bench.results import OperatorResult

FLOOR = "read"  # the peer that only reads
SIDE_BY_SIDE = 1.25  # times as much, at most, in both directions


def has_floor(rows: Sequence[OperatorResult]) -> bool:
    return bool(rows) and all(FLOOR in row.peers for row in rows)


def draw(rows: Sequence[OperatorResult], heading: str, path: Path) -> None:
    """A point for each kernel and peer of a case, both axes logarithmic; on the line is the floor.

    Raises:
        ModuleNotFoundError: matplotlib is not installed; says how to.
    """
    figure = load_matplotlib()(figsize=(7.6, 6.0), layout="constrained")
    axes = figure.add_subplot()
    points: dict[str, dict[str, tuple[float, float]]] = {}  # who -> case -> floor and time
    for row in rows:
        floor = row.peers[FLOOR]
        points.setdefault(row.kernel, {})[row.case] = (floor, row.us)
        for peer, us in row.peers.items():
            if peer != FLOOR:
                points.setdefault(peer, {})[row.case] = (floor, us)
    floors = sorted(row.peers[FLOOR] for row in rows)
    ends = [floors[0] / 1.3, floors[-1] * 1.3]
    axes.plot(ends, ends, color="#999999", linewidth=1, label="reading alone")
    for i, (name, cases) in enumerate(points.items()):
        at, times = zip(*sorted(cases.values()), strict=True)
        axes.plot(at, times, "o", markersize=4, color=COLOURS[i % len(COLOURS)], label=name)
    for at_point, names in _labels(next(iter(points.values()))).items():
        axes.annotate(
            "\n".join(names), at_point, (4, -4), textcoords="offset points", fontsize=5, va="top"
        )
    axes.set(
        xscale="log", yscale="log", xlabel="microseconds to read the bytes", ylabel="microseconds"
    )
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=8, frameon=False)
    axes.set_title(heading, fontsize=10)
    figure.savefig(path, dpi=150)


def _labels(cases: dict[str, tuple[float, float]]) -> dict[tuple[float, float], list[str]]:
    """Names of cases by the point that they are written at: one for those that lie side by side."""
    labels: dict[tuple[float, float], list[str]] = {}
    for case, point in sorted(cases.items(), key=lambda pair: pair[1]):
        near = (
            other
            for other in labels
            if all(max(pair) < SIDE_BY_SIDE * min(pair) for pair in zip(point, other, strict=True))
        )
        labels.setdefault(next(near, point), []).append(case)
    return labels
