"""The pipeline that a tile of attention goes through on one core, in clocks of each unit.

A tile is some query rows of one head; it visits the keys block by block: copy in K and V, multiply
with Q, softmax, multiply with V. Units that overlap are all busy at best, so a block takes as long
as the busiest one, which puts a ceiling on the rate. A model: no latencies, no instruction
beyond those counted, clocks as on the data sheet.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from rooftile.planning.attention_case import AttentionCase
from rooftile.planning.cores import Core
from rooftile.planning.roofline import visible_pairs

# Vector operations for a score: maximum, scale and subtract, exponential, sum, conversion, and one
# for what else the loop does. Our Hopper loop at head dim 64 executes 390 instructions a warp for
# 64 scores of each thread.
OPERATIONS_PER_SCORE = 6


@dataclass(frozen=True)
class Tile:
    """rows of queries by block keys, of 16-bit elements; stages: blocks of K and V in flight."""

    rows: int
    block: int
    stages: int = 2


@dataclass(frozen=True)
class Stage:
    """clocks: unit -> clocks that one block keeps it busy."""

    name: str
    clocks: dict[str, float]

    def length(self, core: Core) -> float:
        """As long as the longest unit, or all of them where one stream does everything."""
        return max(self.clocks.values()) if core.overlap else sum(self.clocks.values())


@dataclass(frozen=True)
class Pipeline:
    """stages: of one block; around: copy in Q and copy out O, once for a tile."""

    core: Core
    tile: Tile
    k_dim: int
    v_dim: int
    stages: tuple[Stage, ...]
    around: tuple[Stage, ...]

    @property
    def busy(self) -> dict[str, float]:
        """Clocks of each unit for one block."""
        total: dict[str, float] = {}
        for stage in self.stages:
            for unit, clocks in stage.clocks.items():
                total[unit] = total.get(unit, 0.0) + clocks
        return total

    @property
    def binds(self) -> str:
        """The busiest unit; on a core that overlaps nothing, still the one that takes longest."""
        busy = self.busy
        return max(busy, key=lambda unit: busy[unit])

    @property
    def block_clocks(self) -> float:
        """Clocks between one block and the next in the steady state."""
        if self.core.overlap:
            return max(self.busy.values())
        compute = sum(c for unit, c in self.busy.items() if not unit.startswith("L2"))
        copies = sum(c for unit, c in self.busy.items() if unit.startswith("L2"))
        return max(compute, copies)

    @property
    def matrix_share(self) -> float:
        """Part of the time that the matrix unit is busy, at best."""
        return self.busy["matrix"] / self.block_clocks

    @property
    def tile_bytes(self) -> int:
        """Memory that Q and the stages of K and V take."""
        q = self.tile.rows * self.k_dim
        return 2 * (q + self.tile.stages * self.tile.block * (self.k_dim + self.v_dim))

    @property
    def accumulator_bytes(self) -> int:
        """float32 scores and outputs of a tile; where cores are split, a product at a time."""
        scores, outputs = self.tile.rows * min(self.tile.block, 128), self.tile.rows * self.v_dim
        return 4 * (max(scores, outputs) if self.core.split else scores + outputs)

    @property
    def fits(self) -> bool:
        """Whether tiles and accumulators have room, and the vector cores for what they work on."""
        split = self.core.split
        exchanged = self.tile.rows * (4 * self.tile.block + 4 * self.v_dim)
        return (
            self.tile_bytes <= self.core.tile_bytes
            and self.accumulator_bytes <= self.core.accumulator_bytes
            and (split is None or exchanged <= split.bytes)
        )

    def tile_clocks(self, blocks: int) -> float:
        """A tile that visits so many blocks: the first fills the pipeline, the last drains it."""
        if blocks == 0:
            return 0.0
        once = sum(stage.length(self.core) for stage in self.stages)
        return (blocks - 1) * self.block_clocks + max(once, self.block_clocks)


def pipeline(core: Core, tile: Tile, k_dim: int, v_dim: int) -> Pipeline:
    """The stages of a tile on a core; dims are those that are multiplied, padding included."""
    machine, rows, block = core.machine, tile.rows, tile.block
    scores = rows * block
    kv_bytes = 2 * block * (k_dim + v_dim)
    qk: dict[str, float] = {"matrix": 2 * scores * k_dim / machine.matrix_flops_per_clock}
    softmax: dict[str, float] = {
        "exp": scores / machine.exps_per_clock,
        "vector": scores * OPERATIONS_PER_SCORE / core.lanes,
    }
    pv: dict[str, float] = {"matrix": 2 * scores * v_dim / machine.matrix_flops_per_clock}
    stages = [Stage("copy in K, V", {"L2 read": kv_bytes / core.read}), Stage("QK", qk)]
    if core.split is None:
        stages += [Stage("softmax", softmax), Stage("PV", pv)]
    else:  # what registers hold elsewhere goes out to L2 and comes back
        outputs = 4 * rows * v_dim
        softmax["vector"] += 2 * rows * v_dim / core.lanes  # rescale, add
        stages += [
            Stage("scores out", {"L2 write": 4 * scores / core.write}),
            Stage("scores in", {"vector read": 4 * scores / core.split.read}),
            Stage("softmax", softmax),
            Stage("weights out", {"vector write": 2 * scores / core.split.write}),
            Stage("weights in", {"L2 read": 2 * scores / core.read}),
            Stage("PV", pv),
            Stage("partial O out", {"L2 write": outputs / core.write}),
            Stage("partial O in", {"vector read": outputs / core.split.read}),
        ]
    around = (
        Stage("copy in Q", {"L2 read": 2 * rows * k_dim / core.read}),
        Stage("copy out O", {"L2 write": 2 * rows * v_dim / core.write}),
    )
    return Pipeline(core, tile, k_dim, v_dim, tuple(stages), around)


@dataclass(frozen=True)
class Ceiling:
    """The least time of a whole call by the model; limits: what could bind -> seconds."""

    seconds: float
    tflops: float
    limits: dict[str, float]
    tiles: int
    blocks: int

    @property
    def binds(self) -> str:
        return max(self.limits, key=lambda name: self.limits[name])


def ceiling(line: Pipeline, case: AttentionCase) -> Ceiling:
    """Tiles of a call spread over all cores, no core idle before the last tile.

    Blocks that a causal mask cuts are computed whole, which the useful rate pays for.
    """
    machine = line.core.machine
    per_tile = [
        blocks
        for q, kv in zip(case.q_lens, case.kv_lens, strict=True)
        for blocks in blocks_of(q, kv, line.tile, case.causal)
    ]
    heads = case.num_q_heads
    total = heads * sum(line.tile_clocks(blocks) for blocks in per_tile)
    longest = line.tile_clocks(max(per_tile, default=0))
    work = case.work()
    limits = {
        line.binds: total / machine.units / machine.clock,
        "longest tile": longest / machine.clock,
        "memory": work.bytes / machine.bandwidth,
    }
    seconds = max(limits.values())
    return Ceiling(
        seconds,
        work.flops / seconds / 1e12 if seconds else 0.0,
        limits,
        heads * len(per_tile),
        heads * sum(per_tile),
    )


def blocks_of(q_len: int, kv_len: int, tile: Tile, causal: bool) -> list[int]:
    """Blocks of keys that each tile of a sequence visits."""
    found = []
    for row0 in range(0, q_len, tile.rows):
        last = min(row0 + tile.rows, q_len) - 1
        seen = max(min(kv_len, last + kv_len - q_len + 1), 0) if causal else kv_len
        found.append(math.ceil(seen / tile.block))
    return found


def wasted(case: AttentionCase, tile: Tile) -> float:
    """Share of the scores computed that no query uses: masked, or beyond the ends."""
    computed = used = 0
    for q, kv in zip(case.q_lens, case.kv_lens, strict=True):
        computed += sum(blocks_of(q, kv, tile, case.causal)) * tile.rows * tile.block
        used += visible_pairs(q, kv) if case.causal else q * kv
    return 1 - used / computed if computed else 0.0


def best_tile(
    core: Core, k_dim: int, v_dim: int, candidates: Iterable[Tile] | None = None
) -> Pipeline:
    """The tile that fits and keeps the matrix unit busiest, the smallest among equals.

    Raises:
        ValueError: no candidate fits.
    """
    tiles = candidates or [
        Tile(rows, block, stages)
        for stages in (2, 1)
        for rows in (64, 128, 192, 256)
        for block in (64, 128, 256, 512)
    ]
    lines = [pipeline(core, tile, k_dim, v_dim) for tile in tiles]
    fitting = [line for line in lines if line.fits]
    if not fitting:
        raise ValueError(f"no tile of head dims {k_dim} and {v_dim} fits a {core.machine.name}")
    return max(
        fitting,
        key=lambda x: (round(x.matrix_share, 3), x.tile.stages, -x.tile.rows * x.tile.block),
    )
