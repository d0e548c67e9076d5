"""What a decomposition of a matrix product costs, CTA by CTA, and which one costs least.

The model is that of the Stream-K paper (arXiv 2301.03598, appendix A.1): a CTA takes

    setup (each segment) + iteration * steps + publish (if others finish its tile)
        + fixup * (parts it adds)

and in addition it waits for parts that are not published yet. The four costs are measured for each
tile shape (`stream_k_costs.json`, fitted by `benchmarks/gemm_costs.py`), or come from the data sheet
of a machine that was not measured.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Literal

from rooftile.planning.hardware import Machine
from rooftile.planning.roofline import linear_work
from rooftile.planning.stream_k import (
    Decomposition,
    Product,
    Scheme,
    Segment,
    Tiling,
    cluster_k,
    data_parallel,
    hybrid,
    split_k,
    stream_k,
)

# Tiles of a warp-specialised Hopper kernel: two consumer warpgroups, steps of 128 bytes along K.
# With a third number: of so many CTAs, each a part of the rows, which load the columns together.
SHAPES: tuple[tuple[int, ...], ...] = (
    *((128, 256), (256, 128), (128, 128), (64, 256), (64, 128), (64, 64), (64, 32)),
    *((256, 256, 2), (256, 128, 2), (128, 256, 2), (128, 128, 2)),
)
STEP_BYTES = 128
LINE_BYTES = 128  # of the L2 cache
L2_BYTES_PER_CLOCK = 64  # of one SM: what operands and partial tiles pass through
SETUP_SECONDS = 1.5e-6  # of a segment: fill of the pipeline and epilogue
LAUNCH_SECONDS = 4.5e-6
MATRIX_SHARE = 0.85  # of the data sheet's rate, at the clock that a full machine keeps
# At 64 rows, 4096 x 14336 took 39.6 microseconds so, and 35.7 with parts that are awaited.
APART_ROWS = 65
APART_BANDWIDTH = 5.0e12  # of parts that are written, and read by another launch
APART_SECONDS = 2.0e-6
EXCHANGE_SECONDS, EXCHANGE_BANDWIDTH = 1.0e-6, 6e10
APART_TOGETHER, APART_ROUND = 8, 0.6e-6  # parts that are read at a time, and how long that takes
# At 64 rows and less a warp loads weights before the kernels ahead have ended; below 6 MB nothing was
# gained, and more than 150 MB were not measured.
PASSING_ROWS, PASSING_BYTES = 64, (6e6, 150e6)
STREAMED: tuple[Scheme, ...] = ("stream-k", "hybrid")
# Elements of operands that CTAs at different places along K may share: what the L2 cache does not
# hold is read by each of them (640 x 1280 x 16384 took 64 microseconds so, and 52 split in two).
MOST_STREAMED = 30_000_000
EQUAL = 1.01  # predictions are not better than this
SPLITS = (2, 3, 4, 6, 8, 12, 16, 24, 32)

SpanKind = Literal["compute", "publish", "wait", "fixup"]


@dataclass(frozen=True)
class Costs:
    """Seconds: of a tile's start and epilogue, of one step along K, of writing a part for another
    CTA, and of adding one such part.

    broken_lines: how much longer a step takes on a full machine where no row of the operands begins
        on a line of the cache: each piece of a row then comes in two.
    """

    setup: float
    iteration: float
    publish: float
    fixup: float
    broken_lines: float = 0.0


@dataclass(frozen=True)
class Span:
    """What a CTA does from `start` to `end`, in seconds."""

    cta: int
    tile: int
    kind: SpanKind
    start: float
    end: float


@dataclass(frozen=True)
class Choice:
    decomposition: Decomposition
    seconds: float
    reason: str


@dataclass(frozen=True)
class Vendor:
    """The vendor's library, as a black box with the same kind of costs as `Machinery`.

    depth: seconds of a step along K that tiles too few for the machine do not hide.
    """

    launch: float
    flops: float
    start: float
    bandwidth: float
    depth: float
    broken_lines: float
    sharpness: float


@dataclass(frozen=True)
class Machinery:
    """A machine's costs. Computing and reading overlap, the better the larger `sharpness` is:

    seconds^sharpness = (launch + CTA's costs)^sharpness + (start + bytes / bandwidth)^sharpness

    streamed: how much longer a step takes where CTAs are at different places along K at one time, so
        that they share less of what the L2 cache holds.
    apart: seconds of a launch that adds parts.
    passing_bandwidth: of operands that are the first to leave the L2 cache (`is_passing`), so that
        what it holds of others need not be written back before.
    exchange, exchange_bandwidth: of the sums of a CTA, where those of a cluster exchange them.
    """

    launch: float
    start: float
    bandwidth: float
    sharpness: float
    streamed: float
    apart: float
    exchange: float
    exchange_bandwidth: float
    passing_bandwidth: float
    costs: dict[tuple[int, ...], Costs]  # by the tiles of SHAPES
    # By the elements of 2 bytes that rows of operands and result consist of: 8, 2 (or 4), 1.
    vendor: dict[int, Vendor] | None = None

    def of(self, tiling: Tiling) -> Costs:
        costs = self.costs[shape_of(tiling)]
        if tiling.split == 1:
            return costs
        sums = 4.0 * tiling.area * tiling.split / tiling.ctas
        exchange = self.exchange + sums / self.exchange_bandwidth
        return replace(
            costs, setup=costs.setup + exchange, iteration=costs.iteration / tiling.split
        )


@cache
def machinery(machine: Machine) -> Machinery:
    """What was measured on this machine, or predictions from its data sheet."""
    measured = json.loads(Path(__file__).with_name("stream_k_costs.json").read_text())
    if machine.name in measured:
        row = measured[machine.name]
        costs = {}
        for shape, values in row.pop("costs").items():
            costs[tuple(map(int, re.split("[x/]", shape)))] = Costs(**values)
        vendor = {int(unit): Vendor(**values) for unit, values in row.pop("vendor").items()}
        return Machinery(**row, vendor=vendor, costs=costs)
    single = [shape for shape in SHAPES if len(shape) == 2]
    costs = {shape: predicted_costs(machine, tiling_of(*shape, itemsize=2)) for shape in single}
    return Machinery(
        *(LAUNCH_SECONDS, LAUNCH_SECONDS, machine.bandwidth, 4.0, 0.0, APART_SECONDS),
        *(EXCHANGE_SECONDS, EXCHANGE_BANDWIDTH, machine.bandwidth, costs),
    )


def tiling_of(block_m: int, block_n: int, ctas: int = 1, *, itemsize: int) -> Tiling:
    """A tile shape with the steps that the kernel takes along K."""
    return Tiling(block_m, block_n, STEP_BYTES // itemsize, ctas)


def shape_of(tiling: Tiling) -> tuple[int, ...]:
    """The entry of SHAPES."""
    shape, rows = (tiling.block_m, tiling.block_n), tiling.ctas // tiling.split
    return shape if rows == 1 else (*shape, rows)


def clusters(num_sms: int, ctas: int) -> int:
    """Clusters that run at one time: CTAs of one are neighbours, and not every SM finds three or seven
    (32 clusters of four took as long as two waves would on 132 SMs; their places were not counted).
    """
    if ctas <= 2:
        return num_sms // ctas
    return max(num_sms * 3 // (4 * ctas), 1)


def predicted_costs(machine: Machine, tiling: Tiling, itemsize: int = 2) -> Costs:
    """Costs from the machine's data sheet: a step takes as long as its multiplications, or as its
    operands need from the L2 cache, whichever is longer; a part passes through the L2 cache.
    """
    block_m, block_n, block_k = tiling.block_m // tiling.ctas, tiling.block_n, tiling.block_k
    rate = machine.matrix_flops_per_clock * MATRIX_SHARE * 2 / itemsize
    matrix = 2.0 * block_m * block_n * block_k / rate
    operands = (block_m + block_n / tiling.ctas) * block_k * itemsize / L2_BYTES_PER_CLOCK
    part = block_m * block_n * 4 / L2_BYTES_PER_CLOCK / machine.clock
    return Costs(SETUP_SECONDS, max(matrix, operands) / machine.clock, part, part)


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


def is_apart(decomposition: Decomposition) -> bool:
    """Whether the parts of tiles are stored by themselves and added by another launch, and not by the
    CTAs that finish the tiles: where there are enough rows that few are stored for nothing.
    """
    return decomposition.scheme == "split-k" and decomposition.product.m >= APART_ROWS


def is_passing(decomposition: Decomposition, itemsize: int = 2) -> bool:
    """Whether operands had better be the first to leave the L2 cache: where CTAs walk along K together,
    each line is needed for a short time only."""
    product = decomposition.product
    read = (product.m + product.n) * product.k * itemsize
    together = decomposition.scheme not in STREAMED
    return together and product.m > PASSING_ROWS and PASSING_BYTES[0] < read < PASSING_BYTES[1]


def predict(
    decomposition: Decomposition,
    machine: Machine,
    itemsize: int = 2,
    broken: float = 0.0,
    plain: bool = False,
) -> float:
    """Seconds, without walking through the CTAs.

    broken: share of the operands' rows that do not begin on cache lines (`broken_share`).
    plain: operands of two bytes whose contiguous dimension is k, which may pass (`is_passing`).
    """
    known = machinery(machine)
    tiling = decomposition.tiling
    costs = known.of(tiling)
    others = decomposition.most_parts - 1
    iteration = costs.iteration
    iteration *= (
        1 + costs.broken_lines * broken * decomposition.num_ctas * tiling.ctas / machine.units
    )
    iteration *= 1 + known.streamed * (decomposition.scheme in STREAMED)
    computing = known.launch + iteration * decomposition.most_steps
    computing += costs.setup * decomposition.most_segments
    product = decomposition.product
    if is_apart(decomposition):
        parts = 4.0 * product.m * product.n * decomposition.group_ctas
        rounds = -(-decomposition.group_ctas // APART_TOGETHER)
        computing += known.apart + 2 * parts / APART_BANDWIDTH + rounds * APART_ROUND
    else:
        computing += (costs.publish if others else 0.0) + costs.fixup * others
    moved = linear_work(product.m, product.k, product.n, itemsize).bytes
    passing = plain and is_passing(decomposition, itemsize)
    bandwidth = known.passing_bandwidth if passing else known.bandwidth
    return _overlapped(computing, known.start + moved / bandwidth, known.sharpness)


def broken_share(row_bytes: int) -> float:
    """Of rows of this many bytes, the share that begin inside a cache line."""
    return 1 - math.gcd(row_bytes, LINE_BYTES) / LINE_BYTES


def predict_vendor(
    product: Product,
    machine: Machine,
    itemsize: int = 2,
    broken: float = 0.0,
    row_bytes: int = 16,
) -> float | None:
    """Seconds that the vendor's library takes, `None` where it was not measured.

    row_bytes: the largest power of two, up to 16, of which rows of the operands and of the result are
        multiples.
    """
    known = machinery(machine).vendor
    if known is None:
        return None
    vendor = known[8 if row_bytes >= 16 else 2 if row_bytes >= 4 else 1]
    work = linear_work(product.m, product.k, product.n, itemsize)
    computing = vendor.launch + work.flops / vendor.flops * itemsize / 2
    computing += work.flops / vendor.flops * vendor.broken_lines * broken
    square = Tiling(128, 128, STEP_BYTES // itemsize)
    waves = square.tiles(product) / machine.units
    computing += vendor.depth * square.iterations(product) * math.exp(-waves)
    return _overlapped(computing, vendor.start + work.bytes / vendor.bandwidth, vendor.sharpness)


def _overlapped(computing: float, reading: float, sharpness: float) -> float:
    return float((computing**sharpness + reading**sharpness) ** (1 / sharpness))


def candidates(
    product: Product, num_sms: int, tilings: Iterable[Tiling]
) -> Iterator[Decomposition]:
    """Every scheme of every tiling, those that come out alike left out."""
    all_sms = num_sms
    for tiling in tilings:
        num_sms = clusters(all_sms, tiling.ctas)
        tiles, iterations = tiling.tiles(product), tiling.iterations(product)
        if tiling.split > 1:
            if iterations >= tiling.split:
                yield cluster_k(product, tiling, num_sms)
            continue
        yield data_parallel(product, tiling, num_sms)
        if tiles % num_sms == 0:
            continue  # full waves: nothing to gain
        most = num_sms // tiles
        for split in sorted({*SPLITS, most}):
            if 1 < split <= min(iterations, most):
                yield split_k(product, tiling, num_sms, split)
        if tiles >= num_sms:
            yield hybrid(product, tiling, num_sms)
        elif (product.m + product.n) * product.k < MOST_STREAMED:
            yield stream_k(product, tiling, num_sms)


def schemes(chosen: Decomposition, machine: Machine) -> list[Decomposition]:
    """The schemes with the tiles of the one that was chosen, that one last where others equal it."""
    product, tiling = chosen.product, chosen.tiling
    num_sms = clusters(machine.units, tiling.ctas)
    if tiling.split > 1:
        return [chosen]
    found = [data_parallel(product, tiling, num_sms), stream_k(product, tiling, num_sms)]
    split = min(num_sms // found[0].tiles, found[0].iterations)
    if split > 1:
        found.append(split_k(product, tiling, num_sms, split))
    if found[0].tiles > num_sms:
        found.append(hybrid(product, tiling, num_sms))
    return [plan for plan in found if plan.scheme != chosen.scheme] + [chosen]


def choose(
    product: Product,
    machine: Machine,
    itemsize: int = 2,
    tilings: Iterable[Tiling] | None = None,
    broken: float = 0.0,
    plain: bool = False,
) -> Choice:
    """The decomposition that is predicted to take least, or 1% more with larger tiles.

    tilings: those to choose from, `None` for the kernel's. broken, plain: as for `predict`.
    """
    if tilings is None:
        known = machinery(machine).costs
        tilings = [tiling_of(*shape, itemsize=itemsize) for shape in SHAPES if shape in known]
    timed = [
        (predict(decomposition, machine, itemsize, broken, plain), decomposition)
        for decomposition in candidates(product, machine.units, tilings)
    ]
    least = min(seconds for seconds, _ in timed)
    equal = [pair for pair in timed if pair[0] <= EQUAL * least]
    # Of equal ones the largest tiles, which read operands least often.
    seconds, best = min(equal, key=lambda pair: (-pair[1].tiling.area, pair[0]))
    whole = min(time for time, other in timed if other.scheme == "data-parallel")
    tiles = f"{best.tiles} tiles of {best.tiling} on {machine.units} SMs"
    units = clusters(machine.units, best.tiling.ctas)
    if best.scheme == "data-parallel":
        reason = f"{tiles}: {best.efficiency(units):.0%} of the SMs' steps are used"
    else:
        reason = (
            f"{tiles}: {whole / seconds:.2f}x the speed of whole tiles, which would leave SMs idle"
        )
    return Choice(best, seconds, reason)
