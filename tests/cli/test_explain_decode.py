"""`rooftile explain decode`: the SM timelines of a batch."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from rooftile.cli.main import app

CASE = "b64 one32k rest512 h32/8 d128 page16"


def explain(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["explain", "decode", *arguments], env={"COLUMNS": "100"})
    assert result.exit_code == 0, result.output
    return result.output


def test_three_timelines_on_one_scale() -> None:
    output = explain(CASE)
    assert "65,024 keys of 64 requests (512 to 32,768), 266 MB: 55 us" in output
    naive, split, planned = (
        output.index(name) for name in ("a CTA for each", "each cut into 1", "planned:")
    )
    assert naive < split < planned
    rows = [line for line in output.splitlines() if line.startswith("  SM")]
    assert len(rows) == 2 * 12  # the second is as the first
    assert len({len(row) for row in rows}) == 1
    assert rows[0].count("a") == 64
    assert rows[0].count(".") == 0
    assert rows[1].count(".") > 50
    assert all(row.count(" ") > 45 for row in rows[12:])


def test_other_machines_and_a_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / "timeline.png"
    assert "H100" in explain("b1 8k h32/8 d128", "--machine", "h100", "--plot", str(file))
    assert file.stat().st_size > 10_000


def test_refusals() -> None:
    for arguments, message in (
        (["decode", "b1 8k"], "has no 'h' word"),
        (["decode", CASE, "--rows", "64"], "--rows and --block are of attention"),
        (["softmax", CASE], "choose attention, decode or gemm"),
    ):
        result = CliRunner().invoke(app, ["explain", *arguments], env={"COLUMNS": "200"})
        assert result.exit_code != 0
        assert message in result.output + str(result.exception)
