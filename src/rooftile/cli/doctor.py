"""`rooftile doctor`: what this machine has, and which kernels run on it."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.table import Table

    from rooftile.bench.host import Host
    from rooftile.cli.kernel_table import KernelRow


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Show versions, devices, and the table of operators and kernels with reasons."""
    from rooftile.bench.host import host, versions
    from rooftile.cli.kernel_table import kernel_table

    machine = host()
    rows = kernel_table(["cpu", "cuda"] if machine.gpus else ["cpu"])
    if as_json:
        report = {
            "versions": versions(),
            "host": asdict(machine),
            "kernels": [asdict(row) for row in rows],
        }
        print(json.dumps(report, indent=2))
        return

    from rooftile.cli.tables import print_whole, text_console

    console = text_console()
    console.print("[bold]Versions[/]")
    console.print("  " + " · ".join(f"{name} {version}" for name, version in versions().items()))
    console.print("[bold]Machine[/]")
    for line in _machine_lines(machine):
        console.print(f"  {line}", markup=False)
    table, notes = _table(rows)
    if console.is_terminal:
        console.print(table)
    else:
        print_whole(console, table)
    console.print(
        'auto: what kernel="auto" takes · yes: can run it · -: no such kernel yet · '
        "(n): cannot, because",
        markup=False,
    )
    for number, reason in enumerate(notes, start=1):
        console.print(f"  ({number}) {reason}", markup=False)


def _machine_lines(machine: Host) -> list[str]:
    features = ", ".join(f"{'' if has else 'no '}{name}" for name, has in machine.features.items())
    gib = 2**30
    lines = [
        f"{machine.processor}, {machine.cores} cores: {features}",
        f"memory {machine.memory_free / gib:.1f} of {machine.memory_total / gib:.1f} GiB free",
    ]
    lines += [f"{g.name}, sm {g.capability}, {g.memory / gib:.0f} GiB" for g in machine.gpus]
    return lines if machine.gpus else [*lines, "no GPU that torch can use"]


# So that all families fit beside each other in 80 columns.
SHORT = {"reference": "ref.", "triton": "trit."}


def _table(rows: list[KernelRow]) -> tuple[Table, list[str]]:
    """The table, and the reasons that its numbers stand for."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    families = list(dict.fromkeys(family for row in rows for family in row.reasons))
    several_devices = len({row.device for row in rows}) > 1
    table = Table(
        box=SIMPLE_HEAD, title="Operators and kernels", title_justify="left", padding=(0, 0, 0, 1)
    )
    table.add_column("operator", no_wrap=True)
    table.add_column("call", overflow="fold")  # on several lines where there is no room for it
    for family in families:  # what the table is for is never cut
        header = SHORT.get(family, family)
        table.add_column(header, no_wrap=True, min_width=max(len("auto"), len(header)))
    notes: list[str] = []
    previous = None
    for row in rows:
        cells = []
        for family in families:
            reason = row.reasons.get(family)
            if family not in row.reasons:
                cells.append("-")
            elif reason is None:
                cells.append("[green]auto[/]" if family == row.chosen else "yes")
            else:
                if reason not in notes:
                    notes.append(reason)
                cells.append(f"[yellow]({notes.index(reason) + 1})[/]")
        call = f"{row.device}: {row.call}" if several_devices else row.call
        table.add_row("" if row.operator == previous else row.operator, call, *cells)
        previous = row.operator
    return table, notes
