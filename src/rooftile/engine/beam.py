"""Beam search over log-probabilities: which beams go on, which are finished. No pages, no model.

The rule is that of Hugging Face transformers, so that results are the same: of all continuations of
all beams the best (1 + number of end tokens) x width are looked at; those that end, if among the
best `width`, become finished; the best `width` that do not end go on.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from rooftile.engine.params import BeamSearchParams


@dataclass(frozen=True)
class Continuation:
    """A beam's next token, and the sum of log-probabilities of what is generated with it."""

    beam: int
    token: int
    logprob: float


@dataclass(frozen=True)
class Hypothesis:
    """A finished continuation. score: what it is ranked by."""

    token_ids: tuple[int, ...]
    logprob: float
    score: float


class BeamSearch:
    def __init__(
        self, params: BeamSearchParams, end_tokens: Collection[int], max_tokens: int
    ) -> None:
        self._params = params
        self._end_tokens = end_tokens
        self._max_tokens = max_tokens
        self._sums = [0.0]  # of the running beams; at first there is one, the prompt
        self._length = 0  # generated tokens of each running beam
        self._improvable = True
        self._finished: list[Hypothesis] = []

    @property
    def width(self) -> int:
        return self._params.width

    @property
    def n_best(self) -> int:
        return self._params.n_best

    @property
    def candidates_per_beam(self) -> int:
        """How many of a beam's likeliest tokens `advance` needs."""
        return max(2, 1 + len(self._end_tokens)) * self._params.width

    @property
    def _full(self) -> bool:
        return len(self._finished) == self._params.width

    def advance(
        self,
        outputs: Sequence[Sequence[int]],  # of each running beam, its generated tokens
        candidates: Sequence[Sequence[tuple[int, float]]],  # of each, (token, logprob), best first
    ) -> list[Continuation]:
        """The beams of the next step, best first; none when the search has ended."""
        width = self._params.width
        pool = [
            Continuation(beam, token, total + logprob)
            for beam, (total, tokens) in enumerate(zip(self._sums, candidates, strict=True))
            for token, logprob in tokens
        ]
        pool.sort(key=lambda c: (-c.logprob, c.beam, c.token))
        pool = pool[: self.candidates_per_beam]
        self._length += 1
        ended = [c.token in self._end_tokens or self._length == self._max_tokens for c in pool]
        if self._improvable and not (self._params.early_stopping is True and self._full):
            for continuation, ends in list(zip(pool, ended, strict=True))[:width]:
                if ends:
                    tokens = (*outputs[continuation.beam], continuation.token)
                    self._finished.append(self._hypothesis(tokens, continuation.logprob))
            self._finished = _best(self._finished, width)
        running = [c for c, ends in zip(pool, ended, strict=True) if not ends][:width]
        self._sums = [continuation.logprob for continuation in running]
        if running and self._full:
            far = self._params.early_stopping == "never" and self._params.length_penalty > 0
            best = self._score(self._sums[0], self._max_tokens if far else self._length)
            self._improvable &= best > self._finished[-1].score
            if not self._improvable or self._params.early_stopping is True:
                return []
        return running

    def results(self, outputs: Sequence[Sequence[int]] = ()) -> list[Hypothesis]:
        """The n_best hypotheses, best first.

        outputs: of each running beam its generated tokens, where the search is cut short; they
            then count as finished.
        """
        cut = [self._hypothesis(o, s) for o, s in zip(outputs, self._sums, strict=False) if o]
        return _best([*self._finished, *cut], self._params.n_best)

    def _hypothesis(self, token_ids: Sequence[int], logprob: float) -> Hypothesis:
        return Hypothesis(tuple(token_ids), logprob, self._score(logprob, len(token_ids)))

    def _score(self, logprob: float, length: int) -> float:
        return logprob / length**self._params.length_penalty


def _best(hypotheses: Sequence[Hypothesis], count: int) -> list[Hypothesis]:
    return sorted(hypotheses, key=lambda h: -h.score)[:count]  # stable: the earlier one first
