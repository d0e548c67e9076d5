"""`rooftile explain gemm`: each scheme's timeline, and the one that is chosen."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rooftile.cli.main import app


def explain(*arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, ["explain", "gemm", *arguments], env={"COLUMNS": "100"})
    assert result.exit_code == code, result.output
    return result.output


def test_a_wave_and_a_bit() -> None:
    output = explain("2176x2176x4096")
    assert "matrix product 2176x2176x4096 on H200 SXM" in output
    assert re.search(r"Chosen: \S+ by 1[23]\d CTAs", output)  # of 132 multiprocessors
    for scheme in ("data-parallel:", "stream-k:"):
        assert scheme in output
    assert "bound by matrix" in output


def test_few_rows_are_split() -> None:
    output = explain("16x1024x14336")
    split = re.search(
        r"Chosen: (?:split|joined)-k by (\d+) CTAs, .*? (\d+) tiles of", " ".join(output.split())
    )
    assert split, output
    num_ctas, num_tiles = map(int, split.groups())
    assert num_ctas % num_tiles == 0
    assert num_ctas >= 3 * num_tiles
    assert "bound by memory" in output
    assert "parts to add" in output


def test_operands_that_are_copied_first() -> None:
    output = " ".join(explain("2500x2500x2500").split())
    assert re.search(
        r"copied, whose rows of 5000 bytes are no multiple of 16: \d+\.\d more", output
    )
    assert "rows that begin inside cache lines bind" not in output  # those of copies do not
    assert "copied" not in explain("2496x2496x2496")


def test_a_machine_that_was_not_measured() -> None:
    assert "on B200 SXM" in explain("2176x2176x4096", "--machine", "b200")


def test_a_drawing(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / "gemm.svg"
    assert f"drawn in {file}" in explain("600x500x4096", "--plot", str(file))
    assert file.read_text().count("<g id=") > 30


def test_what_is_not_understood() -> None:
    output = explain("2176x2176", code=1)
    assert "'2176x2176' is not understood; write m, n and k" in output
    assert "--rows and --block are of attention" in explain("8x8x8", "--rows", "64", code=1)
