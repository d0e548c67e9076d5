"""`rooftile bench ops`: one operator's kernels, checked and timed beside peers."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.table import Table

    from rooftile.bench.ops.run import Measured

DTYPES = ("bf16", "fp16", "fp32")


def bench_ops(
    operator: Annotated[
        str,
        typer.Argument(
            metavar="OPERATOR",
            help="attention, differential, dual_chunk, gemm, paged or split_kv",
        ),
    ],
    cases: Annotated[
        str,
        typer.Option(
            metavar="NAMES",
            show_default="forward on a GPU, cpu on a CPU",
            help="Groups (forward, short, varlen, cpu; of paged also fp8, prefill, ...) or cases such as "
            "'b4 s4096 h32/8 d128 causal', separated by commas.",
        ),
    ] = "",
    peers: Annotated[
        str,
        typer.Option(
            metavar="NAMES",
            help="Of attention cudnn, fa2, flex on a GPU, sdpa on a CPU; of differential two, four; of "
            "dual_chunk plain, plain_triton; of paged read, sdpa; of gemm torch.",
        ),
    ] = "",
    kernels: Annotated[
        str,
        typer.Option(
            metavar="NAMES",
            show_default="all that support the case",
            help="Kernel families of ours, separated by commas (rooftile doctor lists them).",
        ),
    ] = "",
    dtype: Annotated[str, typer.Option(help="bf16, fp16 or fp32.")] = "bf16",
    device: Annotated[
        str, typer.Option(show_default="cuda where there is a GPU", help="cuda or cpu.")
    ] = "",
    seconds: Annotated[
        float, typer.Option(help="Time measured for each contender of a case.")
    ] = 0.08,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Draw the results as bars (png, svg, pdf)."),
    ] = None,
    save: Annotated[
        bool, typer.Option("--save", help="Append to benchmarks/results/, by machine.")
    ] = False,
    output: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="With --save: instead of benchmarks/results."),
    ] = None,
) -> None:
    """An operator's kernels on fixed cases, with peers in the same run.

    Results are compared with float64 first; what fails is not timed. GPU times are replays of a
    CUDA graph with flushed caches, everybody in turn.
    """
    if output is not None and not save:
        raise typer.BadParameter("says where --save writes; add --save", param_hint="--output")
    if dtype not in DTYPES:
        raise ValueError(f"dtype is {dtype!r}; choose from {', '.join(DTYPES)}")
    if not 0 < seconds < math.inf:
        raise ValueError(f"seconds is {seconds}; it must be above 0")

    import torch

    from rooftile.bench.host import host
    from rooftile.bench.ops.registry import suite_of
    from rooftile.bench.ops.run import measure
    from rooftile.bench.results import DIRECTORY, append, check_writable
    from rooftile.cli.tables import print_whole, text_console
    from rooftile.planning.hardware import MACHINES

    suite = suite_of(operator)
    if device not in ("", "cuda", "cpu"):
        raise ValueError(f"device is {device!r}; choose cuda or cpu")
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if where.type == "cuda" and not torch.cuda.is_available():
        raise ValueError("device is cuda, but torch sees no GPU; choose cpu")
    if plot is not None:
        from rooftile.bench.ops.floor_plot import draw as draw_floor
        from rooftile.bench.ops.floor_plot import has_floor
        from rooftile.bench.ops.plot import check_plot, draw

        check_plot(plot)  # says what is missing before anything is measured
    default = suite.gpu if where.type == "cuda" else suite.cpu
    console, machine = text_console(), host()
    if save:
        check_writable(machine, output or DIRECTORY)
    known = MACHINES.get(machine.slug) if bool(machine.gpus) == (where.type == "cuda") else None
    kind = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[dtype]
    on_gpu = where.type == "cuda"
    chosen_peers = _names(peers) or list(suite.beside if on_gpu else ())
    bandwidth = suite.bandwidth(where) if suite.bandwidth is not None and on_gpu else None
    results: list[Measured] = []
    for filed_under, case in suite.cases(_names(cases) or default):
        with console.status(case):
            problem = suite.make(case, where, kind, _names(kernels) or None, chosen_peers)
            measured = measure(
                filed_under, problem, where,
                machine=known if kind.itemsize == 2 else None, seconds=seconds,
            )  # fmt: skip
        results.append(measured)
        for name, reason in measured.absent.items():
            console.print(f"{case}: no {name}: {reason}", style="yellow", markup=False)
        for row in measured.rows if save else ():
            path = append(row, machine, output or DIRECTORY)
    name = machine.gpus[0].name if where.type == "cuda" else machine.processor
    rows = [row for measured in results for row in measured.rows]
    if rows:
        console.print(
            f"{operator}, {dtype}, {name}; microseconds are medians; largest error against float64: "
            f"{max(row.error for row in rows):.1e}"
        )
        if bandwidth is not None:
            console.print(f"reading alone, 4 GiB in this run: {bandwidth / 1e12:.2f} TB/s")
        print_whole(console, _table(results, chosen_peers, bandwidth))
    if save and rows:
        console.print(f"appended to {path}", markup=False, soft_wrap=True)
    if plot is not None:
        heading = f"{operator} forward, {dtype}, {name}"
        if has_floor(rows):
            draw_floor(rows, heading, plot)
        else:
            draw(rows, heading, plot)
        console.print(f"drawn in {plot}", markup=False, soft_wrap=True)


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _table(results: list[Measured], peers: list[str], bandwidth: float | None = None) -> Table:
    """One line for each kernel of a case; `/ peer` is the peer's time over ours.

    bandwidth: bytes a second that reading alone reaches, for a column with the share of it.
    """
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("case, kernel", no_wrap=True)
    reading = () if bandwidth is None else ("TB/s", "of reading")
    for name in ("us", "+-", "TFLOP/s", *reading, *(f"/ {peer}" for peer in peers), "of roofline"):
        table.add_column(name, justify="right", no_wrap=True)
    ratios: dict[tuple[str, str], list[float]] = {}
    for measured in results:
        for i, row in enumerate(measured.rows):
            if i == 0:
                table.add_row(row.case, style="bold")
            for peer, us in row.peers.items():
                ratios.setdefault((row.kernel, peer), []).append(us / row.us)
            table.add_row(
                f"  {row.kernel}",
                _number(row.us),
                f"{(row.us_p80 - row.us_p20) / 2 / row.us:.0%}",
                _number(row.tflops),
                *(() if bandwidth is None else _rate(row.tbps, bandwidth)),
                *(f"{row.peers[p] / row.us:.2f}" if p in row.peers else "" for p in peers),
                "" if row.roofline_share is None else f"{row.roofline_share:.0%} {row.bound}",
            )
    if ratios:
        table.add_row("geometric mean", style="bold")
    for kernel in dict.fromkeys(kernel for kernel, _ in ratios):
        means = [ratios.get((kernel, peer), []) for peer in peers]
        table.add_row(f"  {kernel}", *[""] * (3 + len(reading)), *(_mean(v) for v in means))
    return table


def _rate(tbps: float, bandwidth: float) -> tuple[str, str]:
    return _number(tbps), f"{tbps * 1e12 / bandwidth:.0%}"


def _mean(ratios: list[float]) -> str:
    if not ratios:
        return ""
    return f"{math.exp(sum(map(math.log, ratios)) / len(ratios)):.2f}"


def _number(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"
