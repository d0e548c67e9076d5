"""`make test` is the same in every run."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.conftest import EXPLORE

pytestmark = pytest.mark.skipif(EXPLORE, reason="exploring draws anew")


def drawn() -> list[tuple[list[int], str, float]]:
    examples = []

    @settings(max_examples=100)
    @given(st.lists(st.integers(0, 10**6)), st.text(), st.floats(allow_nan=False))
    def draw(numbers: list[int], text: str, real: float) -> None:
        examples.append((numbers, text, real))

    draw()
    return examples


def test_nothing_is_drawn_anew_and_nothing_is_timed() -> None:
    profile = settings()
    assert profile.derandomize
    assert profile.database is None
    assert profile.deadline is None


def test_draws_do_not_depend_on_what_is_imported(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = drawn()
    directory: Path = tmp_path_factory.mktemp("other")
    (directory / "of_many_constants.py").write_text(f"X = {list(range(1000, 9000, 70))}")
    monkeypatch.syspath_prepend(directory)
    importlib.import_module("of_many_constants")
    assert drawn() == before
