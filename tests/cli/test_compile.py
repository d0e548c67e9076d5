"""`rooftile compile`: what is refused on a machine that cannot build, and what is built where one can."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rooftile.cli.main import app


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["conv"], "the kernels of 'conv' cannot be built ahead; choose from attention"),
        (["attention", "--dtype", "fp8"], "dtype is 'fp8'"),
        (["attention", "--cases", ", "], "cases is ', '; name a group or a case"),
        (["attention", "--target", "sm_50"], "there is no target 'sm_50'"),
        (["attention", "--kernels", "cuda"], "no compiled kernel 'cuda'"),
        (["attention", "--kernels", "gluon", "--target", "sm_80"], "gluon kernels are for sm_90a"),
    ],
)
def test_refusals(arguments: list[str], message: str, tmp_path: Path) -> None:
    command = ["compile", *arguments, "--output", str(tmp_path)]
    result = CliRunner().invoke(app, command, env={"COLUMNS": "200"})
    assert result.exit_code == 1
    assert message in result.output


def test_cases_without_a_kernel_are_left_out_or_refused(tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    command = ["compile", "attention", "--cases", "b1 s64 h2 d500", "--output", str(tmp_path)]
    result = CliRunner().invoke(app, command, env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    assert "gluon has no kernel for 'b1 s64 h2/2 d500 full'" in result.output
    assert "triton has no kernel for 'b1 s64 h2/2 d500 full': k_dim is 500" in result.output
    assert "0 kernels compiled" in result.output
    asked = CliRunner().invoke(app, [*command, "--kernels", "triton"], env={"COLUMNS": "200"})
    assert asked.exit_code == 1
    assert "error: triton has no kernel for" in asked.output


def test_builds_once_and_finds_again(tmp_path: Path) -> None:
    command = ["compile", "attention", "--kernels", "triton", "--output", str(tmp_path)]
    command += ["--cases", "b1 s512 h2/2 d32 full, b1 s77 h2/2 d32 full", "--target", "sm_80"]
    result = CliRunner().invoke(app, command, env={"COLUMNS": "200"})
    if importlib.util.find_spec("triton") is None:
        assert result.exit_code == 1
        assert "pip install triton==3.6.0" in result.output
        return
    assert "1 kernels compiled" in result.output, result.output
    assert list(tmp_path.rglob("*.cubin"))


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    command = ["compile", "attention", "--output", str(tmp_path / "file")]
    result = CliRunner().invoke(app, command, env={"COLUMNS": "200"})
    assert result.exit_code == 1
    assert "cannot be written" in result.output
    assert "give --output another directory" in result.output.replace("\n", " ")
