"""When each SM works on what: paged attention without splitting, with equal splits, and planned."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from rooftile.planning.split_kv import plan
from rooftile.planning.split_strips import Strip, strips
from rooftile.types import SplitSpec


@dataclass(frozen=True)
class Busy:
    """An SM at work on one request's keys for one kv head, from start to end in clocks."""

    sm: int
    request: int
    kv_head: int
    start: int
    end: int


@dataclass(frozen=True)
class Timeline:
    """parts: results in partial buffers, which are merged afterwards (not in the clocks)."""

    name: str
    sms: int
    work: tuple[Busy, ...]
    parts: int

    @property
    def clocks(self) -> int:
        return max((busy.end for busy in self.work), default=0)

    @property
    def share_busy(self) -> float:
        total = sum(busy.end - busy.start for busy in self.work)
        return total / (self.sms * self.clocks) if self.clocks else 1.0


def naive(spec: SplitSpec, q_lens: Sequence[int], kv_lens: Sequence[int]) -> Timeline:
    """A CTA for each strip, started in order on whichever SM is free (PagedAttention's first form)."""
    line = strips(spec, q_lens, kv_lens)
    work = _in_order(spec.num_ctas, [(strip, strip.cost) for strip in line])
    return Timeline("a CTA for each request and head", spec.num_ctas, work, 0)


def equal_splits(spec: SplitSpec, q_lens: Sequence[int], kv_lens: Sequence[int]) -> Timeline:
    """Every strip cut into the same number of parts, as many as fill the SMs (Flash-Decoding)."""
    line = strips(spec, q_lens, kv_lens)
    splits = max(1, spec.num_ctas // max(1, len(line)))
    jobs = []
    for strip in line:
        tiles = strip.kv_end - strip.kv_begin
        of_part = max(1, -(-tiles // splits))
        for begin in range(0, max(tiles, 1), of_part):
            part = min(of_part, tiles - begin)
            jobs.append((strip, spec.item_cost + part * strip.tile_cost))
    work = _in_order(spec.num_ctas, jobs)
    parts = len(jobs) if len(jobs) > len(line) else 0
    return Timeline(f"each cut into {splits}", spec.num_ctas, work, parts)


def planned(spec: SplitSpec, q_lens: Sequence[int], kv_lens: Sequence[int]) -> Timeline:
    """The plan of `planning.split_kv`: an equal share of the whole work for every SM."""
    found = plan(spec, q_lens, kv_lens)
    costs = dict(zip(spec.tile_rows, spec.tile_cost, strict=True))
    work, parts = [], 0
    for cta in range(spec.num_ctas):
        clock = 0
        for item in found.of_cta(cta):
            cost = spec.item_cost + (item.kv_end - item.kv_begin) * costs[item.tile_rows]
            work.append(Busy(cta, item.request, item.kv_head, clock, clock + cost))
            clock += cost
            parts += item.partial_row >= 0
    return Timeline("planned", spec.num_ctas, tuple(work), parts)


def _in_order(sms: int, jobs: list[tuple[Strip, int]]) -> tuple[Busy, ...]:
    """Each job on the SM that is free first, in the order of the list, as a GPU starts CTAs."""
    free = [(0, sm) for sm in range(sms)]
    work = []
    for strip, cost in jobs:
        start, sm = heapq.heappop(free)
        work.append(Busy(sm, strip.request, strip.kv_head, start, start + cost))
        heapq.heappush(free, (start + cost, sm))
    return tuple(work)
