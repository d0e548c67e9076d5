"""`help()` of what is public tells the shapes that the source has beside each tensor."""

from __future__ import annotations

import ast
import inspect
import io
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import rooftile


def told_in_source(public: Any) -> Iterator[tuple[str, str]]:
    """Parameters, or fields, with the shape in the comment at the end of their line."""
    path = inspect.getsourcefile(public)
    assert path is not None
    source = Path(path).read_text()
    comments = {
        token.start[0]: token.string.lstrip("# ")
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    }
    (node,) = [
        node
        for node in ast.parse(source).body
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == public.__name__
    ]
    if isinstance(node, ast.FunctionDef):
        own = [(p.arg, p.lineno) for p in (*node.args.args, *node.args.kwonlyargs)]
    else:
        fields = [f for f in node.body if isinstance(f, ast.AnnAssign)]
        own = [(f.target.id, f.lineno) for f in fields if isinstance(f.target, ast.Name)]
    for name, line in own:
        if comments.get(line, "").startswith("["):
            yield name, comments[line]


OPERATORS = [
    name
    for name in rooftile.__all__
    if getattr(rooftile, name).__module__.startswith(("rooftile.ops", "rooftile.types"))
]


@pytest.mark.parametrize("name", OPERATORS)
def test_shapes_are_told(name: str) -> None:
    public = getattr(rooftile, name)
    told = inspect.getdoc(public) or ""
    for argument, shape in told_in_source(public):
        assert f"{argument}: {shape}\n" in f"{told}\n", f"{argument}: {shape}"


def test_there_are_shapes() -> None:
    assert len(dict(told_in_source(rooftile.attention))) == 5
    assert len(dict(told_in_source(rooftile.SamplingTensors))) == 17
    assert "attention" in OPERATORS
