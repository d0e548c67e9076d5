"""Words that are never generated, as a logits processor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from rooftile.engine.params import LogitsProcessor


@dataclass(frozen=True)
class BadWords:
    """Bans the last token of each word where the tokens before it are the word's others.

    words: token ids of each word, as the tokenizer spells it. then: a processor of the user's own.
    """

    words: tuple[tuple[int, ...], ...]
    then: LogitsProcessor | None = None

    def __call__(self, output_ids: Sequence[int], logits: Tensor) -> Tensor:
        for word in self.words:
            *beginning, last = word
            start = len(output_ids) - len(beginning)
            if start >= 0 and list(output_ids[start:]) == beginning:
                logits[last] = float("-inf")
        return logits if self.then is None else self.then(output_ids, logits)
