"""`rooftile bench serve`: load for any OpenAI-compatible server."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rooftile.cli.tables import print_whole, text_console

if TYPE_CHECKING:
    from rich.table import Table

    from rooftile.bench.serve_report import Report


def bench_serve(
    url: Annotated[str, typer.Option(help="Where the server is.")] = "http://127.0.0.1:8000",
    model: Annotated[
        str | None, typer.Option(show_default="the server's first", help="Model to ask for.")
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(envvar="ROOFTILE_API_KEY", show_default=False, help="Key to send."),
    ] = None,
    num_requests: Annotated[int, typer.Option("--num-requests", "-n", help="Requests.")] = 100,
    concurrency: Annotated[
        int | None,
        typer.Option("--concurrency", "-c", show_default="32", help="So many at any time."),
    ] = None,
    rate: Annotated[
        float | None,
        typer.Option(help="Instead: arrivals at random, so many a second on average."),
    ] = None,
    input_len: Annotated[int, typer.Option(help="Words of a prompt (see --vocab-size).")] = 64,
    output_len: Annotated[int, typer.Option(help="Most new tokens of an answer.")] = 64,
    vocab_size: Annotated[
        int | None,
        typer.Option(help="Make prompts of token ids below this instead of words."),
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Ask /v1/chat/completions, not /v1/completions.")
    ] = False,
    ignore_eos: Annotated[
        bool,
        typer.Option(
            "--ignore-eos/--respect-eos",
            help="Ask for all new tokens (a field that not every server knows).",
        ),
    ] = True,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Same seed, same prompts and arrivals.")] = 0,
    warm_up: Annotated[int, typer.Option(help="Requests before, which do not count.")] = 1,
    timeout: Annotated[float, typer.Option(help="Seconds after which a request failed.")] = 600.0,
    json_file: Annotated[
        Path | None,
        typer.Option("--json", metavar="FILE", help="Append the run and each request as JSON."),
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw the times (.png, .svg, .pdf).")
    ] = None,
) -> None:
    """Times and throughput of any server that speaks the OpenAI API."""
    import asyncio
    from dataclasses import replace

    from rich.console import Console
    from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from rooftile.bench.serve_client import RequestFailed, Target
    from rooftile.bench.serve_load import Load, Record, run_load
    from rooftile.bench.serve_report import Report

    if concurrency is not None and rate is not None:
        raise typer.BadParameter("is either this or --rate", param_hint="--concurrency")
    if warm_up < 0:
        raise typer.BadParameter("must not be negative", param_hint="--warm-up")
    target = Target.parse(url, api_key)
    load = Load(
        num_requests=num_requests,
        input_len=input_len,
        output_len=output_len,
        concurrency=32 if rate is None and concurrency is None else concurrency,
        rate=rate,
        chat=chat,
        vocab_size=vocab_size,
        ignore_eos=ignore_eos,
        temperature=temperature,
        seed=seed,
        timeout=timeout,
    )
    console = text_console()
    columns = (TextColumn("{task.description}"), MofNCompleteColumn(), TimeElapsedColumn())

    async def measure() -> tuple[str, list[Record]]:
        name = model or str((await target.get("/v1/models"))["data"][0]["id"])
        if warm_up:
            before = replace(load, num_requests=warm_up, concurrency=1, rate=None, seed=seed + 1)
            await run_load(target, name, before)
        screen = Console(stderr=True)
        with Progress(
            *columns, console=screen, transient=True, disable=not screen.is_terminal
        ) as bar:
            task = bar.add_task("requests", total=num_requests)
            return name, await run_load(target, name, load, lambda _: bar.advance(task))

    try:
        name, records = asyncio.run(measure())
    except RequestFailed as error:
        raise ConnectionError(f"{url}: {error}") from None
    report = Report(load, records)
    for message, count in report.errors.items():
        console.print(f"{count} x {message}", markup=False, style="red")
    if not report.good:
        raise typer.Exit(1)
    how = f"{load.concurrency} at a time" if rate is None else f"{rate:g} a second, at random"
    console.print(f"{name} at {url}: {num_requests} requests, {how}", markup=False)
    print_whole(console, _table(report))
    console.print(_throughput(report), markup=False)
    if json_file is not None:
        report.write_json(json_file, {"url": url, "model": name})
    if plot is not None:
        report.plot(plot, f"{name}: {num_requests} requests, {how}")


def _table(report: Report) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    from rooftile.bench.serve_report import KINDS, PERCENTILES

    table = Table(box=SIMPLE_HEAD)
    table.add_column("milliseconds")
    for column in ("mean", *(f"p{percent}" for percent in PERCENTILES)):
        table.add_column(column, justify="right")
    summary = report.summary()
    for kind, name in KINDS.items():
        cells = [
            "-" if value is None else f"{value * 1000:.1f}" for value in summary[kind].values()
        ]
        table.add_row(f"{name} ({kind.upper()})", *cells)
    return table


def _throughput(report: Report) -> str:
    summary = report.summary()
    failed = f", {summary['failed']} failed" if summary["failed"] else ""
    return (
        f"{summary['requests_per_second']:.2f} requests/s, "
        f"{summary['output_tokens_per_second']:.1f} new tokens/s, "
        f"{summary['total_tokens_per_second']:.1f} tokens/s in all; "
        f"{summary['cached_tokens']} of {summary['prompt_tokens']} prompt tokens were cached{failed}"
    )
