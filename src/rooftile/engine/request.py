"""A request and its sequences, as the scheduler sees them: counts, pages, rows."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass, field

from rooftile.engine.beam import BeamSearch
from rooftile.engine.outputs import FinishReason
from rooftile.engine.params import SamplingParams
from rooftile.kvcache.page_table import PageTable


@dataclass(eq=False)
class Sequence:
    """One continuation of a request.

    `token_ids` are the tokens whose values the host knows; `num_pending` more are being computed
    by steps in flight. `num_computed` tokens have their KV written, or will by a step in flight.
    """

    request: Request
    index: int
    token_ids: list[int]
    num_pending: int = 0
    num_computed: int = 0
    table: PageTable | None = None
    row: int | None = None
    row_started: bool = False  # the runner knows this row's sampling state
    stalled_at: int | None = None  # releases of pages that there had been when it found none
    pages_sent: list[list[int]] = field(default_factory=list)  # the runner's copy of the page table
    finish_reason: FinishReason | None = None
    # In beam search: the likeliest next tokens, until every beam has them.
    candidates: tuple[tuple[int, float], ...] | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids) + self.num_pending

    @property
    def num_generated(self) -> int:
        return len(self.token_ids) + self.num_pending - len(self.request.prompt_ids)

    @property
    def output_ids(self) -> list[int]:
        return self.token_ids[self.request.num_prompt_tokens :]

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def has_work(self) -> bool:
        """Whether a step can take it further now."""
        if self.finish_reason is not None or self.candidates is not None:
            return False
        request, pending = self.request, self.num_pending
        if pending and request.needs_values:
            return False
        # The last new token is returned without being computed; a prompt always is.
        computed = self.num_computed
        most = len(request.prompt_ids) + max(request.max_new_tokens - 1, 0)
        return computed < len(self.token_ids) + pending and computed < most


@dataclass(eq=False)
class Request:
    request_id: str
    arrival_index: int
    prompt_ids: list[int]
    params: SamplingParams
    seed: int
    max_new_tokens: int
    stop_token_ids: frozenset[int]
    cache_root: Hashable
    sequences: list[Sequence] = field(init=False)
    forked: bool = False  # the prompt was computed, and every sequence has gone its own way
    suspect: bool = False  # was in a failed step; runs alone until a step succeeds
    num_cached_tokens: int | None = None
    scheduled: float | None = None  # when it was first admitted, on a monotonic clock
    beam: BeamSearch | None = None
    spare_rows: list[int] = field(default_factory=list)  # for beams that are yet to come
    # Prompt tokens before `score_next` need no log-probability (any more).
    score_next: int = 1
    # The prompt's tokens without a continuation that is to be scored; 0: all of them.
    context_len: int = 0

    def __post_init__(self) -> None:
        self.sequences = [Sequence(self, i, list(self.prompt_ids)) for i in range(self.params.n)]

    @property
    def needs_values(self) -> bool:
        return self.beam is not None or self.params.needs_values

    @property
    def scores_prompt(self) -> bool:
        """Whether log-probabilities of prompt tokens are still to be computed."""
        return self.params.prompt_logprobs is not None and self.score_next < self.num_prompt_tokens

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_ids)

    @property
    def finished(self) -> bool:
        return all(sequence.finished for sequence in self.sequences)

    @property
    def schedulable(self) -> list[Sequence]:
        """Until the prompt is computed the first sequence stands for all of them."""
        sequences = [sequence for sequence in self.sequences if sequence.has_work]
        return sequences if self.forked else sequences[:1]


def insert_by_arrival(queue: OrderedDict[Request, None], request: Request) -> None:
    """Into its place; the others are in order already."""
    later = [other for other in queue if other.arrival_index > request.arrival_index]
    queue[request] = None
    for other in later:
        queue.move_to_end(other)
