"""`rooftile bench sharing`: prints and records what it counts, refuses what makes no sense."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rooftile.bench.failure import MeasurementFailed
from rooftile.bench.sharing import LENGTHS, Lengths
from rooftile.cli import loading
from rooftile.engine.llm import LLM
from tests.engine.conftest import write_model

Run = Callable[..., Any]


def test_the_command(rooftile: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"dtype": "float32", "random_weights": True, "num_pages": 400, "page_size": 4}
    llm = LLM(str(write_model(tmp_path)), **options)
    monkeypatch.setattr(loading, "load_llm", lambda *_: llm)
    monkeypatch.setitem(LENGTHS, "alpaca", Lengths("short", 12, 8))
    result = rooftile(
        "bench", "sharing", "-m", "x", "--page-size", "4", "--lengths", "alpaca", "--counts", "2,3",
        "--num-prompts", "2", "--save", "--output", str(tmp_path),
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    (file,) = tmp_path.rglob("sharing.jsonl")
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert [row["case"].split(" short ")[1] for row in rows] == [
        "prompts2 samples2 page4", "prompts2 samples3 page4",
        "prompts2 beams2 page4", "prompts2 beams3 page4",
    ]  # fmt: skip
    for row in rows:
        assert row["saved_peak"] == 1 - row["pages_peak"] / row["pages_peak_copied"]
        assert f"{row['pages_peak']} instead of {row['pages_peak_copied']}" in result.stdout
        assert f"{row['saved_average']:.1%}" in result.stdout
        assert {"commit", "date", "cpu"} <= set(row)


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--lengths", "long"], 1, "there are no lengths 'long'; choose from alpaca, sharegpt"),
        (["--counts", "2,x"], 1, "counts is '2,x'"),
        (["--counts", "0"], 1, "counts is '0'"),
        (["--output", "x"], 2, "add --save"),
    ],
)
def test_the_command_refuses(rooftile: Run, arguments: list[str], code: int, said: str) -> None:
    result = rooftile("bench", "sharing", "-m", "no-such-model.gguf", *arguments)
    assert result.exit_code == code
    assert said in result.stderr


def test_a_measurement_that_fails_is_one_line(
    rooftile: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = LLM(str(write_model(tmp_path)), random_weights=True, num_pages=8, page_size=4)
    monkeypatch.setattr(loading, "load_llm", lambda *_: llm)
    monkeypatch.setitem(LENGTHS, "alpaca", Lengths("short", 12, 8))
    arguments = ("bench", "sharing", "-m", "x", "--lengths", "alpaca", "--num-prompts", "2")
    result = rooftile(*arguments)
    assert result.exit_code == 1
    assert result.stderr.splitlines()[-1].startswith("error: ")
    assert "raise --num-pages" in result.stderr
    assert isinstance(rooftile("--debug", *arguments).exception, MeasurementFailed)


def test_quality_measures_every_quantization_and_takes_none(rooftile: Run) -> None:
    result = rooftile("bench", "quality", "-m", "demo", "--quantization", "int8")
    assert result.exit_code == 1
    assert "leave out --quantization" in result.stderr
