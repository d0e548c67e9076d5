"""Prices of matrix products from measured plans, and what choosing by them loses.

python benchmarks/gemm_costs.py regret ROWS.jsonl   # of the costs as they are
python benchmarks/gemm_costs.py fit ROWS.jsonl      # prints stream_k_costs.json and vendor_costs.json
python benchmarks/gemm_costs.py cross ROWS.jsonl    # fits to half of the cases, judges by the others

ROWS.jsonl: as rooftile/bench/ops/gemm_plans.py says. `fit` and `cross` need scipy. A fit looks at how plans
of one case compare, since that decides which is chosen, and less at how long they take in all.
"""

from __future__ import annotations

import json
import math
import random
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

import numpy

from rooftile.bench.ops.gemm import GROUPS
from rooftile.bench.ops.gemm_plans import (
    ITEMSIZE,
    LOADED_BY_ONE,
    PARTS_AT_ONCE,
    PASSING,
    TILES,
    Record,
    Replay,
    current,
    is_choosable,
    level,
    mean_of,
    plan_named,
    pooled,
    read_records,
    replay,
)
from rooftile.planning.hardware import H200
from rooftile.planning.stream_k import Decomposition, product_of
from rooftile.planning.stream_k_cost import counts
from rooftile.planning.stream_k_prices import (
    ALL_SHAPES,
    Counts,
    Prices,
    machinery,
    shape_of,
)
from rooftile.planning.vendor_cost import Vendor, broken_share, predict_vendor, seconds_of

NEAR, FAR = 1.15, 1.5  # of the best: slower plans count less, since none of them will be chosen
LEVEL = 0.4  # weight of how long plans take, against how those of a case compare
STEADY = 0.3  # how much a pace that differs from 1 has to explain
SEEDS = (0, 1, 2)
GUESSED = 0.02  # weight of a guess
VENDOR_GUESSES = {
    8: (4e-6, 700e12, 4e-6, 3.4e12, 0.2e-6, 0.1, 1.5, 3e12, 50),
    2: (9e-6, 160e12, 9e-6, 1.0e12, 0.2e-6, 0.01, 4.0, 3e12, 50),
    1: (4e-6, 150e12, 4e-6, 3.4e12, 0.2e-6, 0.1, 1.5, 3e12, 50),
}

NUM_PRICES = len(fields(Prices))
BEFORE = 1  # loops before LOADED_BY_ONE, of CTAs that load together


@dataclass(frozen=True)
class Timed:
    record: Record
    name: str
    plan: Decomposition
    seconds: float
    weight: float


def timed_plans(records: Sequence[Record]) -> list[Timed]:
    best = {record.case: min(record.plans.values()) for record in pooled(records) if record.plans}
    found = []
    for record in records:
        if not record.aligned:
            continue  # copies come first
        for name, us in record.plans.items():
            if name.endswith(TILES):
                continue
            plan = plan_named(record.product, name)
            slower = us / best[record.case]
            weight = 1.0 if slower < NEAR else 0.6 if slower < FAR else 0.25
            if not is_choosable(record, name, plan):
                weight *= 0.15
            found.append(Timed(record, name, plan, us * 1e-6, weight))
    return found


def place_of(plan: Decomposition) -> int:
    """Of its tiles in ALL_SHAPES; one beyond them for those that have no pace of their own."""
    shape = shape_of(plan.tiling)
    return ALL_SHAPES.index(shape) if shape in ALL_SHAPES else len(ALL_SHAPES)


def counts_of(record: Record, plan: Decomposition, passing: bool) -> Counts:
    turned = plan.product != record.product
    today = passing or record.run == 0 or record.run >= LOADED_BY_ONE  # with a ring of our own
    return counts(plan, H200, ITEMSIZE, record.rows, passing, turned, today)


