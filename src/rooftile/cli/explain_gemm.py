"""`rooftile explain gemm`: how the SMs of a GPU share the steps of a matrix product, as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

    from rooftile.planning.hardware import Machine
    from rooftile.planning.stream_k import Decomposition
    from rooftile.planning.stream_k_choice import Choice
    from rooftile.planning.stream_k_timeline import Span

WIDTH = 64  # characters of the longest timeline
SHOWN_SMS = 12
MOST_TILES = 1 << 16
LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
MARKS = {"publish": ">", "wait": ".", "fixup": "+"}


def explain_gemm(case: str, machine: str, plot: Path | None) -> None:
    """Raises ValueError for a case or a machine that is not understood."""
    from rooftile.cli.tables import text_console, timeline_width
    from rooftile.planning.cores import gpu_of
    from rooftile.planning.stream_k import product_of
    from rooftile.planning.stream_k_choice import choose, reason, schemes
    from rooftile.planning.stream_k_cost import WHOLE_LINES, costs_of, row_alignment
    from rooftile.planning.stream_k_timeline import timeline

    console = text_console()
    product, device = product_of(case), gpu_of(machine, "a matrix product")
    copied = product.k % 8 != 0  # rows that the copy engine cannot address, of both operands
    rows = WHOLE_LINES if copied else (row_alignment(2 * product.k),) * 2
    choice = choose(product, device, rows=rows, turnable=product.n % 8 == 0, copied=copied)
    tiles = choice.decomposition.tiles
    if tiles > MOST_TILES:
        raise ValueError(
            f"case {case!r} has {tiles:,} tiles; at most {MOST_TILES:,} can be explained, so ask for a "
            f"smaller m or n"
        )
    shown = schemes(choice.decomposition, device)
    costs = costs_of(choice.decomposition, device, copied)
    timelines = [(plan, timeline(plan, costs)) for plan in shown]
    _say_choice(console, choice, device, reason(choice, device, rows))
    _say_parts(console, choice, device, rows)
    longest = max(span.end for _, spans in timelines for span in spans)
    width = timeline_width(console, WIDTH, beside=11)
    for plan, spans in timelines:
        console.print(_title(plan, spans, device), style="bold")
        for cta in range(0, plan.num_ctas, -(-plan.num_ctas // SHOWN_SMS)):
            mine = [span for span in spans if span.cta == cta]
            console.print(f"  SM {cta:3d} |{_row(mine, longest, width)}|", markup=False)
    console.print(
        "A letter is a tile; > its part is published, . waits for a part, + adds one. A step along K "
        f"takes {costs.iteration * 1e6:.2f} us, a segment {costs.setup * 1e6:.2f} more, publishing "
        f"{costs.publish * 1e6:.2f}, adding {costs.fixup * 1e6:.2f}."
    )
    if plot is not None:
        from rooftile.bench.ops.gemm_plot import draw

        titles = [_title(plan, spans, device) for plan, spans in timelines]
        pictures = [(title, spans) for title, (_, spans) in zip(titles, timelines, strict=True)]
        draw(pictures, device.units, f"{product} on {device.name}", plot)
        console.print(f"drawn in {plot}", markup=False)


def _say_choice(console: Console, choice: Choice, machine: Machine, why: str) -> None:
    from rooftile.planning.roofline import least_time, linear_work

    plan, product = choice.decomposition, choice.asked
    bound = least_time(linear_work(product.m, product.k, product.n), machine)
    console.print(f"matrix product {product} on {machine.name}", style="bold")
    console.print(
        f"Chosen: {plan.scheme} by {plan.num_ctas * plan.tiling.ctas} CTAs, {choice.seconds * 1e6:,.1f} us predicted, "
        f"launch and reading included; at least {bound.seconds * 1e6:,.1f} us, bound by {bound.unit}. "
        f"{why[0].upper()}{why[1:]}."
    )


def _say_parts(console: Console, choice: Choice, machine: Machine, rows: tuple[int, int]) -> None:
    """What its time consists of."""
    from rooftile.planning.stream_k_cost import counts, is_passing
    from rooftile.planning.stream_k_prices import machinery
    from rooftile.planning.tile_cost import predict_copies

    plan, prices = choice.decomposition, machinery(machine).prices
    passing = is_passing(plan, rows=rows)
    turned, copied = choice.transposed, choice.copied
    found = counts(plan, machine, rows=rows, passing=passing, transposed=turned, copied=copied)
    parts = {
        "launch": prices.launch,
        "first stages": found.first / prices.first_bandwidth,
        "steps": prices.steps(found),
        "results": prices.results(found),
        "parts": prices.adding(found),
        "reading, which overlaps steps and results": prices.reading(found),
    }
    said = ", ".join(f"{name} {seconds * 1e6:.1f}" for name, seconds in parts.items() if seconds)
    console.print(f"In microseconds: {said}.")
    if copied:
        product = choice.asked
        copies = predict_copies(2 * product.k * (product.m + product.n), machine)
        console.print(
            f"Before that both operands are copied, whose rows of {2 * product.k} bytes are no multiple of 16: "
            f"{copies * 1e6:.1f} more."
        )


def _title(plan: Decomposition, spans: Sequence[Span], machine: Machine) -> str:
    from rooftile.planning.stream_k_cost import clusters

    parts = sum(len(ctas) - 1 for ctas in plan.parts.values())
    units = clusters(machine.units, plan.tiling.ctas)
    return (
        f"{plan.scheme}: {max(span.end for span in spans) * 1e6:,.1f} us, "
        f"{plan.waves(units):.2f} waves, {plan.efficiency(units):.0%} of the SMs' steps"
        + (f", {parts} parts to add" if parts else "")
    )


def _row(spans: Sequence[Span], longest: float, width: int) -> str:
    cells = [" "] * width
    for span in spans:
        first = int(span.start / longest * width)
        last = max(first + 1, int(span.end / longest * width))
        mark = MARKS.get(span.kind) or LETTERS[span.tile % len(LETTERS)]
        cells[first:last] = [mark] * (min(last, width) - first)
    return "".join(cells)
