"""Text of one sequence as its tokens arrive: never half a character, never past a stop string."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence, Set

REPLACEMENT = "\ufffd"  # what decoders write for bytes that are no whole character (yet)
LONGEST_GARBAGE = (
    64  # tokens in a row that end in no whole character; then they are shown as they are
)
CONTEXT_TOKENS = 6
MOST_PENDING = 3  # bytes that a character may still lack its end with, each of them maybe a token


class IncrementalDecoder:
    """Decodes a growing list of tokens, a window at a time.

    Decoding a token alone loses the space before it, and a character may span tokens. So a window
    of already decoded tokens is decoded with and without the new ones, and of the difference an
    incomplete character at the end is kept back.
    """

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        context: Sequence[int] = (),
        hidden: Set[int] = frozenset(),
    ) -> None:
        """context: the tokens before the text (the prompt's), so that spaces come out right. hidden:
        tokens that `decode` leaves out; a window of nothing else would tell nothing of what precedes.
        """
        self._decode = decode
        self._hidden = hidden
        seen = itertools.islice((t for t in reversed(context) if t not in hidden), CONTEXT_TOKENS)
        self._tokens = list(seen)[::-1]
        self._window = 0  # the window starts here
        self._read = len(self._tokens)  # tokens before here are all in the text
        self._shown = 0  # characters of the tokens since then that are in the text, too
        self._skip_parts_of_characters()
        # What a character that the context begins looks like; once the text ends it, it is the text's.
        self._begun = self._new_text()

    def push(self, token: int) -> str:
        """The text that this token completes: often its own, sometimes none."""
        if token in self._hidden:
            return ""
        self._tokens.append(token)
        return self._show(keep_incomplete=len(self._tokens) - self._read < LONGEST_GARBAGE)

    def flush(self) -> str:
        """At the end: what is left, an incomplete character shown as the replacement character."""
        return self._show(keep_incomplete=False)

    def _show(self, keep_incomplete: bool) -> str:
        text = self._new_text()
        complete = len(text.rstrip(REPLACEMENT) if keep_incomplete else text)
        start = max(self._shown, len(self._begun) if text.startswith(self._begun) else 0)
        news = text[start:complete]
        if complete < len(text):
            self._shown = max(self._shown, complete)
        elif text or len(self._tokens) - self._window > LONGEST_GARBAGE:
            # A window without text would lose the space that begins the next token.
            self._window, self._read = self._read, len(self._tokens)
            self._shown, self._begun = 0, ""
        else:
            self._read = len(self._tokens)
        return news

    def _skip_parts_of_characters(self) -> None:
        """Off both ends of the context, as far as it is whole without them."""
        length = len(self._tokens)
        most = range(min(MOST_PENDING, length) + 1)
        for behind, ahead in itertools.product(most, most if length == CONTEXT_TOKENS else (0,)):
            whole = self._decode(self._tokens[ahead : length - behind])
            if not (whole.startswith(REPLACEMENT) or whole.endswith(REPLACEMENT)):
                self._window, self._read = ahead, length - behind
                return

    def _new_text(self) -> str:
        before = self._decode(self._tokens[self._window : self._read])
        text = self._decode(self._tokens[self._window :])[len(before) :]
        if text.startswith(REPLACEMENT):
            # Byte-fallback decoders give up a whole run of bytes for one that is broken or not yet
            # complete, so what was shown of it counts no more. A byte has no space to lose.
            return self._decode(self._tokens[self._read :])
        return text


class StopStrings:
    """Finds stop strings in a text that grows, and says how much of it is safe to show."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._longest = max(map(len, stops), default=0)

    def find(self, text: str, new_from: int) -> tuple[int, str] | None:
        """The stop string that ends first in text[new_from:]: (where it starts, which one).

        Of several that end at the same place, the longest: so it does not matter in what pieces
        the text arrived.
        """
        found = []
        for stop in self._stops:
            at = text.find(stop, max(0, new_from - len(stop) + 1))
            if at >= 0:
                found.append((at + len(stop), at, stop))
        if not found:
            return None
        _, at, stop = min(found)
        return at, stop

    def safe_length(self, text: str) -> int:
        """How much of `text` no stop string can take back: all but a tail that may begin one."""
        for start in range(max(0, len(text) - self._longest + 1), len(text)):
            if any(stop.startswith(text[start:]) for stop in self._stops):
                return start
        return len(text)
