"""`rooftile bench quality`: the loss of a model with each quantisation of its weights."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import typer

from rooftile.cli import loading
from rooftile.cli.options import EngineOptions, with_options
from rooftile.cli.tables import print_whole, text_console


@with_options(engine=EngineOptions)
def bench_quality(
    engine: EngineOptions,
    tokens: Annotated[int, typer.Option(min=2, help="Tokens of text.")] = 4096,
    window: Annotated[int, typer.Option(min=2, help="Tokens that are scored together.")] = 512,
    text: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Instead of Python's own documentation."),
    ] = None,
) -> None:
    """Loss on English text with weights as they are, in 8 and in 4 bits.

    The text is Python's own documentation, the same on every machine with the same Python.
    """
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    from rooftile.bench.quality import loss, reference_text, windows
    from rooftile.models.packing import QUANTIZATIONS

    if engine.quantization != "none":
        raise ValueError("quality measures every quantization in turn; leave out --quantization")
    content = reference_text() if text is None else text.read_text(encoding="utf-8")
    table = Table(box=SIMPLE_HEAD)
    for name in ("weights", "loss", "above the first"):
        table.add_column(name, justify="left" if name == "weights" else "right", no_wrap=True)
    first: float | None = None
    for quantization in QUANTIZATIONS:
        llm = loading.load_llm(dataclasses.replace(engine, quantization=quantization))
        if llm.tokenizer is None:
            raise ValueError(f"{engine.model} has no tokenizer, so text cannot be scored")
        ids = llm.tokenizer.encode(content, add_special_tokens=False)
        found = loss(llm, list(windows(ids, tokens, min(window, tokens))))
        first = found if first is None else first
        table.add_row(quantization, f"{found:.4f}", f"{found / first - 1:+.2%}")
    console = text_console()
    print_whole(console, table)
    console.print(f"{tokens} tokens in windows of {window}; loss in nats a token", style="dim")
