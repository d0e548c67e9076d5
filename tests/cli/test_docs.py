"""The Python of the pages on attention kinds runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

DOCS = Path(__file__).parents[2] / "docs"
EXAMPLES = [
    pytest.param(code, id=f"{page} {number}")
    for page in ("dual_chunk.md", "differential.md")
    for number, code in enumerate(
        re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)
    )
]


@pytest.mark.parametrize("code", EXAMPLES)
def test_examples_run(code: str) -> None:
    names: dict[str, Any] = {}
    exec(compile(code, "example", "exec"), names)
    if "llm" in names:
        assert len(names["output"].outputs[0].token_ids) == 8
        assert names["llm"].stats().kv.in_use == 0
    elif "lam" in names:
        assert names["lam"].grad.shape == (8,)
        assert names["second_version"].shape == names["out"].shape == (1, 50, 8, 64)
    else:
        assert names["out"].shape == (1, 200, 8, 32)


def test_pictures_are_there() -> None:
    for page in ("dual_chunk.md", "differential.md"):
        for picture in re.findall(r"!\[.*?\]\((.*?)\)", (DOCS / page).read_text()):
            assert (DOCS / picture).is_file(), picture
