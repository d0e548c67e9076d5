"""What the pages say exists: links, files, commands with their options; and their Python runs."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
import typer.main

from rooftile.cli.main import app

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]
EXAMPLES = [
    pytest.param(code, id=f"{page} {number}")
    for page in ("dual_chunk.md", "differential.md", "paged_attention.md", "operators.md")
    for number, code in enumerate(
        re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)
    )
]
FILES = [
    str(path.relative_to(ROOT))
    for folder in ("src", "tests", "docs", "benchmarks")
    for path in (ROOT / folder).rglob("*.*")
]
# How files are named that a reader is to write, or that are no files.
NAMES_OF_OTHERS = {
    "ops/x.py",
    "kernels/reference/x.py",
    "tests/ops/test_x.py",
    "PEERS.md",
    "generation_config.json",
    "llama.cpp",
}


@pytest.mark.parametrize("code", EXAMPLES)
def test_examples_run(code: str) -> None:
    names: dict[str, Any] = {}
    exec(compile(code, "example", "exec"), names)
    if "llm" in names:
        assert len(names["output"].outputs[0].token_ids) == 8
        assert names["llm"].stats().kv.in_use == 0
    elif "ends_q" in names:
        assert names["out"].shape == names["q"].grad.shape == (10, 8, 64)
    elif "merged" in names:
        torch.testing.assert_close(names["merged"], names["whole"][0])
    elif "packed" in names:
        torch.testing.assert_close(names["h"], names["same"])
        assert names["y"].shape == (5, 64)
        assert names["error"] < 0.05
    elif "experts" in names:
        assert names["out"].shape == (6, 8)
        torch.testing.assert_close(names["out"][0], names["experts"][0] @ names["rows"][0])
    elif "stream" in names:
        assert names["stream"].equal(names["x"] + names["residual"])
        assert names["q"].shape == (5, 2, 64)
    elif "drawn" in names:
        assert names["drawn"].token_ids[0] == names["ids"][0, 0]
        assert names["drawn"].token_ids.shape == (3,)
        assert names["likeliest"].shape == (3, 5)
    elif "lam" in names:
        assert names["lam"].grad.shape == (8,)
        assert names["second_version"].shape == names["out"].shape == (1, 50, 8, 64)
    elif "batch" in names:
        assert names["out"].shape == names["again"].shape == names["q"].shape
        assert names["out"].isfinite().all()
        assert names["again"].equal(names["out"])
    else:
        assert names["out"].shape == (1, 200, 8, 32)


def anchors(page: Path) -> set[str]:
    """Of its headings, as they are linked to."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-") for text in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)]+)\)", page.read_text()):
        if link.startswith("https://"):
            continue
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        assert target.is_file(), link
        if anchor:
            assert anchor in anchors(target), link


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_named_files_exist(page: Path) -> None:
    named = re.findall(r"`([\w./-]*\w\.(?:py|md|jsonl?|png|cpp|h|sh))`", page.read_text())
    for name in set(named) - NAMES_OF_OTHERS:
        assert any(f"/{path}".endswith(f"/{name}") for path in FILES), name


def listed(page: Path) -> list[str]:
    """The lines of its listings that call rooftile, without their comments."""
    listings = re.findall(r"^```\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)
    lines = [line.strip() for listing in listings for line in listing.splitlines()]
    return [re.sub(r"\s+#.*", "", line) for line in lines if line.startswith("rooftile ")]


def mentioned(page: Path) -> list[str]:
    """What it calls rooftile with in running text, often with less than a whole call needs."""
    found = re.findall(r"`(rooftile [^`]*)`", page.read_text())
    return [" ".join(call.split()) for call in found]


def command_of(call: str) -> tuple[Any, list[str]]:
    """The command that a call names, and its arguments."""
    _, *words = shlex.split(call)
    command: Any = typer.main.get_command(app)
    while words and hasattr(command, "commands"):
        command = command.commands[words.pop(0)]
    return command, words


CALLS = [pytest.param(call, id=f"{page.name}: {call}") for page in PAGES for call in listed(page)]


@pytest.mark.parametrize("call", CALLS)
def test_listed_commands_are_understood(call: str) -> None:
    """Every option exists and takes what it is given; nothing runs."""
    command, words = command_of(call)
    command.make_context(call, words)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_mentioned_options_exist(page: Path) -> None:
    for call in mentioned(page):
        if call.startswith("rooftile COMMAND") or "|" in call:
            continue
        command, words = command_of(call)
        known = {name for option in command.params for name in option.opts} | {"--help"}
        assert {word for word in words if word.startswith("-")} <= known, call


def test_the_notebook_lists_all_its_sections() -> None:
    text = (DOCS / "performance.md").read_text()
    contents = text[: text.index("\n## ")]
    for heading in re.findall(r"^##+ (.*)$", text, re.MULTILINE):
        anchor = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        assert f"](#{anchor})" in contents, heading


def test_every_page_is_reached_from_the_readme() -> None:
    text = PAGES[0].read_text()
    for page in PAGES[1:]:
        assert f"(docs/{page.name})" in text, page.name
