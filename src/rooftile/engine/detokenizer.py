"""Text of one sequence as its tokens arrive: never half a character, never past a stop string."""

from __future__ import annotations

from collections.abc import Callable, Sequence

REPLACEMENT = "\ufffd"  # what decoders write for bytes that are no whole character (yet)
LONGEST_GARBAGE = (
    64  # tokens in a row that end in no whole character; then they are shown as they are
)


class IncrementalDecoder:
    """Decodes a growing list of tokens, a window at a time.

    Decoding a token alone loses the space before it, and a character may span tokens. So a window
    of already decoded tokens is decoded with and without the new ones, and of the difference an
    incomplete character at the end is kept back.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], context: Sequence[int] = ()) -> None:
        """context: the last tokens before the text (of the prompt), so that spaces come out right."""
        self._decode = decode
        self._tokens = list(context[-6:])
        self._window = 0  # the window starts here
        self._read = len(self._tokens)  # tokens before here are all in the text
        self._shown = 0  # characters of the tokens since then that are in the text, too

    def push(self, token: int) -> str:
        """The text that this token completes: often its own, sometimes none."""
        self._tokens.append(token)
        return self._show(keep_incomplete=len(self._tokens) - self._read < LONGEST_GARBAGE)

    def flush(self) -> str:
        """At the end: what is left, an incomplete character shown as the replacement character."""
        return self._show(keep_incomplete=False)

    def _show(self, keep_incomplete: bool) -> str:
        before = self._decode(self._tokens[self._window : self._read])
        text = self._decode(self._tokens[self._window :])[len(before) :]
        complete = len(text)
        if keep_incomplete:
            # At most the last three bytes, so three replacement characters, can still become one.
            while complete > len(text) - 3 and text[:complete].endswith(REPLACEMENT):
                complete -= 1
        news = text[self._shown : complete]
        if complete == len(text):
            self._window, self._read, self._shown = self._read, len(self._tokens), 0
        else:
            self._shown = max(self._shown, complete)
        return news


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
