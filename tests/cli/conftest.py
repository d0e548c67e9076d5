from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from typer.testing import CliRunner

from rooftile.cli import loading
from rooftile.cli.main import app
from rooftile.cli.options import EngineOptions
from tests.cli.fakes import FakeLLM


@pytest.fixture
def llm(monkeypatch: pytest.MonkeyPatch) -> FakeLLM:
    """The engine that every command gets instead of loading one."""
    fake = FakeLLM()

    def load(options: EngineOptions, seed: int | None = None) -> FakeLLM:
        fake.options, fake.seed = options, seed
        return fake

    monkeypatch.setattr(loading, "load_llm", load)
    return fake


@pytest.fixture
def rooftile() -> Callable[..., Any]:
    """Runs the command line in this process: `rooftile("generate", "-m", "x")`."""

    def run(*arguments: str, input: str | None = None, **environment: str) -> Any:
        return CliRunner(env={"COLUMNS": "200", **environment}).invoke(app, arguments, input=input)

    return run
