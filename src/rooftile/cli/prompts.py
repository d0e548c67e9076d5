"""Where the prompts of `rooftile generate` come from."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from rooftile.engine.params import Params
    from rooftile.engine.request_body import RequestBody

MARK = "\ufeff"  # with which some programs begin a stream of text


@dataclass(frozen=True)
class Asked:
    """A prompt or a conversation. line: the JSON object that it was, and name the "id" in it."""

    body: RequestBody
    name: str | int | None = None
    line: dict[str, Any] | None = None

    def with_defaults(self, defaults: Params) -> Asked:
        """The same with other values of the fields that its line leaves out."""
        from rooftile.cli.batch.lines import parse

        if self.line is None:
            return replace(self, body=replace(self.body, params=defaults))
        return replace(self, body=parse(self.line, defaults))

    @property
    def shown(self) -> str:
        """What tells it apart in plain text."""
        if self.body.is_chat:
            return self.body.messages[-1]["content"]
        (prompt,) = self.body.prompts
        return prompt if isinstance(prompt, str) else f"tokens {prompt}"

    def record(self) -> dict[str, Any]:
        """What tells it apart in JSON."""
        named = {} if self.name is None else {"id": self.name}
        if self.body.is_chat:
            return {**named, "messages": list(self.body.messages)}
        return {**named, "prompt": self.body.prompts[0]}


def collect_prompts(
    arguments: list[str] | None, source: str | None, defaults: Params
) -> list[Asked]:
    """Prompts from the arguments and from the file `source` ("-": standard input, line by line).

    With neither, all of standard input is one prompt, unless it is a terminal.
    """
    prompts = [_text(argument, defaults) for argument in arguments or ()]
    if source == "-":
        prompts += parse_lines(sys.stdin, "standard input", defaults)
    elif source is not None:
        with Path(source).open(encoding="utf-8") as lines:
            try:
                prompts += parse_lines(lines, source, defaults)
            except UnicodeDecodeError as error:
                raise ValueError(f"{source} is not UTF-8 text: {error}; convert it") from None
    elif not prompts and not sys.stdin.isatty():
        text = sys.stdin.read().removeprefix(MARK).strip("\n")
        prompts += [_text(text, defaults)] if text else []
    if not prompts:
        raise typer.BadParameter(
            "no prompt: give one or more as arguments, a file with --input, "
            "or text on standard input",
            param_hint="PROMPT",
        )
    return prompts


def parse_lines(lines: Iterable[str], source: str, defaults: Params) -> list[Asked]:
    """One prompt per line; a line that is a JSON object is a request. Blank lines are skipped.

    Raises:
        ValueError: a request with a field that is missing, unknown or out of range, by its line.
    """
    prompts = []
    for number, line in enumerate(lines, start=1):
        line = line.removeprefix(MARK).strip()
        if line:
            try:
                prompts.append(_parse_line(line, defaults))
            except UnicodeDecodeError:
                raise
            except ValueError as error:
                raise ValueError(f"{source}, line {number}: {error}") from None
    return prompts


def _parse_line(line: str, defaults: Params) -> Asked:
    from rooftile.cli.batch.lines import is_openai, parse

    if not line.startswith("{"):
        return _text(line, defaults)
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return _text(line, defaults)  # text that happens to start with a brace
    if is_openai(value):
        raise ValueError("lines of an OpenAI batch are answered in its format: add --output FILE")
    return Asked(parse(value, defaults), value.get("id"), value)


def _text(text: str, defaults: Params) -> Asked:
    from rooftile.engine.request_body import RequestBody

    return Asked(RequestBody(defaults, (text,)))
