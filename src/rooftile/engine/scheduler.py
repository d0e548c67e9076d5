"""Which tokens run in the next step. Works on counts and never waits for a token's value."""

from __future__ import annotations

import itertools
import time
from collections import OrderedDict
from collections.abc import Hashable

from rooftile.engine.beam import Continuation
from rooftile.engine.outputs import FinishReason
from rooftile.engine.request import Request, Sequence, insert_by_arrival
from rooftile.engine.scheduled_step import ScheduledStep, SharedPrefixes
from rooftile.engine.step import SampleSlot, StepEntry, StepInput
from rooftile.kvcache.cache import KVCache
from rooftile.kvcache.pool import OutOfPages


class Scheduler:
    """First come, first served, over a token budget, without separate prefill and decode phases.

    Out of pages, a sequence takes them from the latest request behind its own, which is preempted
    whole and recomputed later; where there is none, from the last of its own request's samples.
    Where there is none behind it, it stalls until pages come free.
    """

    def __init__(self, cache: KVCache, max_num_batched_tokens: int, max_num_seqs: int) -> None:
        self.cache = cache
        self._shared = SharedPrefixes(cache)
        self.max_num_batched_tokens = max_num_batched_tokens
        self.waiting: OrderedDict[Request, None] = OrderedDict()  # by arrival
        self.running: OrderedDict[Request, None] = OrderedDict()  # by arrival
        self.free_rows = list(range(max_num_seqs - 1, -1, -1))
        self._freed: set[int] = set()  # since the last step, and not taken again
        self.num_preemptions = 0
        self._num_releases = 0

    @property
    def has_unfinished(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, request: Request) -> None:
        self.waiting[request] = None

    # ------------------------------------------------------------------ one step

    def schedule(self, step: int) -> ScheduledStep | None:
        """The next step, or None where nothing can run before something in flight completes."""
        plan = ScheduledStep(StepInput(step))
        if not self._schedule_suspect(plan):
            stalled = False
            for request in list(self.running):
                if plan.num_tokens >= self.max_num_batched_tokens:
                    break
                if request in self.running and not request.suspect:  # not preempted just now
                    stalled |= not self._schedule_request(plan, request)
            if not stalled:
                self._admit_waiting(plan)
        if not plan.scheduled:
            return None
        if 1 < len(plan.scheduled) == plan.num_tokens and not plan.input.scores:
            self._shared.find(plan)
        plan.input.freed = sorted(self._freed)
        self._freed.clear()
        return plan

    def _schedule_suspect(self, plan: ScheduledStep) -> bool:
        """A request from a failed step runs alone, so that a second failure is its own."""
        for request in itertools.chain(list(self.running), list(self.waiting)):
            if request.suspect:
                if request in self.running or self._take_rows(request):
                    self._schedule_request(plan, request)
                return bool(plan.scheduled)
        return False

    def _admit_waiting(self, plan: ScheduledStep) -> None:
        while self.waiting and plan.num_tokens < self.max_num_batched_tokens:
            request = next(iter(self.waiting))
            if request.suspect or not self._take_rows(request):
                return
            if not self._schedule_request(plan, request):
                if request not in (s.request for s in plan.scheduled):
                    self._preempt(request, counted=False)
                return

    def _take_rows(self, request: Request) -> bool:
        """Move a waiting request to the running ones, if its rows and token values are there."""
        sequences = [s for s in request.sequences if not s.finished]
        rows = len(sequences) if request.beam is None else request.beam.width
        if rows > len(self.free_rows) or any(s.num_pending for s in sequences):
            return False
        for sequence in sequences:
            sequence.row = self._take_row()
        request.spare_rows = [self._take_row() for _ in range(rows - len(sequences))]
        del self.waiting[request]
        insert_by_arrival(self.running, request)
        return True

    def _take_row(self) -> int:
        row = self.free_rows.pop()
        self._freed.discard(row)
        return row

    def _schedule_request(self, plan: ScheduledStep, request: Request) -> bool:
        """Schedule what the budget allows; False if some sequence found no pages."""
        enough = True
        for sequence in request.schedulable:
            budget = self.max_num_batched_tokens - plan.num_tokens
            if budget == 0:
                break
            enough &= self._schedule_sequence(plan, sequence, budget)
        return enough

    def _schedule_sequence(self, plan: ScheduledStep, sequence: Sequence, budget: int) -> bool:
        if sequence.row_started and self._schedule_next(plan, sequence):
            return True
        admitted = sequence.table is None
        if admitted:
            # Its last token is only known to a row that goes on; and no page came free since.
            if sequence.num_pending or sequence.stalled_at == self._num_releases:
                return False
            self._admit(sequence)
        elif sequence.num_tokens - sequence.num_computed > 1 and not sequence.request.scores_prompt:
            self._adopt_published(sequence)
        table = sequence.table
        assert table is not None
        first = sequence.num_computed
        end = min(sequence.num_tokens, first + budget)
        write_from = table.num_tokens
        # What a step in flight still reads may be given back: steps run in order, so whoever gets
        # the page writes it afterwards.
        self.cache.trim(table, first)
        while True:
            try:
                copies = self.cache.extend(table, end)
                break
            except OutOfPages:
                if not self._preempt_behind(sequence):
                    if admitted:  # it holds shared pages only; others may need them
                        self._park(sequence)
                    return False
        plan.input.copies += copies
        self.cache.publish(table, sequence.token_ids, plan.input.step)
        known = sequence.token_ids[first:end]
        unknown = [-1] * (end - first - len(known))
        plan.start_row(sequence)
        plan.send_pages(sequence)
        assert sequence.row is not None
        request = sequence.request
        prompt_len = request.context_len or request.num_prompt_tokens
        plan.input.entries.append(
            StepEntry(sequence.row, first, known + unknown, write_from, prompt_len)
        )
        plan.scheduled.append(sequence)
        plan.num_tokens += end - first
        sequence.num_computed = end
        if sequence.request.scores_prompt:
            plan.score(sequence.request, first, end)
        if end == sequence.num_tokens and sequence.request.max_new_tokens:
            self._sample(plan, sequence)
        return True

    def _schedule_next(self, plan: ScheduledStep, sequence: Sequence) -> bool:
        """The next token alone, in a page that is there: most of what a busy engine schedules. False,
        and nothing has changed, where there is more to do.
        """
        request, first, table = sequence.request, sequence.num_computed, sequence.table
        token_ids = sequence.token_ids
        if (
            table is None
            or table.num_tokens != first
            or len(token_ids) + sequence.num_pending != first + 1
            or request.params.prompt_logprobs is not None
            or not self.cache.grow(table, len(token_ids))
        ):
            return False
        assert sequence.row is not None
        token = token_ids[first] if first < len(token_ids) else -1
        entry = StepEntry(sequence.row, first, [token], first, len(request.prompt_ids))
        plan.input.entries.append(entry)
        plan.scheduled.append(sequence)
        plan.num_tokens += 1
        sequence.num_computed = first + 1
        if request.max_new_tokens:
            self._sample(plan, sequence)
        return True

    def _admit(self, sequence: Sequence) -> None:
        request = sequence.request
        # The logits of what is yet to be scored must be computed, so the cache ends before it.
        readable = max(request.score_next - 1, 0) if request.scores_prompt else None
        own = self._own_root(request)
        root = request.cache_root if own is None else own
        tokens = sequence.token_ids[:readable]
        sequence.table = self.cache.admit(tokens, root, own=own is not None)
        # The last token is always computed, since its logits are needed.
        sequence.num_computed = min(sequence.table.num_tokens, sequence.num_tokens - 1)
        if request.num_cached_tokens is None:
            request.num_cached_tokens = sequence.num_computed
            request.scheduled = time.monotonic()

    def _own_root(self, request: Request) -> Hashable | None:
        """Under which its sequences share pages where no others do: when they are computed again after
        a preemption, they take no more than before.
        """
        if self.cache.prefix_cache or (request.beam is None and len(request.sequences) == 1):
            return None
        return "own", request.arrival_index

    def _adopt_published(self, sequence: Sequence) -> None:
        """In mid-prefill: take over pages that another request has computed meanwhile."""
        table = sequence.table
        assert table is not None
        if table.num_tokens == sequence.num_computed and self.cache.match_more(
            table, sequence.token_ids
        ):
            sequence.num_computed = min(table.num_tokens, sequence.num_tokens - 1)

    def _sample(self, plan: ScheduledStep, sequence: Sequence) -> None:
        request = sequence.request
        entry = len(plan.input.entries) - 1
        targets = [sequence]
        if not request.forked:
            request.forked = True
            siblings = [s for s in request.sequences if s is not sequence and not s.finished]
            targets += siblings
            assert sequence.table is not None
            for sibling in siblings:
                sibling.table = self.cache.fork(sequence.table)
                sibling.num_computed = sequence.num_computed
                plan.start_row(sibling)
                plan.send_pages(sibling)
        for target in targets:
            assert target.row is not None
            plan.input.samples.append(SampleSlot(entry, target.row, target.num_generated))
            plan.sampled.append(target)
            target.num_pending += 1

    # ------------------------------------------------------------------ giving pages back

    def _preempt_behind(self, sequence: Sequence) -> bool:
        """Take pages from the latest of those that came after `sequence`; False if there is none."""
        request = sequence.request
        latest = next(reversed(self.running))
        if latest.arrival_index > request.arrival_index:
            self._preempt(latest)
            return True
        behind = request.sequences[request.sequences.index(sequence) + 1 :]
        for sibling in reversed(behind):
            # Beams go on together or not at all.
            if sibling.table is not None and request.beam is None:
                self._park(sibling)
                self.num_preemptions += 1
                return True
        return False

    def _preempt(self, request: Request, counted: bool = True) -> None:
        for sequence in request.sequences:
            self._release(sequence)
            self._free_row(sequence)
        self._free_spare_rows(request)
        del self.running[request]
        insert_by_arrival(self.waiting, request)
        self.num_preemptions += counted

    def _park(self, sequence: Sequence) -> None:
        """Take its pages, and leave it without until others give some back."""
        releases = self._num_releases
        self._release(sequence)
        sequence.stalled_at = self._num_releases = releases  # what it had is spoken for

    def _release(self, sequence: Sequence) -> None:
        self._num_releases += 1
        if sequence.table is not None:
            self.cache.release(sequence.table)
            sequence.table = None
        sequence.num_computed = 0
        sequence.pages_sent = []

    def _free_row(self, sequence: Sequence) -> None:
        if sequence.row is not None:
            self.free_rows.append(sequence.row)
            self._freed.add(sequence.row)
            sequence.row = None
        sequence.row_started = False

    def _free_spare_rows(self, request: Request) -> None:
        self.free_rows += request.spare_rows
        request.spare_rows = []

    def finish(self, sequence: Sequence, reason: FinishReason) -> None:
        """End a sequence and give back all it holds. A step in flight may still compute for it."""
        sequence.finish_reason = reason
        self._release(sequence)
        self._free_row(sequence)
        request = sequence.request
        if request.finished:
            self._free_spare_rows(request)
            self.running.pop(request, None)
            self.waiting.pop(request, None)
            if (own := self._own_root(request)) is not None:
                self.cache.forget(own)

    def fail(self, plan: ScheduledStep) -> list[Request]:
        """A step raised: forget what it computed. Returns the requests to recompute, now suspect."""
        self.cache.rollback(plan.input.step)
        for sequence in plan.sampled:
            sequence.num_pending -= 1
        for request, slot in zip(plan.scored, plan.input.scores, strict=True):
            request.score_next -= len(slot.targets)
        requests = [request for request in plan.requests if not request.finished]
        for request in requests:
            request.suspect = True
            if request in self.running:
                self._preempt(request, counted=False)
        return requests

    def replace_beams(self, request: Request, continuations: list[Continuation]) -> None:
        """The next beams: forks of their parents; a parent's first child takes over all it has."""
        parents = request.sequences
        children: list[Sequence] = []
        taken: set[int] = set()
        kept = {continuation.beam for continuation in continuations}
        for at, parent in enumerate(parents):
            if at not in kept:
                self._release(parent)
                self._return_row(parent)
        # Before any parent grows, so that all children begin from the same tokens.
        for continuation in continuations:
            parent = parents[continuation.beam]
            if continuation.beam in taken:
                children.append(self._fork_beam(parent))
            else:
                taken.add(continuation.beam)
                children.append(parent)
        for index, (child, continuation) in enumerate(zip(children, continuations, strict=True)):
            child.index = index
            child.candidates = None
            child.token_ids.append(continuation.token)
        request.sequences = children

    def _fork_beam(self, parent: Sequence) -> Sequence:
        child = Sequence(parent.request, parent.index, list(parent.token_ids))
        if parent.table is not None:
            child.table = self.cache.fork(parent.table)
            child.num_computed = parent.num_computed
        if parent.row is not None:  # else they all wait, and get their rows with the request's
            child.row = parent.request.spare_rows.pop()
        return child

    def _return_row(self, sequence: Sequence) -> None:
        if sequence.row is not None:
            sequence.request.spare_rows.append(sequence.row)
            sequence.row = None

    def stuck_sequence(self) -> Sequence:
        """With nothing in flight and nothing to schedule: the sequence that can never grow."""
        return next(s for r in (*self.running, *self.waiting) for s in r.schedulable)