class Fit:
    """Prices that make the predicted times of plans look like the measured ones."""

    def __init__(self, rows: Sequence[Timed]) -> None:
        self.rows = rows
        found = [counts_of(row.record, row.plan, row.name.endswith(PASSING)) for row in rows]
        self.old_loops = numpy.array([row.record.run < LOADED_BY_ONE for row in rows])
        self.counts = Counts(
            *(numpy.array([one[i] for one in found], float) for i in range(len(Counts._fields)))
        )
        self.shapes = numpy.array([place_of(row.plan) for row in rows])
        self.old_parts = numpy.array([row.record.run < PARTS_AT_ONCE for row in rows])
        self.measured = numpy.log([row.seconds for row in rows])
        cases = {id(row.record): i for i, row in enumerate(rows)}
        self.groups = numpy.array([cases[id(row.record)] for row in rows])
        weights = numpy.array([row.weight for row in rows])
        # Cases count alike, however many plans of them were timed.
        in_all = numpy.bincount(self.groups, weights**2)
        self.weights = 2 * weights / numpy.sqrt(in_all[self.groups])
        known = machinery(H200)
        self.guess = numpy.array(
            [getattr(known.prices, x.name) for x in fields(Prices)]
            + [known.pace.get(shape, 1.0) for shape in ALL_SHAPES]
            + [200.0] * BEFORE
            + [3.0]  # price of a part before PARTS_AT_ONCE, in today's
        )

    def predicted(self, x: numpy.ndarray) -> numpy.ndarray:
        """Seconds of all rows."""
        prices, paces = Prices(*x[:NUM_PRICES]), self.paces(x)
        loops = numpy.where(self.old_loops, x[-2], prices.loop)
        parts = self.counts.parts * numpy.where(self.old_parts, x[-1], 1.0)
        turns = numpy.where(self.old_loops, numpy.ceil(self.counts.turns), self.counts.turns)
        counts = self.counts._replace(parts=parts, turns=turns)
        return replace(prices, loop=loops).seconds(counts, numpy.append(paces, 1.0)[self.shapes])

    @staticmethod
    def paces(x: numpy.ndarray) -> numpy.ndarray:
        """Of ALL_SHAPES."""
        return x[NUM_PRICES : -1 - BEFORE]

    def run(self, cases: Collection[str] | None = None) -> numpy.ndarray:
        """cases: to look at, `None` for all."""
        from scipy.optimize import least_squares

        taken = numpy.array([cases is None or row.record.case in cases for row in self.rows])
        weights, groups = self.weights[taken], self.groups[taken]
        near = weights**2
        in_group = numpy.maximum(numpy.bincount(groups, near, len(self.rows)), 1e-12)

        def off(steps: numpy.ndarray) -> numpy.ndarray:
            x = self.guess * numpy.exp(steps)
            error = (numpy.log(self.predicted(x)) - self.measured)[taken]
            mean = numpy.bincount(groups, near * error, len(self.rows)) / in_group
            paces = numpy.log(self.paces(x))
            return numpy.concatenate(
                [LEVEL * weights * error, weights * (error - mean[groups]), STEADY * 3 * paces]
            )

        start = numpy.zeros_like(self.guess)
        bound = numpy.full_like(start, 2.5)
        found = least_squares(
            off, start, bounds=(-bound, bound), loss="soft_l1", f_scale=0.05, max_nfev=80
        )
        return self.guess * numpy.exp(found.x)

    def predictor(self, x: numpy.ndarray) -> Callable[[Record, Decomposition, bool], float]:
        """For `replay`."""
        prices, paces = Prices(*map(float, x[:NUM_PRICES])), self.paces(x)

        def predicted(record: Record, plan: Decomposition, passing: bool) -> float:
            found = counts_of(record, plan, passing)
            return prices.seconds(found, float(numpy.append(paces, 1.0)[place_of(plan)]))

        return predicted

    def as_data(self, x: numpy.ndarray) -> dict[str, object]:
        values = [float(f"{value:.4g}") for value in x]
        names = ["/".join(["x".join(map(str, s[:2])), *map(str, s[2:])]) for s in ALL_SHAPES]
        prices = dict(zip((x.name for x in fields(Prices)), values, strict=False))
        pace = dict(zip(names, map(float, self.paces(numpy.array(values))), strict=True))
        return {H200.name: {"prices": prices, "pace": pace}}


