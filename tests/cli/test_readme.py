"""The README's Python runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from rooftile import attention
from rooftile.models import loader

README = Path(__file__).parents[2] / "README.md"
EXAMPLES = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)


@pytest.mark.parametrize("code", EXAMPLES, ids=["engine", "beams", "operator", "modifiers"])
def test_examples_run(
    code: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # In bfloat16 the first tokens of two answers are nearly alike.
    monkeypatch.setattr(loader, "default_dtype", lambda device: torch.float32)
    names: dict[str, Any] = {}
    exec(compile(code, str(README), "exec"), names)
    if "found" in names:
        first, second = names["found"].outputs
        assert first.score > second.score
        assert names["score"].is_greedy is False  # of Rome
        assert "True" in capsys.readouterr().out  # of one of the others
    elif "llm" in names:
        assert "The capital of France is Paris." in capsys.readouterr().out
        assert names["llm"].stats().kv.in_use == 0
    elif "packed" in names:
        q, out = names["q"], names["out"]
        alone = attention(q[:, :3], q[:, :3], q[:, :3], causal=True)
        assert out.shape == q.shape
        assert torch.equal(out[:, 0], alone[:, 0])  # sees itself only
    else:
        assert names["out"].shape == (2, 7, 8, 64)
