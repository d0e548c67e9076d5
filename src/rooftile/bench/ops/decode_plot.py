"""SM timelines of split attention, one below the other on one scale of time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rooftile.planning.hardware import Machine
from rooftile.planning.split_timeline import Timeline


def draw(timelines: Sequence[Timeline], machine: Machine, title: str, path: Path) -> None:
    """A panel for each timeline, SMs down, microseconds across, a colour for each request."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(
        len(timelines), 1, sharex=True, figsize=(9, 2.4 * len(timelines)), layout="constrained"
    )
    colours = pyplot.get_cmap("tab20")
    for panel, timeline in zip(panels, timelines, strict=True):
        for busy in timeline.work:
            start, length = (x / machine.clock * 1e6 for x in (busy.start, busy.end - busy.start))
            panel.barh(busy.sm, length, left=start, height=1.0, color=colours(busy.request % 20))
        panel.set_title(f"{timeline.name}: SMs busy {timeline.share_busy:.0%}", fontsize=9)
        panel.set_ylabel("SM")
        panel.set_ylim(-0.5, timeline.sms - 0.5)
    panels[-1].set_xlabel("microseconds (model)")
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
