"""Memory-bound rows as microseconds against those of reading the same bytes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rooftile.bench.ops.plot import COLOURS, load_matplotlib
from rooftile.bench.results import OperatorResult

FLOOR = "read"  # the peer that only reads


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
    for case, (floor, us) in next(iter(points.values())).items():
        axes.annotate(case, (floor, us), (4, -7), textcoords="offset points", fontsize=5)
    axes.set(
        xscale="log", yscale="log", xlabel="microseconds to read the bytes", ylabel="microseconds"
    )
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=8, frameon=False)
    axes.set_title(heading, fontsize=10)
    figure.savefig(path, dpi=150)
