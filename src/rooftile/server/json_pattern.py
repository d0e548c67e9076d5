"""Which regular expressions of a JSON schema are accepted: those whose grammar means what they say.

The backend makes a grammar of a pattern as it stands between the quotes of a string. It writes quotes
and backslashes as they are, where JSON has them as escapes only; it takes look-arounds for nothing, and
so `^` and `$` within; and with characters beyond ASCII it forgets what JSON forbids altogether.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

MAX_CHARACTERS = 200
QUOTED = frozenset('"\\') | {chr(code) for code in range(0x20)}  # in a JSON string escapes only
# What the backend makes of repeats grows with what they stand for; most of all where a group of any
# length is repeated, so that a text can be cut in many ways.
MAX_CUT = 64
CUT_COST = 4  # such a character counts so often
MOST_COUNTED = 100  # of one character that is repeated: more of them cost no more
NARROW, WIDE = "dw", "DWSs"  # escapes of classes: wide ones have characters of `QUOTED`
NEGATED = "dws"  # in capitals, these stand for all others
ESCAPED = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v", "0": "\0"}
CODE = re.compile(r"x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|u\{([0-9a-fA-F]{1,6})\}")
REPEAT = re.compile(r"(?:[*+?]|\{(\d*)(,?)(\d*)\})\??")
GROUP = re.compile(r"\((?:\?:|\?P?<[A-Za-z_]\w*>)?")
SWAPPED = {"(": ")", ")": "("}  # in a pattern read backwards
LOOKS = ("(?=", "(?!", "(?<=", "(?<!")


class Unfollowed(ValueError):
    """What of a pattern the grammar would not have; the message is for the client."""


def check_pattern(pattern: str) -> int:
    """How many characters it stands for, each as often as repeats allow: what it costs to compile.

    Raises:
        Unfollowed: for what would not be followed, or would take too long to compile. What is no
            pattern at all, the backend says.
    """
    if len(pattern) > MAX_CHARACTERS:
        raise Unfollowed(f"has {len(pattern)} characters; at most {MAX_CHARACTERS} are accepted")
    reader = _Reader(pattern)
    reader.read()
    if reader.wide and not pattern.isascii():
        raise Unfollowed(
            "has characters beyond ASCII beside such that JSON escapes, as in `.`; write them as \\u00e9"
        )
    forward, backward = reader.parts, [SWAPPED.get(p, p) for p in reversed(reader.parts)]
    if not (_only_first(forward, "^") and _only_first(backward, "$")):
        raise Unfollowed("has ^ or $ elsewhere than at its ends, which is not supported")
    return sum(reader.sizes) + CUT_COST * reader.cut


def _only_first(parts: list[str], anchor: str) -> bool:
    """Whether the anchor only stands where nothing can come before it."""
    first, groups = True, list[bool]()
    for part in parts:
        if part == "(":
            groups.append(first)
        elif part == ")":
            first = False
            if groups:
                groups.pop()
        elif part == "|":
            first = groups[-1] if groups else True
        elif part == anchor and not first:
            return False
        elif part == "x":
            first = False
    return True


@dataclass
class _Reader:
    """Cuts a pattern into `parts`: "(", ")", "|", "^", "$", and "x" for whatever takes characters.

    A group that repeats has an "x" on either side, inside, since any of its rounds may be the first.
    """

    pattern: str
    at: int = 0
    wide: bool = False  # has a class with characters of `QUOTED`
    parts: list[str] = field(default_factory=list)
    opened: list[int] = field(default_factory=list)  # parts that open groups
    # Of the pattern and each open group: its characters so far, and whether they may be more or fewer.
    sizes: list[int] = field(default_factory=lambda: [0])
    varies: list[bool] = field(default_factory=lambda: [False])
    cut: int = 0  # characters of groups of any length that are repeated

    def read(self) -> None:
        last_group: int | None = None
        last = 1, False  # the size of what a repeat would repeat, and whether it varies
        repeated = True  # nothing that a repeat could follow
        while self.at < len(self.pattern):
            char = self.pattern[self.at]
            if self.pattern.startswith(LOOKS, self.at):
                raise Unfollowed("has a look-around, which is not supported")
            if repeat := REPEAT.match(self.pattern, self.at):
                if repeated or self.parts[-1] not in (")", "x"):
                    raise Unfollowed(f"repeats nothing by {repeat[0]}")
                repeated, self.at = True, repeat.end()
                self._repeat(repeat, *last)
                if last_group is not None:
                    self.parts.insert(last_group + 1, "x")
                    self.parts.insert(len(self.parts) - 1, "x")
                continue
            repeated, last_group = False, None
            if group := GROUP.match(self.pattern, self.at):
                self.at = group.end()
                self.opened.append(len(self.parts))
                self.parts.append("(")
                self.sizes.append(0)
                self.varies.append(False)
            elif char == ")":
                self.at += 1
                self.parts.append(")")
                if self.opened:
                    last_group = self.opened.pop()
                    last = self.sizes.pop(), self.varies.pop()
                    self.sizes[-1] += last[0]
                    self.varies[-1] |= last[1]
            elif char in "|^$":
                self.at += 1
                self.parts.append(char)
            else:
                self._take()
                self.parts.append("x")
                self.sizes[-1] += 1
                last = 1, False

    def _repeat(self, repeat: re.Match[str], size: int, varies: bool) -> None:
        least, comma, most = repeat.groups()
        count = int(most or least or 1) if comma is not None else 1
        if varies and count > 1:
            self.cut += size * count
            if size * count > MAX_CUT:
                raise Unfollowed(
                    f"repeats a group of any length by {repeat[0]}; times its {size} characters, "
                    f"{MAX_CUT} are accepted"
                )
        if size == 1:
            count = min(count, MOST_COUNTED)
        self.sizes[-1] += size * max(count - 1, 0)
        self.varies[-1] |= comma is None or (bool(comma) and least != most)

    def _take(self) -> None:
        char = self.pattern[self.at]
        if char == "[":
            self._take_class()
            return
        self.wide |= char == "."
        found = self._character(in_class=False)
        if found is not None and found in QUOTED:
            raise Unfollowed("has a quote, backslash or control character, which is not supported")

    def _take_class(self) -> None:
        start = self.at
        self.at += 1
        negated = self.pattern.startswith("^", self.at)
        self.at += negated
        if self.pattern.startswith("]", self.at):
            raise Unfollowed("has an empty class [] or [^], which is not supported")
        self.wide |= negated
        plain = negated  # has a character that JSON does not escape
        while self.at < len(self.pattern) and self.pattern[self.at] != "]":
            low = high = self._character(in_class=True)
            if (
                self.pattern.startswith("-", self.at)
                and self.pattern[self.at + 1 : self.at + 2] != "]"
            ):
                self.at += 1
                high = self._character(in_class=True)
            if low is None or high is None:
                plain = True
                continue
            inside = sum(low <= char <= high for char in QUOTED)
            self.wide |= inside > 0
            plain |= inside < ord(high) - ord(low) + 1
        self.at += 1
        text = self.pattern[start : self.at]
        if negated and any(f"\\{c}" in text and f"\\{c.upper()}" in text for c in NEGATED):
            raise Unfollowed("has a class of no characters")
        if not plain:
            raise Unfollowed("has a class of characters that JSON escapes, which is not supported")

    def _character(self, in_class: bool) -> str | None:
        """The next one; None for an escape that is a class."""
        if self.at >= len(self.pattern):
            return None
        char, follows = self.pattern[self.at], self.pattern[self.at + 1 : self.at + 2]
        self.at += 1
        if char != "\\" or not follows:
            return char
        if code := CODE.match(self.pattern, self.at):
            self.at = code.end()
            value = int(code[1] or code[2] or code[3], 16)
            if 0xD800 <= value < 0xE000 or value > 0x10FFFF:
                raise Unfollowed(f"has \\{code[0]}, which is no character")
            return chr(value)
        self.at += 1
        if follows in WIDE or follows in NARROW:
            self.wide |= follows in WIDE
            return None
        if in_class and follows == "b":
            return "\b"
        if follows not in ESCAPED and follows.isalnum():
            raise Unfollowed(f"has the escape \\{follows}, which is not supported")
        return ESCAPED.get(follows, follows)
