"""`rooftile explain`: the pipeline that a call goes through on a machine, what binds, and why."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from rooftile.cli.tiles import Choice
    from rooftile.planning.attention_case import AttentionCase
    from rooftile.planning.pipeline import Pipeline

BAR = 24  # characters
TIMETABLE = 64
SHOWN_BLOCKS = 4
MOST_QUERIES = 1 << 26


def explain(
    operator: Annotated[str, typer.Argument(metavar="OPERATOR", help="attention, decode or gemm")],
    case: Annotated[
        str, typer.Argument(metavar="CASE", help="Such as 'b1 s16384 h16/16 d128 causal'.")
    ],
    machine: Annotated[
        str,
        typer.Option(
            "--machine", "-m", help="h200, h100, b200; of attention also ascend-910b and cpu."
        ),
    ] = "h200",
    rows: Annotated[
        int | None, typer.Option(help="Query rows of a tile, instead of our table's.")
    ] = None,
    block: Annotated[
        int | None, typer.Option(help="Keys of a block, instead of our table's.")
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Draw the timetable (png, svg, pdf)."),
    ] = None,
) -> None:
    """What binds a call of attention, decode or gemm on a machine, and how its work is laid out.

    For `attention`: clocks of each stage of a tile on each unit. For `decode`, such as
    'b64 loguniform128..32k h32/8 d128 page16': which SM of a GPU works on which request when,
    without splitting, with equal splits, and as planned. For `gemm`, such as 2176x2176x4096
    (m, n, k): the same for the tiles of a matrix product, scheme by scheme. Nothing runs: a model
    made of data-sheet rates and counted work, with latencies left out of attention.
    """
    if plot is not None:
        from rooftile.bench.ops.plot import check_plot

        check_plot(plot)
    if operator == "decode":
        from rooftile.cli.explain_decode import explain_decode

        if rows is not None or block is not None:
            raise ValueError("--rows and --block are of attention; leave them out with decode")
        explain_decode(case, machine, plot)
        return
    if operator == "gemm":
        from rooftile.cli.explain_gemm import explain_gemm

        if rows is not None or block is not None:
            raise ValueError("--rows and --block are of attention; leave them out with gemm")
        explain_gemm(case, machine, plot)
        return
    if operator != "attention":
        raise ValueError(
            f"there is nothing to explain about {operator!r}; choose attention, decode or gemm"
        )

    from rooftile.cli.tables import print_whole, text_console
    from rooftile.cli.tiles import choice
    from rooftile.planning.attention_case import attention_case
    from rooftile.planning.cores import core_of
    from rooftile.planning.pipeline import Tile, best_tile, pipeline

    console = text_console()
    call, core = attention_case(case), core_of(machine)
    chosen = choice(call, machine)
    queries = sum(call.q_lens)
    if queries > MOST_QUERIES:
        raise ValueError(
            f"case {case!r} has {queries:,} queries in all; at most {MOST_QUERIES:,} can be explained"
        )
    for name, value in (("rows", rows), ("block", block)):
        if value is not None and (value < 16 or value % 16):
            raise ValueError(f"{name} is {value}; it must be a multiple of 16")
    tile = Tile(rows or chosen.tile.rows, block or chosen.tile.block, chosen.tile.stages)
    line = pipeline(core, tile, chosen.k_dim, chosen.v_dim)

    console.print(f"attention {call.name} on {core.machine.name}", style="bold")
    console.print(
        f"kernel {chosen.kernel}: {chosen.tile.rows} rows by {chosen.tile.block} keys, "
        f"{chosen.tile.stages} in flight. {_sentence(chosen.reason)}"
    )
    if tile != chosen.tile:
        console.print(f"Shown instead, as asked: {tile.rows} rows by {tile.block} keys.")
    if not line.fits:
        console.print("This tile does not fit the core's memory.", style="yellow")
    print_whole(console, _stages(line))
    console.print(f"Overlap: {core.how}.")
    _say_ceiling(console, line, call)
    if not line.binds.startswith(("matrix", "exp", "vector")):
        other = best_tile(core, chosen.k_dim, chosen.v_dim)
        console.print(
            f"Bound by moving data ({line.binds}). {other.tile.rows} rows by {other.tile.block} keys "
            f"would be bound by {other.binds}, the matrix unit busy {other.matrix_share:.0%} instead "
            f"of {line.matrix_share:.0%}: each key that is read, and each output that is exchanged, "
            f"serves more work."
        )
    _say_timetable(console, line, chosen)
    if plot is not None:
        from rooftile.bench.ops.timetable_plot import draw

        draw(line, chosen.streams, f"attention {call.name} on {core.machine.name}", plot)
        console.print(f"drawn in {plot}", markup=False)


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."


def _stages(line: Pipeline) -> Table:
    """Stages down, clocks and units across; then how busy each unit is."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name, justify in (("for a block", "left"), ("unit", "left"), ("clocks", "right")):
        table.add_column(name, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    table.add_column(f"of the {line.block_clocks:.0f} clocks of a block", no_wrap=True)
    for stage in line.stages:
        for i, (unit, clocks) in enumerate(stage.clocks.items()):
            table.add_row(stage.name if i == 0 else "", unit, f"{clocks:.0f}", "")
    table.add_section()
    for unit, clocks in line.busy.items():
        share = clocks / line.block_clocks
        bar = "█" * round(BAR * share)
        style = "bold" if unit == line.binds else ""
        table.add_row("all stages", unit, f"{clocks:.0f}", f"{bar} {share:.0%}", style=style)
    table.add_section()
    for stage in line.around:
        for unit, clocks in stage.clocks.items():
            table.add_row(f"{stage.name} (tile)", unit, f"{clocks:.0f}", "")
    return table


def _say_ceiling(console: Console, line: Pipeline, case: AttentionCase) -> None:
    from rooftile.planning.pipeline import ceiling, wasted

    machine, top = line.core.machine, ceiling(line, case)
    console.print(
        f"Binds: {line.binds}. The matrix unit can be busy {line.matrix_share:.0%} of the time: "
        f"{_number(line.matrix_share * machine.matrix_flops / 1e12)} of "
        f"{_number(machine.matrix_flops / 1e12)} TFLOP/s."
    )
    console.print(
        f"The call: {top.tiles} tiles, {top.blocks} blocks on {machine.units} cores, "
        f"{wasted(case, line.tile):.1%} of the scores masked or past an end; at best "
        f"{_number(top.seconds * 1e6)} us, {_number(top.tflops)} TFLOP/s, bound by {top.binds} ("
        + ", ".join(f"{name} {_number(seconds * 1e6)} us" for name, seconds in top.limits.items())
        + ")."
    )


def _say_timetable(console: Console, line: Pipeline, chosen: Choice) -> None:
    """Units down, time across, each block a digit: the first blocks of a tile."""
    from rooftile.cli.tables import timeline_width
    from rooftile.planning.timetable import timetable

    events = timetable(line, SHOWN_BLOCKS, chosen.streams)
    end = max(event.end for event in events)
    width = timeline_width(console, TIMETABLE, beside=17)
    console.print(f"The first {SHOWN_BLOCKS} blocks, {end:.0f} clocks from left to right:")
    units = list(dict.fromkeys(event.unit for event in events))
    for unit in units:
        cells = [" "] * width
        for event in events:
            if event.unit == unit:
                first = int(event.start / end * width)
                last = max(first + 1, int(event.end / end * width))
                cells[first:last] = [str(event.block)] * (min(last, width) - first)
        console.print(f"  {unit:13s}|{''.join(cells)}|", markup=False)
