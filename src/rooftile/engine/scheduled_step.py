"""A step as the scheduler made it, and what its sequences have in common."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

from rooftile.engine.beginnings import common_length
from rooftile.engine.request import Request, Sequence
from rooftile.engine.step import PageUpdate, RowStart, ScoreSlot, StepInput
from rooftile.kvcache.cache import KVCache
from rooftile.kvcache.page_table import PageTable
from rooftile.planning.split_cost import LEAST_SAVED

LEAST_COMMON = 256  # keys that neighbours must have in common to be read once for both


@dataclass
class ScheduledStep:
    """A step's input, and whose it is: one sequence an entry, one a sample slot."""

    input: StepInput
    num_tokens: int = 0  # of all entries: the part of the budget that is spent
    scheduled: list[Sequence] = field(default_factory=list)
    sampled: list[Sequence] = field(default_factory=list)
    scored: list[Request] = field(default_factory=list)  # one a score slot

    @property
    def requests(self) -> list[Request]:
        return list(dict.fromkeys(sequence.request for sequence in self.scheduled))

    def start_row(self, sequence: Sequence) -> None:
        """Tell the runner the sampling state of a sequence whose row does not have it."""
        if sequence.row_started:
            return
        sequence.row_started = True
        request = sequence.request
        assert sequence.row is not None
        params = request.params
        self.input.starts.append(
            RowStart(
                sequence.row,
                params,
                request.seed,
                sequence.index,
                request.stop_token_ids,
                tuple(request.prompt_ids) if params.counts_tokens else (),
                tuple(sequence.output_ids) if params.counts_tokens or params.needs_values else (),
            )
        )

    def send_pages(self, sequence: Sequence) -> None:
        """Send what changed in the page table: new pages, or a last page copied on write."""
        assert sequence.table is not None
        assert sequence.row is not None
        if not sequence.pages_sent:
            sequence.pages_sent = [[] for _ in sequence.table.pages]
        for group, pages in enumerate(sequence.table.pages):
            sent = sequence.pages_sent[group]
            start = len(sent)
            if start and pages[start - 1] != sent[-1]:
                start -= 1
            if start < len(pages):
                sent[start:] = pages[start:]
                update = PageUpdate(group, sequence.row, start, pages[start:])
                self.input.page_updates.append(update)

    def score(self, request: Request, first: int, end: int) -> None:
        """Ask for the log-probabilities of prompt tokens that follow tokens first .. end - 1 of the
        last entry."""
        begin, stop = max(request.score_next, first + 1), min(end + 1, request.num_prompt_tokens)
        if begin >= stop:
            return
        assert request.params.prompt_logprobs is not None
        slot = ScoreSlot(
            entry=len(self.input.entries) - 1,
            start=begin - 1 - first,
            targets=request.prompt_ids[begin:stop],
            top=request.params.prompt_logprobs,
        )
        self.input.scores.append(slot)
        self.scored.append(request)
        request.score_next = stop


class SharedPrefixes:
    """What the sequences of steps of one token each begin with in common.

    Two page tables never have fewer whole pages in common than they once had, so each pair of
    neighbours is compared once.
    """

    def __init__(self, cache: KVCache) -> None:
        self._cache = cache
        self._last: list[PageTable | None] = []  # as scheduled; what follows is theirs
        self._order: list[int] | None = None
        self._keys = 0
        self._common: dict[tuple[PageTable, PageTable], int] = {}

    def find(self, plan: ScheduledStep) -> None:
        """Put those side by side that begin with the same page, and tell the runner how many keys
        need not be read again for each of them.
        """
        tables = [s.table for s in plan.scheduled]
        if tables != self._last:
            self._last = tables
            computed = [s.num_computed for s in plan.scheduled]
            self._order, self._keys = self._compare([t for t in tables if t is not None], computed)
        plan.input.shared_keys = self._keys
        if self._order is None:
            return
        plan.input.entries = [plan.input.entries[i] for i in self._order]
        plan.scheduled = [plan.scheduled[i] for i in self._order]
        place = {old: new for new, old in enumerate(self._order)}
        for sample in plan.input.samples:
            sample.entry = place[sample.entry]

    def _compare(
        self, tables: list[PageTable], computed: list[int]
    ) -> tuple[list[int] | None, int]:
        """The order to run them in, `None` where it is theirs, and the keys spared."""
        group, page_size = self._cache.full_group, self._cache.page_size
        if group is None or self._cache.num_shared(tables) * page_size < LEAST_SAVED:
            return None, 0
        pages = [table.pages[group] for table in tables]
        order = sorted(range(len(pages)), key=lambda i: pages[i][0])
        known, self._common = self._common, {}
        common = [0]
        for i, j in itertools.pairwise(order):
            pair = (tables[i], tables[j])
            count = known.get(pair)
            if count is None:
                # Before the query of either, so neither writes there any more.
                whole = (min(computed[i], computed[j]) - 1) // page_size
                count = common_length(pages[i], pages[j], whole)
            self._common[pair] = count
            common.append(count)
        keys = _spared([count * page_size for count in common])
        return (order if keys and order != sorted(order) else None), keys


def _spared(common: list[int]) -> int:
    """Keys that groups of neighbours need not read again, of the groups where that pays; as
    `ops.find_prefixes` groups them. common: keys of each with the one before it.
    """
    spared, members, shared = 0, 1, 0
    for i, keys in enumerate(common):
        beside = max(common[i - 1] if i else 0, common[i + 1] if i + 1 < len(common) else 0)
        if i and keys >= LEAST_COMMON and 2 * keys >= beside:
            shared = keys if members == 1 else min(shared, keys)
            members += 1
            continue
        spared += _paying((members - 1) * shared)
        members, shared = 1, 0
    return spared + _paying((members - 1) * shared)


def _paying(keys: int) -> int:
    return keys if keys >= LEAST_SAVED else 0
