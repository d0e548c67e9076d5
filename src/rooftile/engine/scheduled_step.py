"""A step as the scheduler made it, and what its sequences have in common."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

from rooftile.engine.request import Request, Sequence
from rooftile.engine.step import StepInput
from rooftile.kvcache.cache import KVCache


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


def find_shared(plan: ScheduledStep, cache: KVCache) -> None:
    """In a step of one token a sequence, tell the runner how many keys are in pages that several
    sequences name, and put those side by side that begin with the same page.
    """
    group = cache.full_group
    tables = [s.table for s in plan.scheduled if s.table is not None]
    shared = cache.num_shared(tables)
    if group is None or not shared:
        return
    plan.input.shared_keys = shared * cache.page_size
    first = [table.pages[group][0] for table in tables]
    if sum(a != b for a, b in itertools.pairwise(first)) + 1 == len(set(first)):
        return
    order = sorted(range(len(first)), key=first.__getitem__)
    plan.input.entries = [plan.input.entries[i] for i in order]
    plan.scheduled = [plan.scheduled[i] for i in order]
    place = {old: new for new, old in enumerate(order)}
    for sample in plan.input.samples:
        sample.entry = place[sample.entry]
