"""The words of a case's name, such as those of `b4 s4096 h32/8 d128 causal`."""

from __future__ import annotations

import re
from collections.abc import Mapping

LARGEST = 1 << 24  # of any number in a name: models walk over what it counts


def words_of(text: str, forms: Mapping[str, str], example: str) -> dict[str, re.Match[str]]:
    """Each word's match under the key of the form that it has.

    Raises:
        ValueError: a word that has no form, is given twice, or holds a number beyond `LARGEST`.
    """
    shown = f"case {text!r:.80}"
    found: dict[str, re.Match[str]] = {}
    for word in text.split():
        matches = {key: re.fullmatch(form, word, re.ASCII) for key, form in forms.items()}
        key, match = next(((k, m) for k, m in matches.items() if m), ("", None))
        if match is None:
            raise ValueError(f"{shown}: {word!r:.40} is not understood; write {example!r}")
        if key in found:
            raise ValueError(f"{shown} says {word!r:.40} after {found[key][0]!r:.40}; give one")
        check_numbers(word, shown)
        found[key] = match
    return found


def check_numbers(word: str, shown: str) -> None:
    """Raises ValueError for a number beyond `LARGEST`; `shown`: what it stands in."""
    for digits, kilo in re.findall(r"(\d+)(k?)", word):
        digits = digits.lstrip("0")
        if len(digits) > 8 or int(digits or 0) * (1024 if kilo else 1) > LARGEST:
            raise ValueError(
                f"{shown}: {word!r:.40} is too large; no number goes beyond {LARGEST:,}"
            )
