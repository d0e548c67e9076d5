"""What is counted of a decomposition of a matrix product, and the price of each (stream_k_cost.py counts).

Prices are fitted to measured plans (`stream_k_costs.json`, by `benchmarks/gemm_costs.py`, which also says
what choosing by them loses).
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import NamedTuple

from rooftile.planning.hardware import H200, Machine
from rooftile.planning.stream_k import Tiling
from rooftile.planning.tile_width import TOGETHER

# Tiles of a warp-specialised Hopper kernel: two consumer warpgroups, steps of 128 bytes along K.
# With a third number: of so many CTAs, each a part of the rows, which load the columns together.
SHAPES: tuple[tuple[int, ...], ...] = (
    *((128, 256), (256, 128), (128, 128), (64, 256), (64, 128), (64, 64), (64, 32)),
    *((256, 256, 2), (256, 128, 2), (128, 256, 2), (128, 128, 2)),
    *((512, 128, 4), (256, 128, 4)),
)
# Of any width, which is 0 here: rows of a CTA, CTAs one below the other and side by side.
WIDE_SHAPES: tuple[tuple[int, ...], ...] = tuple(
    (rows, 0, *together) for rows, found in TOGETHER.items() for together in found
)
ALL_SHAPES = SHAPES + WIDE_SHAPES
STEP_BYTES = 128


class Counts(NamedTuple):
    """What the busiest CTA of a decomposition does, in numbers that have a price each.

    clocks: of the matrix unit in a step. hot: 1 where a product is so long that the clock falls, less
        for shorter ones.
    received: pieces of 128 bytes that it gets in a step.
    broken, split: of those that it asks for, that begin inside a line, and inside a sector, times the share
        of the multiprocessors that do so.
    outside: rows of its boxes beyond the matrix.
    turns: of a consumer's loop in a step, half where both take steps in turn; waits: of one that has Triton's
        ring.
    steps: along K; scattered: of these, while others are elsewhere along K; alone: pieces that it asks
        for in one of these, times the share of the multiprocessors that do so.
    stored: results in pieces of 128 bytes; split_stored: those that begin inside a sector.
    exchanged: bytes of sums that the CTAs of a cluster exchange.
    published, added: parts of tiles that it writes, and adds, in tiles of 128 x 256.
    apart: 1 where another launch adds the parts; parts of each tile; part_bytes of all of them;
        late: the share of that launch that cannot wait for the parts where it will run.
    first: bytes that all rings hold. moved: bytes of operands and result; passing: of these, where
        operands are the first to leave the cache.
    """

    clocks: float
    hot: float
    received: float
    broken: float
    split: float
    outside: float
    alone: float
    turns: float
    waits: float
    steps: float
    scattered: float
    stored: float
    split_stored: float
    exchanged: float
    published: float
    added: float
    apart: float
    parts: float
    part_bytes: float
    late: float
    first: float
    moved: float
    passing: float


@dataclass(frozen=True)
class Prices:
    """Of a machine. Seconds, bytes a second, and, where they are of a piece or a row, clocks.

    step_sharpness, sharpness: how well units of a step, and steps and reading, overlap: a and b take
        (a^s + b^s)^(1/s).
    hot: share that steps take longer. broken, split, outside: what such a piece or row costs more.
    alone: of such a piece, in the cache. loop: of a consumer's turn, whatever it multiplies; ring:
        the same with Triton's ring.
    late: of a launch whose CTAs find no place before the product has ended.
    """

    launch: float
    first_bandwidth: float
    bandwidth: float
    passing_bandwidth: float
    sharpness: float
    clock: float
    hot: float
    received: float
    broken: float
    split: float
    outside: float
    alone: float
    loop: float
    ring: float
    step_sharpness: float
    stored: float
    split_stored: float
    exchange_bandwidth: float
    published: float
    added: float
    apart: float
    part: float
    part_bandwidth: float
    late: float

    # These are arithmetic only, so that a fit can pass arrays.

    def loading(self, of: Counts) -> tuple[float, float]:
        """Clocks of a step that a CTA's requests take, and their answers."""
        requests = self.broken * of.broken + self.split * of.split
        return requests + self.outside * of.outside, self.received * of.received

    def step(self, of: Counts, scattered: bool = False) -> float:
        """Seconds."""
        s = self.step_sharpness
        requests, answers = self.loading(of)
        together = (
            of.clocks**s
            + requests**s
            + answers**s
            + (self.loop * of.turns + self.ring * of.waits) ** s
        )
        if scattered:
            together = together + (self.alone * of.alone) ** s
        return together ** (1 / s) * (1 + self.hot * of.hot) / self.clock

    def results(self, of: Counts) -> float:
        """Seconds in which a CTA stores them, and exchanges sums before that."""
        storing = self.stored * of.stored + self.split_stored * of.split_stored
        return storing / self.clock + of.exchanged / self.exchange_bandwidth

    def adding(self, of: Counts) -> float:
        """Seconds that parts of tiles take after the steps, whoever adds them."""
        waited = self.published * of.published + self.added * of.added
        apart = self.apart + self.late * of.late + self.part * of.parts
        return waited + of.apart * (apart + of.part_bytes / self.part_bandwidth)

    def reading(self, of: Counts) -> float:
        return (of.moved - of.passing) / self.bandwidth + of.passing / self.passing_bandwidth

    def steps(self, of: Counts) -> float:
        """Seconds of all steps, at pace 1."""
        return self.step(of) * (of.steps - of.scattered) + self.step(of, True) * of.scattered

    def seconds(self, of: Counts, pace: float) -> float:
        """pace: how much longer steps of these tiles take than their counts say."""
        stepping = pace * self.steps(of) + self.results(of)
        s = self.sharpness
        together = (stepping**s + self.reading(of) ** s) ** (1 / s)
        return self.launch + of.first / self.first_bandwidth + together + self.adding(of)


@dataclass(frozen=True)
class Machinery:
    """A machine's prices; pace: see `Prices.seconds`, by the tiles of ALL_SHAPES."""

    prices: Prices
    pace: dict[tuple[int, ...], float]

    def pace_of(self, tiling: Tiling) -> float:
        """1 for tiles that are not offered."""
        return self.pace.get(shape_of(tiling), 1.0)


@cache
def machinery(machine: Machine) -> Machinery:
    """What was measured on this machine; else an H200's costs at its clock and bandwidth."""
    measured = json.loads(Path(__file__).with_name("stream_k_costs.json").read_text())
    row = measured.get(machine.name) or measured[H200.name]
    prices = Prices(**row["prices"])
    if machine.name not in measured:
        faster = machine.bandwidth / H200.bandwidth
        bandwidths = {x.name for x in fields(Prices) if x.name.endswith("bandwidth")}
        scaled = {name: faster * getattr(prices, name) for name in bandwidths}
        prices = replace(prices, clock=prices.clock * machine.clock / H200.clock, **scaled)
    pace = {
        tuple(map(int, name.replace("/", "x").split("x"))): x for name, x in row["pace"].items()
    }
    return Machinery(prices, pace)


def tiling_of(block_m: int, block_n: int, ctas: int = 1, *, itemsize: int) -> Tiling:
    """A tile shape with the steps that the kernel takes along K."""
    return Tiling(block_m, block_n, STEP_BYTES // itemsize, ctas)


def shape_of(tiling: Tiling) -> tuple[int, ...]:
    """The entry of ALL_SHAPES."""
    if tiling.is_wide:
        return (tiling.cta_m, 0, tiling.sharers, tiling.across)
    shape = (tiling.block_m, tiling.block_n)
    return shape if tiling.sharers == 1 else (*shape, tiling.sharers)
