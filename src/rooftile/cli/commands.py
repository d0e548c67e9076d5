"""Adding a function to a command line."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import typer


def add_command(app: typer.Typer, function: Callable[..., Any], name: str | None = None) -> None:
    """With its docstring as help, whose paragraphs wrap where the terminal ends, not the source."""
    paragraphs = inspect.cleandoc(function.__doc__ or "").split("\n\n")
    text = "\n\n".join(paragraph.replace("\n", " ") for paragraph in paragraphs)
    app.command(name, help=text)(function)
