"""Log-probabilities in the two formats of the OpenAI API."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rooftile.server.choices import Entry
from rooftile.server.protocol.chat import ChatLogprobs, TokenLogprob, TopLogprob
from rooftile.server.protocol.completion import CompletionLogprobs
from rooftile.server.tokens import TokenTexts


def completion_logprobs(entries: Sequence[Entry], texts: TokenTexts) -> CompletionLogprobs:
    return CompletionLogprobs(
        tokens=[texts.text_of(entry.token_id) for entry in entries],
        token_logprobs=[entry.logprob for entry in entries],
        top_logprobs=[_by_text(entry, texts) for entry in entries],
        text_offset=[entry.offset for entry in entries],
    )


def _by_text(entry: Entry, texts: TokenTexts) -> dict[str, float] | None:
    """The likeliest tokens and the token itself. Of tokens with equal text the likelier counts."""
    if entry.logprob is None:
        return None
    found: dict[str, float] = {}
    for token_id, logprob in (*entry.top, (entry.token_id, entry.logprob)):
        found.setdefault(texts.text_of(token_id), logprob)
    return found


def chat_logprobs(entries: Sequence[Entry], texts: TokenTexts) -> ChatLogprobs:
    return ChatLogprobs(
        content=[
            TokenLogprob(
                **_token(entry.token_id, entry.logprob or 0.0, texts),
                top_logprobs=[
                    TopLogprob(**_token(token_id, logprob, texts))
                    for token_id, logprob in entry.top
                ],
            )
            for entry in entries
        ]
    )


def _token(token_id: int, logprob: float, texts: TokenTexts) -> dict[str, Any]:
    raw = texts.bytes_of(token_id)
    return {
        "token": texts.text_of(token_id),
        "logprob": logprob,
        "bytes": list(raw) if raw else None,
    }
