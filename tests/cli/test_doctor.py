"""`rooftile doctor`: the table says what the operators themselves say."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch

from rooftile.bench import host
from rooftile.cli.kernel_table import example_calls, kernel_table
from rooftile.ops.operator import OPERATORS

Run = Callable[..., Any]


def test_every_operator_has_an_example_and_a_kernel_that_runs_it() -> None:
    rows = kernel_table(["cpu"])
    forward = {name for name in OPERATORS if not name.endswith("_backward")}
    assert {row.operator for row in rows} == forward == set(example_calls("cpu"))
    for row in rows:
        assert row.chosen is not None
        assert row.reasons[row.chosen] is None
        assert set(row.reasons) == set(OPERATORS[row.operator].families)


def test_reasons_are_those_of_the_kernels() -> None:
    rows = [r for r in kernel_table(["cpu"]) if r.call.endswith("softcap")]
    (row,) = [r for r in rows if r.operator == "paged_attention"]
    assert row.reasons["torch"] == "torch's fused attention has no softcap"
    assert row.chosen is not None
    assert row.chosen != "torch"
    assert row.reasons[row.chosen] is None


def test_text(rooftile: Run) -> None:
    result = rooftile("doctor")
    assert result.exit_code == 0, result.output
    assert torch.__version__ in result.stdout
    assert "paged_attention" in result.stdout
    assert "has no softcap" in result.stdout


def test_nothing_is_cut_in_80_columns(monkeypatch: Any) -> None:
    from rich.console import Console

    from rooftile.cli import doctor

    table, _ = doctor._table(kernel_table(["cpu"]))
    console = Console(width=80, force_terminal=True, no_color=True, record=True, quiet=True)
    console.quiet = False
    with console.capture() as shown:
        console.print(table)
    assert "differential_attention_varlen" in shown.get()
    assert "window 4096" in shown.get()
    assert "\u2026\n" not in shown.get()


def test_in_a_pipe_each_row_is_one_line(rooftile: Run) -> None:
    lines = rooftile("doctor", COLUMNS="80").stdout.splitlines()
    (row,) = [line for line in lines if line.strip().startswith("attention_varlen_mods")]
    assert "bf16 h32/8 d128 causal" in row


def test_json(rooftile: Run) -> None:
    report = json.loads(rooftile("doctor", "--json").stdout)
    assert report["versions"]["torch"] == torch.__version__
    assert report["host"]["cores"] >= 1
    assert report["host"]["memory_total"] > 2**28
    assert {row["operator"] for row in report["kernels"]} >= {"attention", "linear", "rms_norm"}


def test_cpu_features_come_from_the_flags(monkeypatch: Any) -> None:
    text = "model name\t: Some CPU @ 3GHz\nflags\t\t: avx2 fma avx512f avx512_bf16\n"
    monkeypatch.setattr(host, "_read", {"/proc/cpuinfo": text}.__getitem__)
    machine = host.host()
    assert machine.processor == "Some CPU @ 3GHz"
    assert machine.features["avx2"]
    assert not machine.features["avx512"]  # one of its parts is not enough
    assert machine.features["avx512_bf16"]
    assert 0 < machine.memory_free <= machine.memory_total
    assert machine.slug.startswith("some-cpu-3ghz-")
