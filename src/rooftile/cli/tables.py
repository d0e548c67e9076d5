"""Tables and timelines on terminals of any width."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

NARROWEST = 16  # columns of a timeline, below which it says nothing


def print_whole(console: Console, table: Table) -> None:
    """The table with all its columns: where the terminal, or a file, is narrower, lines are longer."""
    from rich.measure import Measurement

    free = console.options.update(max_width=10_000)
    table.width = Measurement.get(console, free, table).maximum
    console.print(table, soft_wrap=True)


def timeline_width(console: Console, wished: int, beside: int) -> int:
    """Columns of a timeline that has `beside` columns of other text on its lines."""
    return max(NARROWEST, min(wished, console.width - beside))
