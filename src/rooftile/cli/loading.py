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

        return LLM(
            model,
            dtype=options.dtype,
            quantization=options.quantization,
            device=options.device,
            page_size=options.page_size,
            max_num_batched_tokens=options.max_num_batched_tokens,
            max_num_seqs=options.max_num_seqs,
            max_model_len=options.max_model_len,
            dual_chunk=options.dual_chunk,
            num_pages=options.num_pages,
            kv_memory_share=options.kv_memory_share,
            prefix_cache=options.prefix_cache,
            random_weights=options.random_weights,
            seed=seed or 0,
            on_progress=on_progress,
        )


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
