"""When each stage of each block runs: a greedy timetable of a pipeline's units, for pictures."""

from __future__ import annotations

from dataclasses import dataclass

from rooftile.planning.pipeline import Pipeline, Stage

IN_FLIGHT = 2  # blocks that a stream has begun and not finished: the next QK goes before this PV


@dataclass(frozen=True)
class Event:
    """One unit's part of one stage, from start to end in clocks.

    stream: which part of the tile's rows (a warpgroup, a tile of two), all taken through all blocks.
    """

    stage: str
    unit: str
    block: int
    stream: int
    start: float
    end: float


def timetable(line: Pipeline, blocks: int, streams: int) -> list[Event]:
    """`blocks` blocks through all stages, each stream with its share of the work of every stage.

    A unit does one thing at a time and takes what can start first, older blocks before younger;
    copies serve all streams and run ahead by the tile's stages.
    """
    copy, *rest = line.stages
    free: dict[str, float] = {}
    events: list[Event] = []
    copied: list[float] = []  # end of each block's copy
    done: dict[tuple[int, int, int], float] = {}  # stream, block, stage -> end
    next_stage = {(stream, block): 0 for stream in range(streams) for block in range(blocks)}

    def units_of(stage: Stage) -> dict[str, float]:
        if line.core.overlap or stage is copy:
            return stage.clocks
        return {"core": stage.length(line.core)}

    def place(stage: Stage, block: int, stream: int, earliest: float, share: float) -> float:
        units = units_of(stage)
        start = max(earliest, *(free.get(unit, 0.0) for unit in units))
        for unit, clocks in units.items():
            free[unit] = start + clocks * share
            events.append(Event(stage.name, unit, block, stream, start, free[unit]))
        return start + stage.length(line.core) * share

    def finished(block: int) -> float | None:
        ends = [done.get((stream, block, len(rest) - 1)) for stream in range(streams)]
        return None if None in ends else max(end for end in ends if end is not None)

    def earliest(stream: int, block: int) -> float | None:
        """When this block's next stage has what it needs; None: not foreseeable yet."""
        stage = next_stage[stream, block]
        needs = [copied[block] if block < len(copied) else None]
        if stage:
            needs.append(done[stream, block, stage - 1])
        if block:
            needs.append(done.get((stream, block - 1, stage)))
        if block >= IN_FLIGHT:
            needs.append(done.get((stream, block - IN_FLIGHT, len(rest) - 1)))
        return None if None in needs else max(need for need in needs if need is not None)

    while next_stage:
        while len(copied) < blocks:
            before = len(copied) - line.tile.stages
            room = 0.0 if before < 0 else finished(before)
            if room is None:
                break
            copied.append(place(copy, len(copied), 0, room, 1.0))
        found = []
        for (stream, block), stage in next_stage.items():
            when = earliest(stream, block)
            if when is not None:
                start = max(when, *(free.get(unit, 0.0) for unit in units_of(rest[stage])))
                found.append((start, block, -stage, stream))
        _, block, stage, stream = min(found)
        stage = -stage
        when = earliest(stream, block) or 0.0
        done[stream, block, stage] = place(rest[stage], block, stream, when, 1 / streams)
        if stage + 1 < len(rest):
            next_stage[stream, block] = stage + 1
        else:
            del next_stage[stream, block]
    return events
