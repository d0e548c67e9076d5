"""What a decomposition of a matrix product costs on a GPU, and of what that consists.

The Stream-K paper (arXiv 2301.03598, appendix A.1) counts steps, segments and parts of the busiest CTA
and gives each a price. So do we, but a step's price follows from what it does:

- the matrix unit multiplies, at the clock that the machine keeps;
- the copy engine asks the L2 cache for the operands' rows in pieces of 128 bytes. One that begins inside
  a line of the cache is two requests, and one that begins inside a sector of a line (32 bytes) costs
  as much again; both hurt the more, the more multiprocessors are at it. CTAs that load columns
  together ask for fewer pieces than they receive;
- CTAs at different places along K ask for lines that no other asks for at that time, and the cache answers
  each by itself. So do, while one tile takes, whole tiles after streamed ones: they begin at any time.

The step takes what takes longest, a little more where others take nearly as long. A launch, the first
stages of the ring, which nothing hides, and what follows the steps (parts of tiles) come on top; reading
memory overlaps the steps. Prices are fitted to measured plans (`stream_k_costs.json`, by
`benchmarks/gemm_costs.py`, which also says what choosing by them loses).
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, fields, replace
from functools import cache
from math import gcd
from pathlib import Path
from typing import NamedTuple

from rooftile.planning.hardware import H200, Machine
from rooftile.planning.stream_k import STREAMED, Decomposition, Product, Tiling
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
LINE_BYTES, SECTOR_BYTES = 128, 32  # of the L2 cache
WHOLE_LINES = (LINE_BYTES, LINE_BYTES)
RING_BYTES = 190_000  # of operands that a CTA has on their way
HOT_FLOPS = 1e12  # of a product that is long enough for the clock to fall as far as it does
STORE_BYTES = 128  # of a result's row, that the copy engine takes at a time
# At 64 rows, 4096 x 14336 took 39.6 microseconds so, and 35.7 with parts that are awaited.
APART_ROWS = 65
FEW_ROWS = 64  # of a tile whose warpgroups share its columns
# Multiprocessors without a CTA of the product. On fewer, not all of the launch that adds parts can wait
# for them where it will run.
EARLY_UNITS = 30
# At 64 rows and less a warp loads weights before the kernels ahead have ended; below 6 MB nothing was
# gained, and more than 150 MB were not measured.
PASSING_ROWS, PASSING_BYTES = 64, (6e6, 150e6)
# Clusters that read each line. Where 7 did operands that pass gained 0% to 4%, where 11 did they lost 5%.
MOST_READERS = 9


@dataclass(frozen=True)
class Costs:
    """Seconds: of a tile's start and epilogue, of one step along K, of writing a part for another
    CTA, and of adding one such part."""

    setup: float
    iteration: float
    publish: float
    fixup: float


class Counts(NamedTuple):
    """What the busiest CTA of a decomposition does, in numbers that have a price each.

    clocks: of the matrix unit in a step. hot: 1 where a product is so long that the clock falls, less
        for shorter ones.
    asked, received: pieces of 128 bytes in a step that it asks the cache for, and that it gets.
    broken, split: of those asked for, that begin inside a line, and inside a sector, times the share
        of the multiprocessors that do so.
    outside: rows of its boxes beyond the matrix.
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
    asked: float
    received: float
    broken: float
    split: float
    outside: float
    alone: float
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
    alone: of such a piece, in the cache.
    late: of a launch whose CTAs find no place before the product has ended.
    """

    launch: float
    first_bandwidth: float
    bandwidth: float
    passing_bandwidth: float
    sharpness: float
    clock: float
    hot: float
    asked: float
    received: float
    broken: float
    split: float
    outside: float
    alone: float
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
        requests = self.asked * of.asked + self.broken * of.broken + self.split * of.split
        return requests + self.outside * of.outside, self.received * of.received

    def step(self, of: Counts, scattered: bool = False) -> float:
        """Seconds."""
        s = self.step_sharpness
        requests, answers = self.loading(of)
        together = of.clocks**s + requests**s + answers**s
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


def clusters(num_sms: int, ctas: int) -> int:
    """Clusters that run at one time. CTAs of one are neighbours, and not every SM finds three or seven:
    on 132 SMs 30 clusters of four ran together, and 15 of eight; 32 of four took two waves.
    """
    return num_sms // ctas if ctas <= 2 else max(num_sms * 23 // (25 * ctas), 1)


def is_apart(decomposition: Decomposition) -> bool:
    """Whether the parts of tiles are stored by themselves and added by another launch, and not by the
    CTAs that finish the tiles: where there are enough rows that few are stored for nothing.
    """
    return decomposition.scheme == "split-k" and decomposition.product.m >= APART_ROWS


def is_passing(
    decomposition: Decomposition, itemsize: int = 2, rows: tuple[int, int] = WHOLE_LINES
) -> bool:
    """Whether operands had better be the first to leave the L2 cache: where CTAs walk along K together,
    each line is needed for a short time only, unless the next step needs its other half, or many need it.

    rows: as for `counts`.
    """
    product, tiling = decomposition.product, decomposition.tiling
    m, n = product.m, product.n
    read = (m + n) * product.k * itemsize
    asked = m * -(-n // tiling.block_n) + n * -(-m // tiling.block_m)
    return (
        decomposition.scheme not in STREAMED
        and rows == WHOLE_LINES
        and m > PASSING_ROWS
        and PASSING_BYTES[0] < read < PASSING_BYTES[1]
        and asked < MOST_READERS * (m + n)
    )


def _multiplying(tiling: Tiling, machine: Machine, itemsize: int) -> float:
    """Clocks of a CTA's matrix unit in a step."""
    flops = 2 * tiling.cta_m * tiling.cta_n * tiling.block_k
    return flops * itemsize / 2 / machine.matrix_flops_per_clock


