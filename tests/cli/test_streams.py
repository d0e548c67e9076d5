"""Files, standard streams and memory that are not what a command hopes for."""

from __future__ import annotations

import errno
import io
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rooftile.cli import loading
from rooftile.cli.main import app
from rooftile.cli.streams import prepare_streams
from tests.cli.fakes import FakeLLM

Run = Callable[..., Any]


def test_a_missing_stream_reads_as_empty_and_swallows(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("stdin", "stdout", "stderr"):
        monkeypatch.setattr(sys, name, None)
    prepare_streams()
    assert sys.stdin.read() == ""
    assert not sys.stdin.isatty()
    print("swallowed", flush=True)


@pytest.mark.parametrize(
    ("closed", "code", "said"), [("<&-", 2, "no prompt: give one or more"), (">&-", 1, "no such")]
)
def test_closed_streams(closed: str, code: int, said: str) -> None:
    script = "from rooftile.cli.main import app; app(['generate', '-m', 'a/b/c', *{0}])"
    arguments = [] if closed == "<&-" else ["prompt"]
    command = f'"{sys.executable}" -c "{script.format(arguments)}" {closed}'
    result = subprocess.run(["sh", "-c", command], capture_output=True, text=True)
    assert result.returncode == code
    assert said in " ".join(result.stderr.split())
    assert "Traceback" not in result.stderr


def test_characters_that_the_terminal_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    prepare_streams()
    print("one é two", flush=True)
    assert raw.getvalue() == b"one ? two\n"


def test_json_escapes_what_the_encoding_lacks(
    llm: FakeLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="latin-1"))
    app(["generate", "-m", "x", "--json", "日本 é 😀"], standalone_mode=False)
    assert json.loads(raw.getvalue())["prompt"] == "日本 é 😀"


def test_a_full_disk_is_one_line(llm: FakeLLM, rooftile: Run) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    llm.generate = full  # type: ignore[method-assign, assignment]
    result = rooftile("generate", "-m", "x", "one", "two")
    assert (result.exit_code, result.stderr) == (1, "error: [Errno 28] No space left on device\n")


def test_more_memory_than_there_is_names_the_options(
    monkeypatch: pytest.MonkeyPatch, rooftile: Run
) -> None:
    def load(*_: object) -> None:
        torch.empty(2**50, dtype=torch.int64)

    monkeypatch.setattr(loading, "load_llm", load)
    result = rooftile("generate", "-m", "x", "p")
    assert result.exit_code == 1
    assert result.stderr.startswith(f"error: not enough memory for {2**53} bytes; ask for less")
    assert "--num-pages" in result.stderr


def test_other_errors_of_the_runtime_are_not_hidden(llm: FakeLLM, rooftile: Run) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("a bug")

    llm.generate = broken  # type: ignore[method-assign, assignment]
    assert isinstance(rooftile("generate", "-m", "x", "one", "two").exception, RuntimeError)


def test_a_byte_order_mark_is_no_text(llm: FakeLLM, rooftile: Run, tmp_path: Path) -> None:
    file = tmp_path / "prompts"
    file.write_bytes(b'\xef\xbb\xbf{"prompt": "one"}\ntwo\n')
    rooftile("generate", "-m", "x", "--raw", "--input", str(file))
    rooftile("generate", "-m", "x", "--raw", input="\ufeffthree")
    assert llm.prompts == ["one", "two", "three"]


def test_a_file_that_is_no_text_is_named(llm: FakeLLM, rooftile: Run, tmp_path: Path) -> None:
    file = tmp_path / "prompts"
    file.write_bytes(b"good\n\xff\xfe\n")
    result = rooftile("generate", "-m", "x", "--input", str(file))
    assert result.exit_code == 1
    assert result.stderr.startswith(f"error: {file} is not UTF-8 text: ")


@pytest.mark.parametrize(
    "error", [MemoryError(), OSError(errno.ENOMEM, "Cannot allocate memory")], ids=["ours", "os"]
)
def test_memory_that_python_or_the_system_lacks(
    rooftile: Run, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def load(*_: Any) -> None:
        raise error

    monkeypatch.setattr(loading, "load_llm", load)
    result = rooftile("generate", "-m", "x", "p")
    assert result.exit_code == 1
    assert result.stderr.startswith("error: not enough memory (")
    assert "--num-pages" in result.stderr
