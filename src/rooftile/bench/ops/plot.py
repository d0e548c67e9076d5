"""Rows as bars, as the FlashAttention papers draw them.

Attention has one panel for each head dim and mask, lengths along it; other operators have one for
each group of cases.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rooftile.bench.results import OperatorResult
from rooftile.planning.attention_case import AttentionCase, attention_case

# Colours that remain apart in grey and to colour-blind eyes (Okabe and Ito 2008).
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#999999")

FORMATS = (".png", ".svg", ".pdf")


@dataclass(frozen=True)
class Panel:
    """bars: who -> speed for each label, None where it did not run; unit: of the speeds."""

    title: str
    unit: str
    labels: list[str]
    bars: dict[str, list[float | None]]


def panels(rows: Sequence[OperatorResult]) -> list[Panel]:
    """Rows grouped; peers come from the first row of their case. What computes nothing reads."""
    computes = any(row.tflops for row in rows)
    grouped: dict[str, dict[str, dict[str, float]]] = {}  # title -> label -> who -> speed
    order: list[str] = []  # ours first, then peers, as they appear
    for row in rows:
        title, label = _place(row)
        speeds = grouped.setdefault(title, {}).setdefault(label, {})
        speed = row.tflops if computes else row.tbps * 1e3
        speeds[row.kernel] = speed
        order.append(row.kernel)
        for peer, us in row.peers.items():
            speeds.setdefault(peer, speed * row.us / us)
    order += [peer for row in rows for peer in row.peers]
    names = list(dict.fromkeys(order))
    return [
        Panel(
            title,
            "TFLOP/s" if computes else "GB/s",
            list(cells),
            {
                name: [cell.get(name) for cell in cells.values()]
                for name in names
                if any(name in cell for cell in cells.values())
            },
        )
        for title, cells in grouped.items()
    ]


def draw(rows: Sequence[OperatorResult], heading: str, path: Path) -> None:
    """Writes the chart in the format of the path's ending (png, svg, pdf).

    Raises:
        ModuleNotFoundError: matplotlib is not installed; says how to.
        ValueError: no rows, or an ending that matplotlib does not write.
    """
    if not rows:
        raise ValueError("there is nothing to draw: no case has a result")
    figure_type = load_matplotlib()
    shown = panels(rows)
    columns = min(len(shown), 2)
    lines = -(-len(shown) // columns)
    figure = figure_type(figsize=(6.4 * columns, 3.4 * lines), layout="constrained")
    figure.suptitle(heading)
    names = list(dict.fromkeys(name for panel in shown for name in panel.bars))
    for index, panel in enumerate(shown):
        axes = figure.add_subplot(lines, columns, index + 1)
        width = 0.84 / len(panel.bars)
        for place, (name, values) in enumerate(panel.bars.items()):
            at = [i - 0.42 + (place + 0.5) * width for i in range(len(values))]
            heights = [value or 0.0 for value in values]
            bars = axes.bar(at, heights, width, label=name, color=COLOURS[names.index(name) % 8])
            texts = ["" if v is None else f"{v:.0f}" if v >= 10 else f"{v:.2g}" for v in values]
            axes.bar_label(bars, texts, fontsize=6)
        axes.set_xticks(
            range(len(panel.labels)), panel.labels, fontsize=8 if len(panel.labels) < 8 else 5
        )
        axes.set_title(panel.title, fontsize=9)
        axes.set_ylabel(panel.unit)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(fontsize=7, ncols=4, frameon=False, loc="upper left")
        axes.margins(y=0.22)
    figure.savefig(path, dpi=150)


def check_plot(path: Path) -> None:
    """Whether a drawing can be written there, asked before anything is measured.

    Raises:
        ModuleNotFoundError: matplotlib is not installed; says how to.
        ValueError: an ending that is no format, a directory that is not there, a file that cannot
            be written.
    """
    if path.suffix.lower() not in FORMATS:
        raise ValueError(f"the plot {path} must end in one of {', '.join(FORMATS)}")
    if path.is_dir():
        raise ValueError(f"the plot {path} is a directory; name a file in it")
    if not path.parent.is_dir():
        raise ValueError(f"the plot {path} lies in no directory; create {path.parent}")
    there = path.exists()
    try:
        path.open("ab").close()
    except OSError as error:
        raise ValueError(
            f"the plot {path} cannot be written: {error.strerror}; name another file"
        ) from error
    if not there:
        path.unlink()
    load_matplotlib()


def load_matplotlib() -> type:
    """matplotlib's figure, which draws without a display."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "plots need matplotlib; install it with: pip install 'rooftile[plot]'"
        ) from error
    return Figure


def _place(row: OperatorResult) -> tuple[str, str]:
    """Title of the panel that a row belongs to, and its label in it."""
    if row.suite.split("_")[0] != "attention":
        return row.suite, row.case.replace(" ", "\n").replace("x", "\nx")
    case = attention_case(row.case)
    return _title(case), _label(case)


def _title(case: AttentionCase) -> str:
    dims = f"{case.k_dim}" if case.k_dim == case.v_dim else f"{case.k_dim}/{case.v_dim}"
    heads = f"{case.num_q_heads}/{case.num_kv_heads}"
    mask = "causal" if case.causal else "full"
    return f"head dim {dims}, heads {heads}, {mask}{', varlen' if case.ragged else ''}"


def _label(case: AttentionCase) -> str:
    length = case.name.split()[1].removeprefix("s")
    return f"{length}\nbatch {case.batch}"
