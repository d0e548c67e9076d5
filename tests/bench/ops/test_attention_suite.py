"""`rooftile bench ops attention` on a CPU: what is checked, timed, saved, drawn and refused."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from rooftile.bench.ops.attention import SUITE, make
from rooftile.bench.ops.plot import panels
from rooftile.bench.ops.run import measure
from rooftile.bench.ops.suite import Problem, WrongResult
from rooftile.bench.ops.timing import time_in_turn
from rooftile.bench.results import OperatorResult
from rooftile.cli.main import app
from rooftile.planning.attention_case import attention_case
from rooftile.planning.hardware import EPYC_2_CORES

CPU = torch.device("cpu")
SMALL = "b2 s40/70 h4/2 d16 causal"


def problem(case: str, *, peers: tuple[str, ...] = (), dtype: Any = torch.bfloat16) -> Problem:
    return make(case, CPU, dtype, None, peers)


@pytest.mark.parametrize(
    "case", [SMALL, "b3 s5..60 h4/2 d16 causal", "b1 s33 h2/2 d24/16 full", "b1 s9/4 h1 d8 causal"]
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_oracle_agrees_with_our_kernels(case: str, dtype: torch.dtype) -> None:
    made = problem(case, dtype=dtype)
    assert "reference" in made.kernels
    for run in made.kernels.values():
        assert made.check(run()) < 4 * torch.finfo(dtype).eps


@pytest.mark.parametrize("case", [SMALL, "b3 s5..60 h4/2 d16 full"])
def test_a_wrong_row_is_found(case: str) -> None:
    made = problem(case)
    out = made.kernels["reference"]()
    worse = out.clone()
    worse[-1] += 0.05  # the last token, or the last sequence
    with pytest.raises(WrongResult, match="is off by 0.0"):
        made.check(worse)
    with pytest.raises(WrongResult, match="is off by inf"):
        made.check(torch.full_like(out, torch.nan))


def test_only_what_is_right_is_timed() -> None:
    made = problem("b1 s20 h2/2 d8 full", peers=("sdpa", "cudnn"))
    right = made.kernels["reference"]

    def broken() -> torch.Tensor:
        raise RuntimeError("no memory\nand more")

    def unknown() -> torch.Tensor:
        raise TypeError("no such option")

    wrong = {"wrong": lambda: right() * 1.5, "broken": broken}
    peers = {**made.peers, "odd": unknown}
    made = replace(made, kernels={"reference": right, **wrong}, peers=peers)
    measured = measure("attention", made, CPU, machine=EPYC_2_CORES, seconds=0.01)
    assert measured.absent["odd"] == "TypeError: no such option"
    with pytest.raises(TypeError, match="no such option"):
        measure("attention", replace(made, kernels={"reference": unknown}), CPU, machine=None)
    assert [row.kernel for row in measured.rows] == ["reference"]
    assert measured.absent["wrong"].startswith("wrong: b1 s20")
    assert measured.absent["broken"] == "RuntimeError: no memory"
    assert measured.absent["cudnn"] == "it needs an NVIDIA GPU"
    (row,) = measured.rows
    assert row.us_p20 <= row.us <= row.us_p80
    assert row.peers.keys() == {"sdpa"}
    # 2 heads x 400 pairs x 8 dims x 4 operations; 2 bytes of 4 tensors.
    assert row.tflops == pytest.approx(2 * 400 * 8 * 4 / row.us / 1e6)
    assert row.tbps == pytest.approx(2 * 4 * 20 * 2 * 8 / row.us / 1e6)
    assert row.roofline_share is not None
    assert 0 < row.roofline_share < 1


def test_contenders_take_turns() -> None:
    order: list[str] = []
    runs = {name: (lambda name=name: order.append(name)) for name in "ab"}
    timings = time_in_turn(runs, CPU, seconds=0.0)
    assert order == ["a", "b"] * (len(order) // 2)
    assert timings["a"].rounds == 5


def test_cases_of_the_suite_are_in_normal_form() -> None:
    for group, cases in SUITE.groups.items():
        for case in cases:
            assert attention_case(case).name == case, group
    assert len(SUITE.groups["forward"]) == 26
    assert SUITE.cases(["cpu", SMALL])[0] == ("attention_cpu", SUITE.groups["cpu"][0])
    assert SUITE.cases(["forward", SMALL])[-1] == ("attention", SMALL)


def row(case: str, kernel: str, tflops: float, peers: dict[str, float]) -> OperatorResult:
    return OperatorResult(
        suite="attention", case=case, kernel=kernel, us=100.0, us_p20=99.0, us_p80=101.0,
        tflops=tflops, tbps=1.0, roofline_share=0.5, bound="matrix", peers=peers, error=1e-3,
    )  # fmt: skip


def test_panels_by_hand() -> None:
    shown = panels(
        [
            row("b4 s512 h8/8 d64 full", "gluon", 400.0, {"cudnn": 200.0}),
            row("b4 s512 h8/8 d64 full", "triton", 300.0, {"cudnn": 200.0}),
            row("b1 s2048 h8/8 d64 full", "gluon", 500.0, {}),
            row("b1 s2048 h8/8 d64 causal", "gluon", 450.0, {}),
        ]
    )
    assert [panel.title for panel in shown] == [
        "head dim 64, heads 8/8, full",
        "head dim 64, heads 8/8, causal",
    ]
    assert shown[0].labels == ["512\nbatch 4", "2048\nbatch 1"]
    # cuDNN took twice our time, so half of 400.
    assert shown[0].bars == {"gluon": [400, 500], "triton": [300, None], "cudnn": [200, None]}
    assert list(shown[1].bars) == ["gluon"]


def test_other_suites_are_panels_of_their_own() -> None:
    rows = [
        dataclasses.replace(row("b1 1k h8/2 d64", "cpu", 2.0, {}), suite="paged"),
        dataclasses.replace(row("64x32x16", "reference", 3.0, {"torch": 50.0}), suite="gemm_cpu"),
    ]
    shown = panels(rows)
    assert [panel.title for panel in shown] == ["paged", "gemm_cpu"]
    assert shown[0].labels == ["b1\n1k\nh8/2\nd64"]
    assert shown[1].bars == {"reference": [3.0], "torch": [6.0]}
    (reads,) = panels([dataclasses.replace(rows[0], tflops=0.0, suite="split_kv")])
    assert (reads.unit, reads.bars) == ("GB/s", {"cpu": [1000.0]})


@pytest.mark.parametrize("plot", ["bars", "bars.gif", "nowhere/bars.png", "loop.png"])
def test_a_plot_that_cannot_be_written_is_refused_at_once(plot: str, tmp_path: Path) -> None:
    (tmp_path / "loop.png").symlink_to("loop.png")
    command = ["bench", "ops", "attention", "--cases", SMALL, "--plot", str(tmp_path / plot)]
    result = CliRunner().invoke(app, command, env={"COLUMNS": "200"})
    assert result.exit_code == 1
    assert result.output.startswith("error: the plot")


def test_the_table_is_whole_in_a_narrow_terminal() -> None:
    command = ["bench", "ops", "attention", "--cases", SMALL, "--seconds", "0.001"]
    result = CliRunner().invoke(app, [*command, "--peers", "sdpa"], env={"COLUMNS": "40"})
    assert "…" not in result.output
    assert "of roofline" in result.output


def test_the_command_prints_saves_and_draws(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    command = ["bench", "ops", "attention", "--cases", f"{SMALL}, b1 s30 h2/2 d16 full"]
    command += ["--peers", "sdpa", "--seconds", "0.01", "--save", "--output", str(tmp_path)]
    command += ["--plot", str(tmp_path / "bars.png")]
    result = CliRunner().invoke(app, command, env={"COLUMNS": "120"})
    assert result.exit_code == 0, result.output
    assert f"{SMALL}: no sdpa: it aligns a causal mask to the first key" in result.output
    assert "b1 s30 h2/2 d16 full" in result.output
    assert "geometric mean" in result.output
    (file,) = tmp_path.glob("*/attention.jsonl")
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert {r["case"] for r in rows} == {SMALL, "b1 s30 h2/2 d16 full"}
    needed = "suite case kernel us us_p20 us_p80 tflops tbps roofline_share bound peers error gpu"
    assert set(f"{needed} versions commit date".split()) <= rows[0].keys()
    assert (tmp_path / "bars.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["gemv"], "no operator 'gemv'"),
        (["attention", "--cases", "b1"], "no 's' word"),
        (["attention", "--peers", "fa9", "--cases", SMALL], "no peer 'fa9'"),
        (["attention", "--kernels", "gluon", "--cases", SMALL], "kernel='gluon' cannot run this call"),
        (["attention", "--dtype", "fp8"], "dtype is 'fp8'"),
        (["attention", "--device", "tpu"], "device is 'tpu'"),
        (["attention", "--seconds", "0"], "seconds is 0"),
    ],
)  # fmt: skip
def test_refusals(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["bench", "ops", *arguments], env={"COLUMNS": "200"})
    assert result.exit_code == 1
    assert message in result.output
