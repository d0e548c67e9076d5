"""One choice of an answer as it grows: what of its text and log-probabilities is new."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rooftile.engine.outputs import CompletionOutput, TokenLogprobs
from rooftile.server.tokens import TokenTexts

LEAST_LOGPROB = -9999.0  # JSON has no infinity


@dataclass(frozen=True)
class Entry:
    """A token with its log-probability (None: of the first token, which nothing predicts)."""

    token_id: int
    logprob: float | None
    top: tuple[tuple[int, float], ...]
    offset: int  # characters of the choice's text before it


@dataclass(frozen=True)
class Echo:
    """A prompt that its choices begin with."""

    text: str
    entries: list[Entry] | None = None


@dataclass(frozen=True)
class News:
    text: str
    entries: list[Entry] | None  # None where the request asked for none
    finish_reason: str | None
    stop_reason: int | str | None


class Offsets:
    """Counts the characters before each token of a text; a character belongs to its last byte."""

    def __init__(self, texts: TokenTexts, start: int = 0, text: str | None = None) -> None:
        """text: what the tokens spell, as far as it is known; decoders of some vocabularies leave
        out the space that a text begins with."""
        self._texts = texts
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._bare = text is not None and not text.startswith(" ")
        self.total = start

    @property
    def end(self) -> int:
        """How long the text is once the last token's last character is whole."""
        pending, _ = self._decoder.getstate()
        return self.total + bool(pending)

    def take(self, token_id: int, hidden: bool) -> int:
        """Where the token begins. hidden: it is not in the text."""
        before = self.total
        if not hidden:
            piece = self._decoder.decode(self._texts.bytes_of(token_id))
            if piece:
                self.total += len(piece) - (self._bare and piece.startswith(" "))
                self._bare = False
        return before


class Choice:
    """Follows a CompletionOutput; `news` tells what came since the last time."""

    def __init__(
        self,
        index: int,
        output: CompletionOutput,
        texts: TokenTexts | None = None,
        hidden: frozenset[int] = frozenset(),
    ) -> None:
        """texts: given where log-probabilities are asked for. hidden: tokens that are not in the
        text."""
        self.index = index
        self._output = output
        self._texts = texts
        self._hidden = hidden
        self._shown = 0
        self._begun = False
        self._finished = False
        self._start = 0  # characters before the output's text (of an echoed prompt)
        self._read = 0  # log-probabilities taken from the output
        self._held: list[Entry] = []  # of tokens whose text is not shown yet
        self._ends: list[int] = []
        self._offsets: Offsets | None = None

    def news(self, echo: Callable[[], Echo] | None = None) -> News | None:
        """What is new, or None. echo: makes what comes before the first news."""
        output = self._output
        if self._finished or not (output.token_ids or output.finished):
            return None
        text, entries = "", None
        if not self._begun:
            self._begun = True
            if echo is not None:
                prompt = echo()
                text, entries = prompt.text, prompt.entries
                self._start = len(text)
        self._finished = output.finished
        text += output.text[self._shown :]
        self._shown = len(output.text)
        if self._texts is not None:
            entries = [*(entries or ()), *self._new_entries(self._texts)]
        if not (text or entries or self._finished):
            return None
        return News(text, entries, output.finish_reason, output.stop_reason)

    def _new_entries(self, texts: TokenTexts) -> list[Entry]:
        """Of the tokens that are shown; a stop string may still take the others back."""
        output = self._output
        if self._offsets is None:
            if not (output.text or self._finished):
                return []
            self._offsets = Offsets(texts, self._start, output.text)
        fresh = (output.logprobs or [])[self._read :]
        self._read += len(fresh)
        for logprobs in fresh:
            offset = self._offsets.take(logprobs.token_id, logprobs.token_id in self._hidden)
            self._held.append(as_entry(logprobs, offset))
            self._ends.append(self._offsets.end)
        end = self._start + len(output.text)
        cut = self._finished and isinstance(output.stop_reason, str)
        if self._finished and not cut:
            count = len(self._held)
        else:  # of a token that the end cuts, the beginning was shown
            count = sum(
                token_end <= end or (cut and entry.offset < end)
                for entry, token_end in zip(self._held, self._ends, strict=True)
            )
        ready, self._held = self._held[:count], self._held[count:]
        del self._ends[:count]
        return ready


def as_entry(logprobs: TokenLogprobs, offset: int) -> Entry:
    """The chosen token has the same number in both places, so that clients can compare them."""
    top, token_id = logprobs.top, logprobs.token_id
    if top and not top[-1][1] >= LEAST_LOGPROB:  # the least likely is the last
        top = tuple((token, max(value, LEAST_LOGPROB)) for token, value in top)
    given = max(logprobs.logprob, LEAST_LOGPROB)
    own = next((value for token, value in top if token == token_id), given)
    return Entry(logprobs.token_id, own, top, offset)


def prompt_entries(
    text: str,
    token_ids: Sequence[int],
    logprobs: Sequence[TokenLogprobs | None],
    texts: TokenTexts,
) -> list[Entry]:
    """One entry a prompt token; special tokens that the text does not spell have no length."""
    offsets = Offsets(texts, text=text)
    entries = []
    for token_id, given in zip(token_ids, logprobs, strict=True):
        hidden = token_id in texts.special_ids and not text.startswith(
            texts.text_of(token_id), offsets.total
        )
        offset = offsets.take(token_id, hidden)
        entries.append(
            Entry(token_id, None, (), offset) if given is None else as_entry(given, offset)
        )
    return entries
