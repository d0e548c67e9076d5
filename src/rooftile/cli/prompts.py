"""Where the prompts of `rooftile generate` come from."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path

import typer

MARK = "\ufeff"  # with which some programs begin a stream of text


def collect_prompts(arguments: list[str] | None, source: str | None) -> list[str]:
    """Prompts from the arguments and from the file `source` ("-": standard input, line by line).

    With neither, all of standard input is one prompt, unless it is a terminal.
    """
    prompts = list(arguments or ())
    if source == "-":
        prompts += parse_lines(sys.stdin, "standard input")
    elif source is not None:
        with Path(source).open(encoding="utf-8") as lines:
            try:
                prompts += parse_lines(lines, source)
            except UnicodeDecodeError as error:
                raise ValueError(f"{source} is not UTF-8 text: {error}; convert it") from None
    elif not prompts and not sys.stdin.isatty():
        text = sys.stdin.read().removeprefix(MARK).strip("\n")
        prompts += [text] if text else []
    if not prompts:
        raise typer.BadParameter(
            "no prompt: give one or more as arguments, a file with --input, "
            "or text on standard input",
            param_hint="PROMPT",
        )
    return prompts


def parse_lines(lines: Iterable[str], source: str) -> list[str]:
    """One prompt per line; a line that is a JSON object gives its "prompt". Blank lines are skipped."""
    prompts = []
    for number, line in enumerate(lines, start=1):
        line = line.removeprefix(MARK).strip()
        if line:
            prompts.append(_parse_line(line, f"{source}, line {number}"))
    return prompts


def _parse_line(line: str, where: str) -> str:
    if not line.startswith("{"):
        return line
    try:
        value = json.loads(line)
    except json.JSONDecodeError:
        return line  # text that happens to start with a brace
    prompt = value.get("prompt")
    if not isinstance(prompt, str):
        raise ValueError(f'{where}: a JSON line needs "prompt" with a text; it has {line[:80]}')
    return prompt