def fit_vendor(records: Sequence[Record], unit: int) -> Vendor:
    """unit: elements that rows consist of, 8 where the library's fast kernels can take them."""
    from scipy.optimize import least_squares

    known = [x for x in records if unit_of(x) == unit]

    def off(steps: numpy.ndarray) -> list[float]:
        vendor = Vendor(*(numpy.array(VENDOR_GUESSES[unit]) * numpy.exp(steps)))
        # What the times say nothing of stays as it was guessed.
        return [*(GUESSED * steps)] + [
            math.log(
                seconds_of(vendor, x.product, H200, ITEMSIZE, broken_share(2 * x.product.k))
                / (x.vendor * 1e-6)
            )
            for x in known
        ]

    start = numpy.zeros(len(VENDOR_GUESSES[unit]))
    bound = numpy.full_like(start, 4.0)
    found = least_squares(
        off, start, bounds=(-bound, bound), loss="soft_l1", f_scale=0.05, max_nfev=300
    )
    values = numpy.array(VENDOR_GUESSES[unit]) * numpy.exp(found.x)
    return Vendor(*(float(f"{value:.4g}") for value in values))


def unit_of(record: Record) -> int:
    unit = math.gcd(8, record.product.n, record.product.k)
    return 2 if unit == 4 else unit


def say(title: str, found: Sequence[Replay], worst: int = 0) -> None:
    listed = [x for x in found if x.record.case in GROUPS["forward"]]
    for name, part in (("list", listed), ("random", [x for x in found if x not in listed])):
        lost = mean_of([x.regret for x in part]) - 1
        library = mean_of([x.record.vendor / x.chosen_us for x in part])
        best = mean_of([x.record.vendor / x.best_us for x in part])
        auto = mean_of([x.auto_us / min(x.record.vendor, x.best_us) for x in part]) - 1
        over = sum(x.regret > 1.05 for x in part)
        print(
            f"{title}, {name}, {len(part)} cases: choices lose {lost:.2%} ({over} more than 5%), are "
            f"{library:.3f}x the library where the best plans are {best:.3f}x; auto loses {auto:.2%}"
        )
    for x in sorted(found, key=lambda x: -x.regret)[:worst]:
        print(
            f"  {x.regret:.3f} {x.record.case}: {x.chosen} {x.chosen_us:.2f} us, not {x.best} "
            f"{x.best_us:.2f} us; library {x.record.vendor:.2f}"
        )


def regret(records: Sequence[Record]) -> None:
    say("all runs", replay(pooled(current(records))), worst=10)
    for run in sorted({record.run for record in records}):
        say(f"run {run}", replay(x for x in records if x.run == run))
    for unit in (8, 2, 1):
        found = [x for x in records if unit_of(x) == unit]
        errors = []
        for record in found:
            product = record.product
            share = broken_share(2 * product.k)
            predicted = predict_vendor(product, H200, ITEMSIZE, share, 2 * unit)
            assert predicted is not None
            errors.append(math.log(predicted / record.vendor * 1e6))
        print(f"the library, rows of {unit}: predictions are off by {numpy.std(errors):.1%}")


def cross(records: Sequence[Record]) -> None:
    fit = Fit(timed_plans(records))
    cases = sorted({product_of(x.case): x.case for x in records if x.aligned}.values())
    merged = pooled(current(records))
    for seed in SEEDS:
        half = set(random.Random(seed).sample(cases, len(cases) // 2))
        found: list[Replay] = []
        for known in (half, set(cases) - half):
            predicted = fit.predictor(fit.run(known))
            found += replay((x for x in merged if x.case not in known), predicted)
        say(f"cases that were not fitted, seed {seed}", found)


def main(what: str, file: Path) -> None:
    records = level(read_records(file))
    if what == "regret":
        regret(records)
    elif what == "cross":
        cross(records)
    else:
        fit = Fit(timed_plans(records))
        x = fit.run()
        print(json.dumps(fit.as_data(x), indent=2))
        vendors = {str(unit): vars(fit_vendor(records, unit)) for unit in (8, 2, 1)}
        print(json.dumps({H200.name: vendors}, indent=2))
        print(f"a part took {x[-1]:.1f}x as long before run {PARTS_AT_ONCE}")
        say("all runs", replay(pooled(current(records)), fit.predictor(x)), worst=10)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
