"""Commands and groups of the command line, and adding a function as one."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup


class _PlainSwitches:
    """In help nothing stands beside a switch: typer's `--json <bool>` looks as if a value followed."""

    def get_params(self, ctx: Any) -> Any:
        params = super().get_params(ctx)  # type: ignore[misc]
        for param in params:
            if getattr(param, "is_flag", False) and param.metavar is None:
                param.metavar = ""
        return params


class Command(_PlainSwitches, TyperCommand):
    """One command."""


class Group(_PlainSwitches, TyperGroup):
    """A command of commands."""


def add_command(app: typer.Typer, function: Callable[..., Any], name: str | None = None) -> None:
    """With its docstring as help, whose paragraphs wrap where the terminal ends, not the source."""
    paragraphs = inspect.cleandoc(function.__doc__ or "").split("\n\n")
    text = "\n\n".join(paragraph.replace("\n", " ") for paragraph in paragraphs)
    app.command(name, cls=Command, help=text)(function)
