"""`rooftile bench sharing`: KV pages that samples and beams of one prompt share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rooftile.bench import sharing
from rooftile.cli import loading
from rooftile.cli.options import EngineOptions, with_options
from rooftile.cli.tables import print_whole, text_console


@with_options(engine=EngineOptions)
def bench_sharing(
    engine: EngineOptions,
    lengths: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            show_default="alpaca, sharegpt",
            help="alpaca (19 tokens in, 58 out) or sharegpt (161 in, 338 out); repeatable.",
        ),
    ] = None,
    num_prompts: Annotated[int, typer.Option(help="Different prompts, run at once.")] = 4,
    counts: Annotated[
        str, typer.Option(metavar="N,N,...", help="Samples, and beams, of a prompt.")
    ] = "2,4,6",
    save: Annotated[
        bool,
        typer.Option("--save", help="Append to benchmarks/results/ (sharing.jsonl, by machine)."),
    ] = False,
    output: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="With --save: instead of benchmarks/results."),
    ] = None,
) -> None:
    """KV pages saved by sharing, against a copy of every sequence.

    Prompts are English prose from Python's documentation. Pages are counted after each step: those
    in use, and the entries of all page tables, which is what copies would take.
    """
    if output is not None and not save:
        raise typer.BadParameter("says where --save writes; add --save", param_hint="--output")
    shapes = [_shape(name) for name in lengths or list(sharing.LENGTHS)]
    several = _counts(counts)

    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    from rooftile.bench.host import host
    from rooftile.bench.results import DIRECTORY, SharingResult, append, check_writable

    console, machine = text_console(), host()
    if save:
        check_writable(machine, output or DIRECTORY)
    llm = loading.load_llm(engine)
    tokenizer = llm.tokenizer
    if tokenizer is None:
        raise ValueError(f"{engine.model} has no tokenizer, so there is no text for it")
    table = Table(box=SIMPLE_HEAD)
    for name in ("lengths", "decoding", "saved on average", "at the peak", "pages at the peak"):
        table.add_column(name, justify="left" if name in ("lengths", "decoding") else "right")
    for shape in shapes:
        prompts = sharing.passages(tokenizer.encode, shape, num_prompts)
        for kind, params in (("samples", sharing.sampling), ("beams", sharing.beams)):
            for count in several:
                with console.status(f"{shape.name}: {count} {kind}"):
                    saving = sharing.measure_sharing(llm, prompts, params(count))
                table.add_row(
                    shape.name,
                    f"{count} {kind}",
                    f"{saving.average:.1%}",
                    f"{saving.peak:.1%}",
                    f"{max(saving.in_use)} instead of {max(saving.copied)}",
                )
                if save:
                    result = SharingResult(
                        suite="sharing",
                        case=f"{llm.model_name.lower()} {shape.name} prompts{num_prompts} "
                        f"{kind}{count} page{engine.page_size}",
                        saved_average=saving.average,
                        saved_peak=saving.peak,
                        pages_peak=max(saving.in_use),
                        pages_peak_copied=max(saving.copied),
                        steps=len(saving.in_use),
                    )
                    path = append(result, machine, output or DIRECTORY)
    shown = "1 prompt" if num_prompts == 1 else f"{num_prompts} prompts"
    console.print(f"{llm.model_name}, pages of {engine.page_size} tokens, {shown} at once")
    print_whole(console, table)
    if save:
        console.print(f"appended to {path}", markup=False, soft_wrap=True)


def _shape(name: str) -> sharing.Lengths:
    if name not in sharing.LENGTHS:
        raise ValueError(f"there are no lengths {name!r}; choose from {', '.join(sharing.LENGTHS)}")
    return sharing.LENGTHS[name]


def _counts(text: str) -> list[int]:
    parts = text.split(",")
    if not all(part.strip().isdecimal() and int(part) > 0 for part in parts):
        raise ValueError(f"counts is {text!r}; it must be numbers of at least 1, such as 2,4,6")
    return [int(part) for part in parts]
