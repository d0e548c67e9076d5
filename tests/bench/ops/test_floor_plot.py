"""Times against reading the same bytes, as a picture."""

from __future__ import annotations

from pathlib import Path

import pytest

from rooftile.bench.ops.floor_plot import _labels, draw, has_floor
from rooftile.bench.results import OperatorResult


def row(case: str, kernel: str, us: float, **peers: float) -> OperatorResult:
    return OperatorResult(
        suite="paged", case=case, kernel=kernel, us=us, us_p20=us, us_p80=us, tflops=1.0, tbps=1.0,
        roofline_share=0.5, bound="memory", peers=peers, error=1e-3,
    )  # fmt: skip


def test_rows_beside_a_reader_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    rows = [
        row("b1 1k h32/8 d128", "gluon", 12.0, read=5.0, sdpa=30.0),
        row("b1 1k h32/8 d128", "triton", 20.0, read=5.0, sdpa=30.0),
        row("b32 4k h32/8 d128", "gluon", 130.0, read=118.0),
    ]
    assert has_floor(rows)
    assert not has_floor([*rows, row("b1 8k", "gluon", 20.0)])
    assert not has_floor([])
    for ending in ("png", "svg"):
        path = tmp_path / f"floor.{ending}"
        draw(rows, "paged attention", path)
        assert path.stat().st_size > 5000
    text = (tmp_path / "floor.svg").read_text()
    assert text.count("<!-- b32 4k h32/8 d128 -->") == 1


def test_labels_of_cases_side_by_side_are_written_at_one_point() -> None:
    cases = {
        "far": (900.0, 950.0),
        "b": (120.0, 133.0),
        "a": (119.0, 131.0),
        "slow": (121.0, 200.0),
    }
    assert _labels(cases) == {
        (119.0, 131.0): ["a", "b"],
        (121.0, 200.0): ["slow"],
        (900.0, 950.0): ["far"],
    }
