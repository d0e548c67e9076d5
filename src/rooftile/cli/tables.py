"""Text, tables and timelines on terminals of any width, and in files."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

NARROWEST = 16  # columns of a timeline, below which it says nothing


def text_console() -> Console:
    """Of standard output. Text wraps between words on a terminal; in a file or a pipe its lines stay
    whole, as they are searched and cut there.
    """
    from rich.console import Console

    console = Console(highlight=False)
    console.soft_wrap = not console.is_terminal
    return console


def print_whole(console: Console, table: Table) -> None:
    """The table with all its columns: where the terminal, or a file, is narrower, lines are longer."""
    from rich.measure import Measurement

    free = console.options.update(max_width=10_000)
    table.width = Measurement.get(console, free, table).maximum
    console.print(table, soft_wrap=True)


def timeline_width(console: Console, wished: int, beside: int) -> int:
    """Columns of a timeline that has `beside` columns of other text on its lines."""
    return max(NARROWEST, min(wished, console.width - beside))
