"""Recorded times of many plans of matrix products, and what choosing among them by prediction loses.

A row of such a file (benchmarks/results/*/gemm_plans.jsonl) has a run, a case (m x n x k, bf16, weights
stored [n, k]), microseconds of the vendor's library, and of plans by their names:

    128x256 hybrid       256x256/2 split-k 4       the tile (of two CTAs), the scheme, parts along K
    128x128/2k4          CTAs of a cluster, two by four, that share K
    512x144/4x2 ...      eight CTAs, four below the other and two side by side
    T 256x144/2 ...      of the transposed product, whose result is stored transposed
    ... +                operands were the first to leave the L2 cache
    64x32 tiles          whole tiles of the portable kernel (kernels/triton/gemm_tiles.py)
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from rooftile.planning.hardware import H200
from rooftile.planning.stream_k import (
    Decomposition,
    Product,
    Tiling,
    cluster_k,
    data_parallel,
    hybrid,
    joined_k,
    product_of,
    split_k,
    stream_k,
)
from rooftile.planning.stream_k_choice import FEW_ROWS, least, may_stream
from rooftile.planning.stream_k_cost import (
    clusters,
    counts,
    is_passing,
    row_alignment,
)
from rooftile.planning.stream_k_prices import STEP_BYTES, machinery
from rooftile.planning.tile_cost import is_deep, predict_tiles, suits_tiles
from rooftile.planning.vendor_cost import MARGIN, broken_share, predict_vendor

TILES, PASSING, TURNED = " tiles", " +", "T "
PARTS_AT_ONCE = 7  # the first run whose kernel read more than eight parts at a time
DEEP_TILES = 20  # the first run whose small tiles had rings of six stages
LOADED_BY_ONE = 21  # the first run whose operands one thread loads, in a loop of its own
SMALL_US = 20.0  # of products whose launch is much of their time
ITEMSIZE = 2


@dataclass(frozen=True)
class Record:
    """Times of one case in one run. copies: of a launch that copies both operands."""

    run: int
    case: str
    vendor: float
    plans: dict[str, float]
    copies: float | None = None

    @property
    def product(self) -> Product:
        return product_of(self.case)

    @property
    def aligned(self) -> bool:
        """Whether rows of operands and result are multiples of 16 bytes, so that none is copied."""
        return self.product.n % 8 == 0 and self.product.k % 8 == 0

    @property
    def rows(self) -> tuple[int, int]:
        """Alignment of the operands' rows, as `predict` takes it."""
        return (row_alignment(ITEMSIZE * self.product.k),) * 2


@dataclass(frozen=True)
class Replay:
    """What prediction chose among the plans that were timed. Microseconds.

    auto: of the library or the chosen plan, whichever is predicted to take less.
    """

    record: Record
    chosen: str
    chosen_us: float
    best: str
    best_us: float
    auto_us: float

    @property
    def regret(self) -> float:
        """Its time in that of the best plan."""
        return self.chosen_us / self.best_us


def read_records(file: Path) -> list[Record]:
    return [Record(**json.loads(line)) for line in file.read_text().splitlines()]


def level(records: Sequence[Record]) -> list[Record]:
    """The same, but for what launches of a run take more or less than those of others: machines
    differ by more than a microsecond. It is read from what the library takes for small products.
    """
    library: dict[str, list[float]] = {}
    for record in records:
        library.setdefault(record.case, []).append(record.vendor)
    off: dict[int, list[float]] = {}
    for record in records:
        if record.vendor < SMALL_US:
            off.setdefault(record.run, []).append(record.vendor - median(library[record.case]))
    more = {run: median(values) for run, values in off.items()}
    return [
        replace(
            record,
            vendor=record.vendor - more.get(record.run, 0.0),
            plans={name: us - more.get(record.run, 0.0) for name, us in record.plans.items()},
        )
        for record in records
    ]


def current(records: Sequence[Record]) -> list[Record]:
    """Without tiles of an older kernel (before LOADED_BY_ONE), and small ones that have deeper rings since (before
    DEEP_TILES)."""
    found = []
    for record in records:
        if record.run < LOADED_BY_ONE and record.aligned:
            kept = {n: us for n, us in record.plans.items() if n.endswith(TILES)}
            record = replace(record, plans=kept)
        if record.run < DEEP_TILES:
            kept = {n: us for n, us in record.plans.items() if not has_deep_ring(record, n)}
            record = replace(record, plans=kept)
        found.append(record)
    return found


def has_deep_ring(record: Record, name: str) -> bool:
    """Whether these are small tiles whose ring has six stages, four before run DEEP_TILES. Those of 128 rows had four
    until run 25: of 26 times of runs 20 to 24 this is not true, as fits take them."""
    if not name.endswith(TILES):
        return False
    block_m, block_n = map(int, name.removesuffix(TILES).split("x"))
    unit = math.gcd(record.product.k, 8)
    return is_deep(record.product, block_m, block_n, unit, H200.units)


def pooled(records: Iterable[Record]) -> list[Record]:
    """One record for each case, with the times of all its runs, each run on the scale of the others:
    runs differ by the clock and memory of the machine that they had. The scale is that of the plans
    that several runs timed, and of the library (by 4% at most, since it takes other kernels at times).
    """
    by_case: dict[str, list[Record]] = {}
    for record in records:
        by_case.setdefault(record.case, []).append(record)
    return [_pooled(runs) for runs in by_case.values()]


