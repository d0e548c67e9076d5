"""The CPU kernels are compiled once, however many ask for them at the same time."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from rooftile.kernels.cpu import library
from tests.support.gate import wait_until


def test_whoever_asks_meanwhile_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Path] = []
    go_on = threading.Event()

    def compile_library(target: Path, compiler: list[str]) -> None:
        made.append(target)
        assert go_on.wait(60)
        target.touch()

    monkeypatch.setenv("ROOFTILE_CACHE", str(tmp_path))
    monkeypatch.setattr(library, "library_name", lambda: "lib.so")
    monkeypatch.setattr(library, "find_compiler", lambda: ["c++"])
    monkeypatch.setattr(library, "compile_library", compile_library)
    found: list[Path | str] = []
    threads = [threading.Thread(target=lambda: found.append(library._find())) for _ in "abc"]
    for thread in threads:
        thread.start()
        wait_until(lambda: bool(made))
    go_on.set()
    for thread in threads:
        thread.join(60)
    assert found == [tmp_path / "rooftile" / "lib.so"] * 3
    assert made == found[:1]


def test_a_cache_that_cannot_be_written_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("ROOFTILE_CACHE", str(tmp_path / "file"))
    monkeypatch.setattr(library, "library_name", lambda: "lib.so")
    monkeypatch.setattr(library, "find_compiler", lambda: ["c++"])
    said = library._find()
    assert isinstance(said, str)
    assert said.startswith("the native CPU kernels do not compile: ")
    shown = capsys.readouterr().err
    assert said in shown
    assert "ROOFTILE_CACHE" in shown
