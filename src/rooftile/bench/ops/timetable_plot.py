"""A pipeline's timetable as a chart: units down, clocks across, blocks in colours."""

from __future__ import annotations

from pathlib import Path

from rooftile.bench.ops.plot import COLOURS, load_matplotlib
from rooftile.planning.pipeline import Pipeline
from rooftile.planning.timetable import timetable

BLOCKS = 6


def draw(line: Pipeline, streams: int, heading: str, path: Path) -> None:
    """Raises ModuleNotFoundError without matplotlib, ValueError for an ending it does not write."""
    figure_type = load_matplotlib()
    events = timetable(line, BLOCKS, streams)
    units = list(dict.fromkeys(event.unit for event in events))
    figure = figure_type(figsize=(11, 1.2 + 0.6 * len(units)), layout="constrained")
    axes = figure.add_subplot()
    for event in events:
        axes.barh(
            units.index(event.unit),
            event.end - event.start,
            left=event.start,
            height=0.8,
            color=COLOURS[event.block % len(COLOURS)],
            edgecolor="white",
            linewidth=0.5,
        )
        label = event.stage if streams == 1 else f"{event.stage} {'ABC'[event.stream % 3]}"
        if event.stage.startswith("copy"):
            label = event.stage
        width = (event.end - event.start) / events[-1].end
        if width > 0.007 * len(label):
            middle = (event.start + event.end) / 2
            axes.text(middle, units.index(event.unit), label, ha="center", va="center", fontsize=6)
    axes.set_yticks(range(len(units)), units)
    axes.invert_yaxis()
    axes.set_xlabel(f"clocks; a block every {line.block_clocks:.0f} at best; a colour is a block")
    axes.set_title(f"{heading}: {line.tile.rows} rows by {line.tile.block} keys", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
