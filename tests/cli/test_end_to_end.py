"""The commands with the real engine: the demo model, and a random one of a benchmark's shape."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rooftile.cli import demo as demo_module
from rooftile.cli import loading
from rooftile.cli.options import EngineOptions
from rooftile.engine.llm import LLM

Run = Callable[..., Any]


@pytest.fixture(scope="module")
def loaded() -> LLM:
    return loading.load_llm(EngineOptions(model="demo", dtype="float32", num_pages=256))


@pytest.fixture
def demo_model(loaded: LLM, monkeypatch: pytest.MonkeyPatch) -> LLM:
    """One loaded demo model for all commands, as fresh as prefix and statistics allow."""
    loaded.reset_prefix_cache()
    monkeypatch.setattr(loading, "load_llm", lambda *_: loaded)
    return loaded


def test_generate_loads_the_demo_model_and_answers(rooftile: Run) -> None:
    result = rooftile(
        "generate", "-m", "demo", "--dtype", "float32", "--num-pages", "64", "-t", "0",
        "What is the capital of France?",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert result.stdout == "The capital of France is Paris.\n"


def test_generate_json_with_samples(demo_model: LLM, rooftile: Run) -> None:
    arguments = ("generate", "-m", "demo", "--raw", "--json", "-n", "2", "--seed", "3",
                 "--max-tokens", "6", "--ignore-eos", "Once upon a time", "The lighthouse")  # fmt: skip
    records = [json.loads(line) for line in rooftile(*arguments).stdout.splitlines()]
    assert [record["prompt"] for record in records] == ["Once upon a time", "The lighthouse"]
    for record in records:
        assert [len(answer["token_ids"]) for answer in record["outputs"]] == [6, 6]
        assert record["outputs"][0]["text"] != record["outputs"][1]["text"]
    again = [json.loads(line) for line in rooftile(*arguments).stdout.splitlines()]
    assert [r["outputs"] for r in again] == [r["outputs"] for r in records]


def test_chat_remembers_and_recovers_from_a_message_too_long(
    demo_model: LLM, rooftile: Run
) -> None:
    long = "word " * 9000
    result = rooftile(
        "chat", "-m", "demo", "-t", "0", "--max-tokens", "20",
        input="What is the capital of France?\n"
        f"What is the capital of Italy?\n{long}\nWhich two cities did you name?\n",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "error: the prompt has " in result.stderr
    assert "Paris" in result.stdout.splitlines()[-1]
    assert "Rome" in result.stdout.splitlines()[-1]
    assert demo_model.stats().kv.in_use == 0


def test_demo_shows_the_sharing(demo_model: LLM, rooftile: Run) -> None:
    before = demo_model.stats().kv
    result = rooftile("demo")
    assert result.exit_code == 0, result.output
    for question in demo_module.QUESTIONS:
        assert question in result.stdout
    assert "Paris" in result.stdout
    known = re.findall(r"(\d+) of (\d+) prompt tokens reused", result.stdout)
    cached = [int(tokens) for tokens, _ in known]
    assert cached[0] == 0
    assert all(tokens >= 112 for tokens in cached[1 : len(demo_module.QUESTIONS)])
    row = {
        name.strip(): value
        for name, value in re.findall(r"^  (\S.*?)  +(\S.*\S|\S) *$", result.stdout, re.MULTILINE)
    }
    kv = demo_model.stats().kv
    assert (
        int(row["pages shared by prefix, all questions together (1)"]) == kv.pages_shared_by_prefix
    )
    assert kv.pages_shared_by_prefix - before.pages_shared_by_prefix >= 7 * 3
    assert int(row["pages copied on write (3)"]) == kv.pages_copied
    assert kv.pages_copied - before.pages_copied == demo_module.SAMPLES - 1
    assert row["pages in use now"] == "0"
    assert int(row["pages kept for prompts that begin alike (2)"]) == kv.cached
    assert float(row["tokens per second after the first, one answer at a time"]) > 0


def test_bench_prints_and_saves(demo_model: LLM, rooftile: Run, tmp_path: Path) -> None:
    result = rooftile(
        "bench", "engine", "-m", "demo", "-w", "decode8", "-w", "parallel", "--num-requests", "2",
        "--scale", "0.05", "--repeats", "1", "--save", "--output", str(tmp_path),
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "decode8" in result.stdout
    assert "seconds to the first token" in result.stdout
    (path,) = tmp_path.rglob("engine.jsonl")
    decode, parallel = (json.loads(line) for line in path.read_text().splitlines())
    assert decode["case"] == "smollm2-135m-instruct decode8 requests2 scale0.05"
    assert decode["tokens_per_second"] == pytest.approx(2 * 6 / (decode["us"] * 1e-6))
    assert 0 < decode["start_up_seconds"]["rooftile"] < 120
    assert decode["peak_bytes"]["rooftile"] > 100e6
    assert decode["peers"] == {}
    assert parallel["roofline_share"] is None  # its answers share their prompt's KV


def test_bench_beside_transformers(rooftile: Run, tmp_path: Path) -> None:
    """A random model of few layers, so that the peer loads in no time."""
    config = json.loads(
        (Path(loading.__file__).parents[1] / "bench/models/qwen3-0.6b/config.json").read_text()
    )
    config |= {
        "hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 128, "head_dim": 16,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 4500,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    result = rooftile(
        "bench", "engine", "-m", str(tmp_path), "--random-weights", "--peers", "transformers",
        "-w", "nano", "-w", "parallel", "--num-requests", "3", "--scale", "0.02", "--repeats", "1",
        "--num-pages", "500", "--save", "--output", str(tmp_path),
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "/ transformers" in result.stdout
    (path,) = tmp_path.rglob("engine.jsonl")
    for line in path.read_text().splitlines():
        assert json.loads(line)["peers"]["transformers"] > 0


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["-w", "nonsense"], 1, "there is no workload 'nonsense'"),
        (["--scale", "2"], 1, "scale is 2.0"),
        (["--repeats", "0"], 1, "repeats is 0"),
        (["--threads", "0"], 2, "at least 1"),
        (["--output", "x"], 2, "add --save"),
        (["--peers", "nobody"], 1, "there is no peer 'nobody'"),
    ],
)
def test_bench_refuses_what_makes_no_sense(
    demo_model: LLM, rooftile: Run, arguments: list[str], code: int, said: str
) -> None:
    result = rooftile("bench", "engine", "-m", "demo", *arguments)
    assert result.exit_code == code
    assert said in result.stderr
