"""Loading a model for a command, with its phases shown on standard error."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rooftile.cli.options import EngineOptions

if TYPE_CHECKING:
    from rooftile.engine.llm import LLM


def load_llm(options: EngineOptions, seed: int | None = None) -> LLM:
    """The engine of `options.model`. seed: of the engine and of random weights (default 0)."""
    from rooftile.bench.presets import resolve_model

    model = resolve_model(options.model, options.random_weights)
    with load_progress(options.model) as on_progress:
        from rooftile.engine.llm import LLM

        settings = {**options.settings(), "model": model, "seed": seed or 0}
        return LLM(**settings, on_progress=on_progress)


@contextmanager
def load_progress(model: str) -> Iterator[Callable[[str, float], None]]:
    """A bar on a terminal, nothing in a pipe. Yields `on_progress(phase, share done)`."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    bar = Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
    with bar:
        task = bar.add_task(f"loading {model}", total=1.0)

        def on_progress(phase: str, share: float) -> None:
            bar.update(task, description=f"loading {model}: {phase}", completed=share)

        yield on_progress
