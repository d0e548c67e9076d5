"""`rooftile explain decode`: how the SMs of a GPU share the keys of a batch, as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

    from rooftile.planning.decode_case import DecodeCase
    from rooftile.planning.hardware import Machine
    from rooftile.planning.split_timeline import Timeline

WIDTH = 64  # characters of the longest timeline
SHOWN_SMS = 12
MOST_STRIPS = 1 << 16
LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"


def explain_decode(case: str, machine: str, plot: Path | None) -> None:
    """Raises ValueError for a case or a machine that is not understood."""
    from rooftile.cli.tables import text_console, timeline_width
    from rooftile.planning.cores import gpu_of
    from rooftile.planning.decode_case import decode_case
    from rooftile.planning.split_cost import split_spec
    from rooftile.planning.split_kv import Layout
    from rooftile.planning.split_timeline import equal_splits, naive, planned

    console = text_console()
    call, device = decode_case(case), gpu_of(machine, "paged attention")
    spec = split_spec(call, device)
    strips = Layout(spec).query_tiles * spec.num_kv_heads
    if strips > MOST_STRIPS:
        raise ValueError(
            f"case {case!r} has {strips:,} query tiles over all kv heads; at most {MOST_STRIPS:,} can be "
            f"explained, so ask for fewer requests, queries or heads"
        )
    timelines = [f(spec, call.q_lens, call.kv_lens) for f in (naive, equal_splits, planned)]
    _say_case(console, call, device)
    longest = max(timeline.clocks for timeline in timelines)
    width = timeline_width(console, WIDTH, beside=11)
    drawn: list[tuple[int, str]] = []
    for timeline in timelines:
        console.print(
            f"{timeline.name}: {timeline.clocks / device.clock * 1e6:,.0f} us, SMs busy "
            f"{timeline.share_busy:.0%}"
            + (f", {timeline.parts} parts to merge" if timeline.parts else ""),
            style="bold",
        )
        rows = _rows(timeline, longest, width)
        if rows == drawn:
            console.print("  as above: there are strips enough for every SM")
            continue
        drawn = rows
        for sm, cells in rows:
            console.print(f"  SM {sm:3d} |{cells}|", markup=False)
    console.print(
        f"A letter is a request, every SM in {-(-device.units // SHOWN_SMS)} is shown; a KV tile of "
        f"{spec.kv_tile} keys takes {spec.tile_cost[0]} clocks, an item {spec.item_cost} more."
    )
    if plot is not None:
        from rooftile.bench.ops.decode_plot import draw

        draw(timelines, device, f"{call.name} on {device.name}", plot)
        console.print(f"drawn in {plot}", markup=False)


def _say_case(console: Console, case: DecodeCase, machine: Machine) -> None:
    floor = case.kv_bytes / machine.bandwidth * 1e6
    console.print(f"paged attention {case.name} on {machine.name}", style="bold")
    console.print(
        f"{sum(case.kv_lens):,} keys of {len(case.kv_lens)} requests ({min(case.kv_lens):,} to "
        f"{max(case.kv_lens):,}), {case.kv_bytes / 1e6:,.0f} MB: {floor:,.0f} us at the data sheet's "
        f"{machine.bandwidth / 1e12:.2g} TB/s."
    )


def _rows(timeline: Timeline, longest: int, width: int) -> list[tuple[int, str]]:
    """Some SMs, each with its line of letters; dots are idle."""
    every = -(-timeline.sms // SHOWN_SMS)
    rows = {sm: [" "] * width for sm in range(0, timeline.sms, every)}
    for cells in rows.values():
        end = -(-timeline.clocks * width // max(longest, 1))
        cells[:end] = ["."] * end
    for busy in timeline.work:
        if busy.sm in rows:
            first = busy.start * width // longest
            last = max(first + 1, busy.end * width // longest)
            letter = LETTERS[busy.request % len(LETTERS)]
            rows[busy.sm][first:last] = [letter] * (min(last, width) - first)
    return [(sm, "".join(cells)) for sm, cells in rows.items()]