def _pooled(runs: list[Record]) -> Record:
    library = median(record.vendor for record in runs)
    first = [min(max(math.log(record.vendor / library), -0.04), 0.04) for record in runs]
    scales = list(first)
    times: dict[str, list[tuple[int, float]]] = {}
    for i, record in enumerate(runs):
        for name, us in record.plans.items():
            times.setdefault(name, []).append((i, math.log(us)))
    common: dict[str, float] = {}
    for _ in range(20):
        common = {
            name: sum(us - scales[i] for i, us in found) / len(found)
            for name, found in times.items()
        }
        for i, record in enumerate(runs):
            shared = [name for name in record.plans if len(times[name]) > 1]
            off = sum(math.log(record.plans[name]) - common[name] for name in shared)
            scales[i] = (off + first[i]) / (len(shared) + 1)
    plans = {name: math.exp(us) for name, us in common.items()}
    return Record(0, runs[0].case, library, plans)


def plan_named(product: Product, name: str, units: int = H200.units) -> Decomposition:
    """The decomposition that a name, but for what follows " +", stands for."""
    if name.startswith(TURNED):
        turned = Product(product.n, product.m, product.k)
        return plan_named(turned, name.removeprefix(TURNED), units)
    shape, *rest = name.removesuffix(PASSING).split()
    tile, _, parts = shape.partition("k")
    block_m, block_n, *ctas = map(int, re.split("[x/]", tile))
    split = int(parts or 1)
    sharers, across = (*ctas, 1, 1)[:2]
    together = sharers * across * split
    tiling = Tiling(block_m, block_n, STEP_BYTES // ITEMSIZE, together, split, across)
    units = clusters(units, together)
    if split > 1:
        return cluster_k(product, tiling, units)
    scheme, *into = rest
    if scheme in ("split-k", "joined-k"):
        cut = split_k if scheme == "split-k" else joined_k
        return cut(product, tiling, units, int(into[0]))
    build = {"data-parallel": data_parallel, "stream-k": stream_k, "hybrid": hybrid}[scheme]
    return build(product, tiling, units)


def name_of(plan: Decomposition, turned: bool, passing: bool) -> str:
    """The name of a plan, of which `plan_named` makes the plan again.

    turned: it is one of the transposed product. passing: operands are the first to leave the L2 cache.
    """
    tiling = plan.tiling
    name = f"{tiling.block_m}x{tiling.block_n}"
    if tiling.across > 1:
        name += f"/{tiling.sharers}x{tiling.across}"
    elif tiling.sharers > 1:
        name += f"/{tiling.sharers}"
    name += f"k{tiling.split}" if tiling.split > 1 else f" {plan.scheme}"
    if plan.scheme in ("split-k", "joined-k"):
        name += f" {plan.group_ctas}"
    return TURNED * turned + name + PASSING * passing


def is_choosable(record: Record, name: str, plan: Decomposition) -> bool:
    """Whether the planner would consider it: in the flavour that it would run it in, or in the other
    where only that was timed (never operands that pass where they should not).
    """
    if plan.scheme == "stream-k" and not may_stream(record.product):
        return False
    passes = is_passing(plan, ITEMSIZE, record.rows)
    if name.endswith(PASSING):
        return passes
    return not passes or name + PASSING not in record.plans


Predict = Callable[[Record, Decomposition, bool], float]


def _predicted(record: Record, plan: Decomposition, passing: bool) -> float:
    known, turned = machinery(H200), plan.product != record.product
    found = counts(plan, H200, ITEMSIZE, record.rows, passing, turned)
    return known.prices.seconds(found, known.pace_of(plan.tiling))


def replay(records: Iterable[Record], predicted: Predict = _predicted) -> list[Replay]:
    """Chooses again among the plans of each record, by predictions as they are now.

    Products of few rows, which another kernel takes, and those whose rows must be copied are left out.

    predicted: seconds of a plan, whose operands pass or do not.
    """
    found = []
    for record in records:
        product = record.product
        if product.m <= FEW_ROWS or not record.aligned:
            continue
        timed: list[tuple[float, Decomposition]] = []
        names: dict[int, str] = {}
        for name in record.plans:
            if name.endswith(TILES):
                continue
            plan = plan_named(product, name)
            if is_choosable(record, name, plan):
                timed.append((predicted(record, plan, name.endswith(PASSING)), plan))
                names[id(plan)] = name
        if len(timed) < 2:
            continue
        seconds, plan = least(timed)
        chosen = names[id(plan)]
        for name in record.plans:
            if name.endswith(TILES) and suits_tiles(product, 8, H200.units):
                block_m, block_n = map(int, name.removesuffix(TILES).split("x"))
                tiles = predict_tiles(product, block_m, block_n, 8, H200)
                if tiles is not None and tiles < seconds:
                    seconds, chosen = tiles, name
        best = min(record.plans, key=lambda name: record.plans[name])
        broken = broken_share(ITEMSIZE * product.k)
        library = predict_vendor(product, H200, ITEMSIZE, broken)
        ours = library is None or seconds < MARGIN * library
        found.append(
            Replay(
                record,
                *(chosen, record.plans[chosen]),
                *(best, record.plans[best]),
                record.plans[chosen] if ours else record.vendor,
            )
        )
    return found


def mean_of(ratios: Sequence[float]) -> float:
    """Geometric mean."""
    return math.exp(sum(map(math.log, ratios)) / len(ratios)) if ratios else math.nan
