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


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [("ROOFTILE_CPU_KERNELS", "no", "0, 1"), ("ROOFTILE_CPU_LEVEL", "avx1024", "portable, avx2")],
)
def test_a_switch_that_says_nothing_is_refused(
    name: str, value: str, allowed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    load = library.load.__wrapped__  # what is kept was loaded without the switch
    with pytest.raises(ValueError, match=f"{name} is '{value}'; choose one of {allowed}"):
        load()
    monkeypatch.setenv("ROOFTILE_CPU_KERNELS", "0")
    monkeypatch.setenv("ROOFTILE_CPU_LEVEL", "")
    assert "switched off" in load()
