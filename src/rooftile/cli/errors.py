"""Errors as a user should see them: one line on standard error, no traceback."""

from __future__ import annotations

import errno
import re
from typing import Any

import typer

from rooftile.cli.commands import Group

# What the library raises for something that the user can put right.
USER_ERRORS = (
    ValueError,
    NotImplementedError,
    ModuleNotFoundError,
    OSError,
    MemoryError,
)


ASK_FOR_LESS = (
    "ask for less: a smaller model or case, or a smaller --num-pages, --max-num-seqs or "
    "--max-model-len"
)


def print_error(message: str) -> None:
    """A red line `error: ...` on standard error (no colour where NO_COLOR is set or in a pipe)."""
    from rich.console import Console

    console = Console(stderr=True, markup=False, highlight=False, emoji=False)
    console.print(f"error: {message}", style="red", soft_wrap=True)


class FriendlyGroup(Group):
    """Turns the library's errors into one line and exit code 1; `--debug` keeps the traceback."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:  # the reader of our output has left: typer ends quietly
            raise
        except USER_ERRORS as error:
            if ctx.params.get("debug"):
                raise
            message = str(error) or type(error).__name__
            if isinstance(error, OSError) and error.filename and error.strerror:
                message = f"{error.filename}: {error.strerror}"
            if isinstance(error, MemoryError) or getattr(error, "errno", None) == errno.ENOMEM:
                message = f"not enough memory ({message}); {ASK_FOR_LESS}"
            print_error(message)
            raise typer.Exit(1) from error
        except RuntimeError as error:
            from rooftile.bench.failure import MeasurementFailed

            # What a CPU cannot allocate has no class of its own in torch.
            asked = re.search(r"can't allocate memory.* (\d+ bytes)", str(error))
            known = asked is not None or isinstance(error, MeasurementFailed)
            if not known or ctx.params.get("debug"):
                raise
            print_error(
                str(error) if asked is None else f"not enough memory for {asked[1]}; {ASK_FOR_LESS}"
            )
            raise typer.Exit(1) from error