def counts(
    plan: Decomposition,
    machine: Machine,
    itemsize: int = 2,
    rows: tuple[int, int] = WHOLE_LINES,
    passing: bool = False,
    transposed: bool = False,
) -> Counts:
    """What its busiest CTA does.

    rows: bytes that rows of a and of b are multiples of, a line of the cache at most. transposed: its
        result is stored so.
    """
    product, tiling, most = plan.product, plan.tiling, plan.most
    m, n, k = product.m, product.n, product.k
    sharers, block_m, block_n = tiling.sharers, tiling.cta_m, tiling.cta_n
    ctas, segments = plan.num_ctas * tiling.ctas, most.segments
    of_b = block_n / sharers
    # Boxes of few rows end with them; of others some lie outside, all of a CTA's at the worst.
    box = block_m if m > block_m or tiling.ctas > 1 else max(8, 1 << (m - 1).bit_length())
    tiles_m, tiles_n = -(-m // tiling.block_m), -(-n // tiling.block_n)
    outside_m = min(max(tiles_m * tiling.block_m - m - (block_m - box), 0), box)
    outside_n = min(tiles_n * tiling.block_n - n, block_n) / sharers
    busy = min(ctas / machine.units, 1.0)
    of_a = box / tiling.across
    broken = of_a * busy if rows[0] < LINE_BYTES else 0.0
    split = of_a * busy if rows[0] < SECTOR_BYTES else 0.0
    if rows[1] < LINE_BYTES:
        broken += of_b * busy
        if rows[1] < SECTOR_BYTES:
            split += of_b * busy
    # Two warpgroups share a tile's rows, or its columns where there are no more than 64 rows. Each stores so
    # many columns at a time, and some of them twice where they are no multiple.
    columns = block_n if block_m > FEW_ROWS else block_n // 2
    chunk = min(1 << (columns.bit_length() - 1), STORE_BYTES // 2)
    stored = (
        segments * block_m * block_n / columns * -(-columns // chunk) * chunk / (STORE_BYTES // 2)
    )
    places = gcd(m, block_m) if transposed else gcd(n, block_n)
    steps, exchanged, others = most.steps, 0.0, most.parts - 1
    scattered = most.streamed and min(most.streamed + plan.iterations, most.steps)
    if tiling.split > 1:
        steps = scattered = segments * -(-tiling.iterations(product) // tiling.split)
        exchanged = 4.0 * block_m * block_n * segments
    apart = is_apart(plan)
    flops = 2.0 * m * n * k
    operands = float((m + n) * k * itemsize)
    moved = operands + m * n * itemsize
    return Counts(
        _multiplying(tiling, machine, itemsize),
        min(flops / HOT_FLOPS * itemsize / 2, 1.0),
        of_a + of_b,
        block_m + block_n,
        broken,
        split,
        max(outside_m, outside_n) if segments == 1 else outside_m / tiles_m + outside_n / tiles_n,
        (of_a + of_b) * busy,
        steps,
        scattered,
        stored,
        stored if places * 2 % SECTOR_BYTES else 0.0,
        exchanged,
        float(others > 0 and not apart),
        0.0 if apart else others * block_m * block_n / (128 * 256),
        float(apart),
        plan.group_ctas if apart else 0.0,
        4.0 * m * n * plan.group_ctas if apart else 0.0,
        max(1 - (machine.units - ctas) / EARLY_UNITS, 0.0) if apart else 0.0,
        min(operands, ctas * RING_BYTES),
        moved,
        moved if passing else 0.0,
    )


def predict(
    plan: Decomposition,
    machine: Machine,
    itemsize: int = 2,
    rows: tuple[int, int] = WHOLE_LINES,
    plain: bool = False,
    transposed: bool = False,
) -> float:
    """Seconds, without walking through the CTAs.

    rows, transposed: as for `counts`. plain: operands of two bytes whose contiguous dimension is k, which may pass.
    """
    known = machinery(machine)
    passing = plain and is_passing(plan, itemsize, rows)
    found = counts(plan, machine, itemsize, rows, passing, transposed)
    return known.prices.seconds(found, known.pace_of(plan.tiling))


def least_seconds(product: Product, tiling: Tiling, machine: Machine, itemsize: int = 2) -> float:
    """Seconds that no plan with these tiles goes below: whole tiles in turn, or all multiprocessors busy
    until the end and parts to add."""
    known = machinery(machine)
    prices, tiles = known.prices, tiling.tiles(product)
    iterations, units = tiling.iterations(product), clusters(machine.units, tiling.ctas)
    steps: float = -(-tiles // units) * -(-iterations // tiling.split)
    one = known.pace_of(tiling) * _step_alone(tiling, machine, itemsize)
    stepping = steps * one
    if tiling.split == 1:
        even = tiles * iterations / units * one
        stepping = min(stepping, even + min(prices.apart, prices.published))
    m, n, k = product.m, product.n, product.k
    reading = ((m + n) * k + m * n) * itemsize / prices.passing_bandwidth
    s = prices.sharpness
    return prices.launch + (stepping**s + reading**s) ** (1 / s)


def _step_alone(tiling: Tiling, machine: Machine, itemsize: int) -> float:
    """Seconds of a step, as far as they depend on nothing but the tile."""
    prices = machinery(machine).prices
    received = prices.received * (tiling.cta_m + tiling.cta_n)
    return max(_multiplying(tiling, machine, itemsize), received) / prices.clock


def steps_alone(plan: Decomposition, machine: Machine, itemsize: int = 2) -> float:
    """Seconds that `predict` does not go below, and that are known sooner."""
    known, tiling = machinery(machine), plan.tiling
    steps = plan.most.steps / tiling.split
    one = known.pace_of(tiling) * _step_alone(tiling, machine, itemsize)
    return known.prices.launch + steps * one


def costs_of(plan: Decomposition, machine: Machine) -> Costs:
    """What segments, steps and parts of its CTAs cost, for a timeline."""
    known = machinery(machine)
    found = counts(plan, machine)
    prices = known.prices
    step = prices.step(found, scattered=found.scattered > 0)
    segments = plan.most.segments
    tile = found._replace(
        stored=found.stored / segments, split_stored=0.0, exchanged=found.exchanged / segments
    )
    area = plan.tiling.area / (128 * 256) / plan.tiling.sharers
    return Costs(
        prices.results(tile),
        known.pace_of(plan.tiling) * step,
        prices.published,
        prices.added * area,
    )


def row_alignment(row_bytes: int) -> int:
    """Bytes, up to a line of the cache, that rows of this many bytes begin on multiples of."""
    return math.gcd(row_bytes, LINE_BYTES)


def why(plan: Decomposition, machine: Machine, rows: tuple[int, int] = WHOLE_LINES) -> str:
    """What takes longest of it, in words."""
    prices = machinery(machine).prices
    found = counts(plan, machine, rows=rows)
    requests, answers = prices.loading(found)
    if found.scattered:
        answers = max(answers, prices.alone * found.alone)
    matrix = found.clocks
    stepping = prices.steps(found)
    if prices.reading(found) > stepping:
        return "reading memory binds it"
    if matrix >= max(requests, answers):
        return "the matrix unit binds a step"
    if requests > answers and found.broken:
        return "rows that begin inside cache lines bind a step"
    return "what an SM can load from the L2 cache binds a step"
