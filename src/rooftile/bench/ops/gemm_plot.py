"""SM timelines of matrix products, one scheme below the other on one scale of time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rooftile.planning.stream_k_timeline import Span

_SHADES = {"publish": "black", "wait": "white", "fixup": "dimgray"}


def draw(
    timelines: Sequence[tuple[str, Sequence[Span]]], num_sms: int, title: str, path: Path
) -> None:
    """A panel for each (title, timeline), SMs down, microseconds across, a colour for each tile.

    Black is a part that is published, grey one that is added; a CTA that waits leaves a gap.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(
        len(timelines), 1, sharex=True, squeeze=False, figsize=(9, 2.2 * len(timelines)),
        layout="constrained",
    )  # fmt: skip
    colours = pyplot.get_cmap("tab20")
    for panel, (name, spans) in zip(panels[:, 0], timelines, strict=True):
        for span in spans:
            colour = _SHADES.get(span.kind) or colours(span.tile % 20)
            length = (span.end - span.start) * 1e6
            panel.barh(span.cta, length, left=span.start * 1e6, height=0.9, color=colour)
        panel.set_title(name, fontsize=9)
        panel.set_ylabel("SM")
        panel.set_ylim(num_sms - 0.5, -0.5)
    panels[-1, 0].set_xlabel("microseconds (model)")
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
