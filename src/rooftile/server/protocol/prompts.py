"""The prompt of a completion: a string, strings, token ids, or lists of token ids."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, WithJsonSchema

TEXT = {"type": "string"}
TOKENS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}


def _prompts(value: Any) -> list[str | list[int]]:
    """One entry a prompt. Done by hand: a union's members would each be tried, and named in errors."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise ValueError("a prompt is a string, a list of strings, or (a list of) token ids")
    if not value:
        raise ValueError("the prompt is an empty list; give at least one prompt")
    if all(type(entry) is int for entry in value):
        return [value]
    if all(isinstance(entry, str) for entry in value):
        return value
    if all(isinstance(entry, list) for entry in value):
        if not all(type(token) is int for entry in value for token in entry):
            raise ValueError("a list of prompts has an entry that is not a list of token ids")
        return value
    raise ValueError("a list of prompts holds strings only, token ids only, or lists of token ids")


Prompts = Annotated[
    Any,
    BeforeValidator(_prompts),
    WithJsonSchema(
        {
            "anyOf": [
                TEXT,
                {"type": "array", "items": TEXT, "minItems": 1},
                TOKENS,
                {"type": "array", "items": TOKENS, "minItems": 1},
            ]
        }
    ),
]
