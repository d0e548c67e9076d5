"""`rooftile bench`: measurements, with a peer beside where it is asked for."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rooftile.bench.contenders import (
    Contender,
    Engine,
    Transformers,
    check_installed,
    peer_types,
)
from rooftile.bench.workloads import Request, Workload, select
from rooftile.cli import loading
from rooftile.cli.bench_ops import bench_ops
from rooftile.cli.bench_quality import bench_quality
from rooftile.cli.bench_serve import bench_serve
from rooftile.cli.bench_sharing import bench_sharing
from rooftile.cli.commands import Group, add_command
from rooftile.cli.options import EngineOptions, with_options
from rooftile.cli.tables import print_whole, text_console
from rooftile.engine.config import EngineConfig

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from rooftile.bench.host import Host
    from rooftile.bench.measure import Timing
    from rooftile.bench.results import Result
    from rooftile.bench.start_up import StartUp
    from rooftile.models.config import DecoderConfig
    from rooftile.planning.roofline import Bound

COUNTED = {"prefill": "prompt tokens", "output": "new tokens", "total": "prompt and new tokens"}

bench_app = typer.Typer(help="Measure speed, memory and quality.", cls=Group, no_args_is_help=True)


@bench_app.callback()
def bench() -> None:
    """Measure speed and memory.

    Peers run the same requests from the same weights in the same process.
    """


@with_options(engine=EngineOptions)
def bench_engine(
    engine: EngineOptions,
    workload: Annotated[
        list[str] | None,
        typer.Option(
            "--workload",
            "-w",
            metavar="NAME",
            show_default="cpu, or gpu on one",
            help="prefill512, decode1, decode8, decode32 (cpu: these four), nano, prefix, "
            "parallel, single, prefill (gpu: these five); repeatable.",
        ),
    ] = None,
    peers: Annotated[
        str,
        typer.Option(
            metavar="NAMES", help="Peers, separated by commas: llama-cpp, transformers, openvino."
        ),
    ] = "",
    num_requests: Annotated[
        int | None, typer.Option(help="Requests per run instead of the workload's own.")
    ] = None,
    scale: Annotated[
        float, typer.Option(help="Multiplies every length of prompts and answers (0 to 1).")
    ] = 1.0,
    repeats: Annotated[int, typer.Option(help="Measured runs; one warm-up comes before.")] = 3,
    threads: Annotated[
        int | None, typer.Option(help="Threads of torch (default: torch's own choice).")
    ] = None,
    start_up: Annotated[
        bool,
        typer.Option(
            "--start-up/--no-start-up",
            help="First start each engine in a process of its own: seconds to the first token, "
            "imports included, and the most memory.",
        ),
    ] = True,
    save: Annotated[
        bool,
        typer.Option("--save", help="Append to benchmarks/results/ (engine.jsonl, by machine)."),
    ] = False,
    output: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="With --save: instead of benchmarks/results."),
    ] = None,
) -> None:
    """Tokens per second of the engine on fixed workloads, median of several runs.

    "prefill" workloads count prompt tokens, "decode" ones new tokens, from the first request to
    the last token, so that the figures of a peer mean the same.
    """
    if output is not None and not save:
        raise typer.BadParameter("says where --save writes; add --save", param_hint="--output")
    if threads is not None and threads < 1:
        raise typer.BadParameter(f"is {threads}; it must be at least 1", param_hint="--threads")
    on_gpu = EngineConfig.build(engine.model, device=engine.device).device_type == "cuda"
    chosen = select(workload or ["gpu" if on_gpu else "cpu"])
    rivals = peer_types(peers)
    check_installed(rivals)
    if on_gpu and any(rival is not Transformers for rival in rivals):
        raise ValueError("on a GPU the only peer is transformers; or measure with --device cpu")
    if repeats < 1:
        raise ValueError(f"repeats is {repeats}; it must be at least 1")
    for one in chosen:  # refuses bad numbers before a model is loaded
        one.requests(
            1000, num_requests=1 if num_requests is None else min(num_requests, 1), scale=scale
        )

    import torch

    from rooftile.bench.host import host
    from rooftile.bench.measure import measure
    from rooftile.bench.presets import resolve_model
    from rooftile.bench.results import DIRECTORY, append, check_writable

    if threads is not None:
        torch.set_num_threads(threads)
    console, machine = text_console(), host()
    if save:
        check_writable(machine, output or DIRECTORY)
    model = resolve_model(engine.model, engine.random_weights)
    names = [Engine.name, *(peer.name for peer in rivals)]
    starts = _start_ups(console, names, model, engine) if start_up else {}
    llm = loading.load_llm(engine)
    contenders: list[Contender] = [
        Engine(llm),
        *(
            Transformers(model, engine.random_weights, llm.config.device)
            if peer is Transformers
            else peer(model, engine.random_weights)
            for peer in rivals
        ),
    ]
    where = f"{machine.processor}, {torch.get_num_threads()} threads"
    if on_gpu:
        where = torch.cuda.get_device_name()
    console.print(
        f"{llm.model_name} on {where}: tokens per second, median of {repeats} (lowest to highest); "
        f"KV memory holds {llm.stats().kv_tokens} tokens"
    )
    table = _table([contender.name for contender in contenders])
    for one in chosen:

        def draw(seed: int, one: Workload = one) -> list[Request]:
            return one.requests(
                llm.model_config.vocab_size, seed=seed, num_requests=num_requests, scale=scale
            )

        with console.status(f"{one.name}: {one.what}"):
            timings = measure(contenders, one, draw, repeats)
        bound = _bound(llm.model_config, draw(1), machine, engine.quantization)
        _add_row(table, one, timings, bound)
        if save:
            case = _case(llm.model_name, one, engine.quantization, num_requests, scale)
            result = _result(case, one, timings, bound, torch.get_num_threads(), starts)
            path = append(result, machine, output or DIRECTORY)
    print_whole(console, table)
    for one in chosen:
        console.print(f"{one.name}: {one.what}; counts {COUNTED[one.measure]}", style="dim")
    if save:
        console.print(f"appended to {path}", markup=False, soft_wrap=True)


def _start_ups(
    console: Console, names: list[str], model: str, engine: EngineOptions
) -> dict[str, StartUp]:
    """Of each engine, one after the other, shown in a table."""
    import torch
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    from rooftile.bench.start_up import start_up

    options = {name: value for name, value in engine.settings().items() if name != "model"}
    table = Table(box=SIMPLE_HEAD)
    for column in ("engine", "seconds to the first token", "peak MB"):
        table.add_column(column, justify="left" if column == "engine" else "right", no_wrap=True)
    found = {}
    for name in names:
        with console.status(f"starting {name}"):
            found[name] = start_up(name, model, options, torch.get_num_threads())
        seconds, peak = found[name].seconds, found[name].peak_bytes
        table.add_row(name, f"{seconds:.1f}", f"{peak / 1e6:.0f}")
    console.print(table)
    return found


def _bound(
    config: DecoderConfig, requests: list[Request], machine: Host, quantization: str
) -> Bound | None:
    from rooftile.bench.model_cost import least_seconds
    from rooftile.planning.hardware import MACHINES

    known = MACHINES.get(machine.slug)
    return None if known is None else least_seconds(config, requests, known, quantization)


def _case(
    model: str, workload: Workload, quantization: str, num_requests: int | None, scale: float
) -> str:
    changed = f" {quantization}" if quantization != "none" else ""
    changed += f" requests{num_requests}" if num_requests is not None else ""
    changed += f" scale{scale:g}" if scale != 1 else ""
    return f"{model.lower()} {workload.name}{changed}"


def _table(contenders: list[str]) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD)
    table.add_column("workload", no_wrap=True)
    for name in contenders:
        table.add_column(name, justify="right", no_wrap=True)
    for name in contenders[1:]:
        table.add_column(f"/ {name}", justify="right", no_wrap=True)
    table.add_column("of roofline", justify="right", no_wrap=True)
    return table


def _add_row(table: Table, workload: Workload, timings: list[Timing], bound: Bound | None) -> None:
    def cell(timing: Timing) -> str:
        rates = timing.rates
        return f"{_number(timing.rate)} ({_number(min(rates))} to {_number(max(rates))})"

    ours, *others = timings
    share = "" if bound is None else f"{_share(ours, bound):.0%} {bound.unit}"
    table.add_row(
        workload.name,
        *(cell(timing) for timing in timings),
        *(f"{ours.rate / other.rate:.2f}" for other in others),
        share,
    )


def _number(rate: float) -> str:
    return f"{rate:.0f}" if rate >= 100 else f"{rate:.1f}"


def _share(timing: Timing, bound: Bound) -> float:
    return bound.seconds / statistics.median(timing.seconds)


def _result(
    case: str,
    workload: Workload,
    timings: list[Timing],
    bound: Bound | None,
    threads: int,
    starts: dict[str, StartUp],
) -> Result:
    from rooftile.bench.results import Result

    ours, *others = timings
    return Result(
        suite="engine",
        case=case,
        kernel=ours.contender,
        us=ours.microseconds(),
        us_p20=ours.microseconds(0.2),
        us_p80=ours.microseconds(0.8),
        tokens_per_second=ours.rate,
        counted=workload.measure,
        repeats=len(ours.seconds),
        threads=threads,
        roofline_share=None if bound is None else _share(ours, bound),
        bound=None if bound is None else bound.unit,
        peers={other.contender: other.microseconds() for other in others},
        start_up_seconds={name: start.seconds for name, start in starts.items()},
        peak_bytes={name: start.peak_bytes for name, start in starts.items()},
    )


add_command(bench_app, bench_engine, "engine")
add_command(bench_app, bench_ops, "ops")
add_command(bench_app, bench_sharing, "sharing")
add_command(bench_app, bench_serve, "serve")
add_command(bench_app, bench_quality, "quality")
