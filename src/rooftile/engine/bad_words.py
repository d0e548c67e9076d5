"""Words that are never generated, as a logits processor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rooftile.engine.token_bytes import SPACE

if TYPE_CHECKING:
    from torch import Tensor

    from rooftile.engine.params import LogitsProcessor
    from rooftile.models.tokenizer import Tokenizer


def spellings(words: Sequence[str], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """The tokens of each word: alone, after a space, and within a text."""
    found = []
    for word in words:
        alone, spaced = (
            tuple(tokenizer.encode(text, add_special_tokens=False)) for text in (word, f" {word}")
        )
        found += [alone, spaced]
        first = (tokenizer.id_to_token(alone[0]) or "") if alone else ""
        if first.startswith(SPACE) and not word.startswith((" ", SPACE)):
            # This vocabulary puts a space before every text; a word within one has none.
            token = tokenizer.token_to_id(first[1:])
            if first == SPACE:
                found.append(alone[1:])
            elif token is not None:
                found.append((token, *alone[1:]))
    return tuple(dict.fromkeys(filter(None, found)))


@dataclass(frozen=True)
class BadWords:
    """Bans the last token of each word where the tokens before it are the word's others.

    words: token ids of each word, as the tokenizer spells it. then: a processor of the user's own.
    """

    words: tuple[tuple[int, ...], ...]
    then: LogitsProcessor | None = None

    def __call__(self, output_ids: Sequence[int], logits: Tensor) -> Tensor:
        banned = [
            word[-1]
            for word in self.words
            if len(word) == 1 or tuple(output_ids[1 - len(word) :]) == word[:-1]
        ]
        logits[banned] = float("-inf")
        return logits if self.then is None else self.then(output_ids, logits)
