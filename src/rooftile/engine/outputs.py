"""What a user gets back: texts, tokens, times, and the engine's counters."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from rooftile.kvcache.stats import KVStats

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True)
class TokenLogprobs:
    """The chosen token's log-probability, and the likeliest tokens (id, log-probability)."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass
class CompletionOutput:
    """One continuation. `token_ids` includes a stop token; `text` never includes a stop."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None  # the stop token id or stop string that ended it
    logprobs: list[TokenLogprobs] | None = None
    cumulative_logprob: float | None = None  # with logprobs, and in beam search
    token_times: list[float] = field(
        default_factory=list
    )  # arrival of each token, as RequestMetrics
    score: float | None = None  # in beam search, what the continuations are ranked by
    error: str | None = None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass
class RequestMetrics:
    """Seconds on a monotonic clock."""

    arrival: float
    scheduled: float | None = None  # when its first step began
    first_token: float | None = None
    finished: float | None = None

    @property
    def time_to_first_token(self) -> float | None:
        return None if self.first_token is None else self.first_token - self.arrival

    @property
    def latency(self) -> float | None:
        return None if self.finished is None else self.finished - self.arrival


@dataclass
class RequestOutput:
    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    metrics: RequestMetrics
    num_cached_tokens: int = 0  # prompt tokens found in the prefix cache
    # With SamplingParams.prompt_logprobs: one a prompt token, None for the first.
    prompt_logprobs: list[TokenLogprobs | None] | None = None

    @property
    def finished(self) -> bool:
        return all(output.finished for output in self.outputs)


@dataclass(frozen=True)
class EngineStats:
    """Counters since the start, and the state now."""

    kv: KVStats
    # Entries of all page tables: the pages that would be in use if sequences shared none.
    page_table_entries: int
    # Capacity of the KV memory in tokens: of the smallest KV group that limits a sequence's length.
    kv_tokens: int
    num_running: int  # requests that own KV pages
    num_waiting: int
    num_steps: int
    num_preemptions: int
    prompt_tokens: int  # of finished and running requests, cached ones included
    generation_tokens: int


@dataclass(frozen=True)
class Score:
    """How likely a continuation is after its context."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]  # of each token, given everything before it
    is_greedy: bool  # every token is the likeliest at its place

    @property
    def logprob(self) -> float:
        return sum(self.logprobs)
