"""What every CTA of a decomposition does and when, for pictures and for those who want to see why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from rooftile.planning.stream_k import Decomposition, Segment
from rooftile.planning.stream_k_cost import Costs

SpanKind = Literal["compute", "publish", "wait", "fixup"]


@dataclass(frozen=True)
class Span:
    """What a CTA does from `start` to `end`, in seconds."""

    cta: int
    tile: int
    kind: SpanKind
    start: float
    end: float


def timeline(decomposition: Decomposition, costs: Costs) -> list[Span]:
    """What every CTA does and when, all of them starting at 0 on an SM of their own.

    Raises:
        RuntimeError: CTAs that wait for each other, which no decomposition of ours has.
    """
    published: dict[tuple[int, int], float] = {}  # (tile, cta) -> when
    spans: list[Span] = []
    ctas = range(decomposition.num_ctas)
    clocks = [0.0] * len(ctas)
    left = [list(reversed(list(decomposition.segments(cta)))) for cta in ctas]
    waiting = set(ctas)
    while waiting:
        moved = False
        for cta in sorted(waiting):
            while left[cta]:
                done = _run(decomposition, costs, cta, left[cta][-1], clocks[cta], published)
                if done is None:
                    break
                spans += done
                clocks[cta] = done[-1].end
                left[cta].pop()
                moved = True
            if not left[cta]:
                waiting.discard(cta)
        if waiting and not moved:
            raise RuntimeError(f"CTAs {sorted(waiting)} wait for each other")
    return spans


def _run(
    decomposition: Decomposition,
    costs: Costs,
    cta: int,
    segment: Segment,
    clock: float,
    published: dict[tuple[int, int], float],
) -> list[Span] | None:
    """One segment's spans; None while a part that it waits for has no time yet."""
    others: Sequence[int] = ()
    finishes = segment.last == decomposition.iterations
    if finishes:
        others = decomposition.parts.get(segment.tile, (cta,))[:-1]
    if any((segment.tile, other) not in published for other in others):
        return None
    end = clock + costs.setup + costs.iteration * segment.iterations
    spans = [Span(cta, segment.tile, "compute", clock, end)]
    if not finishes:
        spans.append(Span(cta, segment.tile, "publish", end, end + costs.publish))
        published[segment.tile, cta] = end + costs.publish
        return spans
    for other in others:
        ready = published[segment.tile, other]
        if ready > end:
            spans.append(Span(cta, segment.tile, "wait", end, ready))
            end = ready
        spans.append(Span(cta, segment.tile, "fixup", end, end + costs.fixup))
        end += costs.fixup
    return spans
