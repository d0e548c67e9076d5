"""What the scheduler tells the runner in one step: picklable deltas, the same on every rank."""

from __future__ import annotations

from dataclasses import dataclass, field

from rooftile.engine.outputs import TokenLogprobs
from rooftile.engine.params import SamplingParams
from rooftile.kvcache.page_table import PageCopy


@dataclass(frozen=True)
class RowStart:
    """A sequence takes (or takes again, after preemption) a stable row: its sampling state."""

    row: int
    params: SamplingParams
    seed: int
    sample_index: int
    stop_token_ids: frozenset[int]  # banned until min_tokens are reached
    prompt_ids: tuple[int, ...] = ()  # sent only where penalties count them
    output_ids: tuple[int, ...] = ()  # or a logits processor sees them


@dataclass(slots=True)
class PageUpdate:
    """Entries of one row's page table, from `start` on."""

    group: int
    row: int
    start: int
    pages: list[int]


@dataclass(slots=True)
class StepEntry:
    """The query tokens of one sequence: positions first .. first + len(token_ids) - 1.

    A token id of -1 stands for the row's last sampled token, which only the device knows yet.
    Tokens before position `write_from` already have their KV in shared pages and must not be
    written again. prompt_len: tokens of the sequence's prompt, without a continuation to be scored.
    """

    row: int
    first: int
    token_ids: list[int]
    write_from: int
    prompt_len: int = 0


@dataclass(slots=True)
class SampleSlot:
    """Sample for `row` from the last token of `entries[entry]`; it becomes output number `position`."""

    entry: int
    row: int
    position: int


@dataclass(frozen=True)
class ScoreSlot:
    """Log-probabilities of prompt tokens: targets[i] follows token `start + i` of the entry.

    top: how many of the likeliest tokens to report with each.
    """

    entry: int
    start: int
    targets: list[int]
    top: int


@dataclass
class StepInput:
    step: int
    freed: list[int] = field(default_factory=list)  # rows that no sequence has any more
    starts: list[RowStart] = field(default_factory=list)
    page_updates: list[PageUpdate] = field(default_factory=list)
    copies: list[PageCopy] = field(default_factory=list)  # applied in order, before any write
    entries: list[StepEntry] = field(default_factory=list)
    samples: list[SampleSlot] = field(default_factory=list)
    scores: list[ScoreSlot] = field(default_factory=list)
    # In a step of one token a sequence: keys that need not be read again for others that share them.
    shared_keys: int = 0


@dataclass(frozen=True)
class StepOutput:
    """One token a sample slot; -1 where it could not be sampled, with the reason in `errors`."""

    token_ids: list[int]
    logprobs: list[TokenLogprobs | None]  # where the request asked for them
    errors: dict[int, str] = field(default_factory=dict)  # by sample slot
    prompt_logprobs: list[list[TokenLogprobs]] = field(default_factory=list)  # by score slot
