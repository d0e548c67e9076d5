"""Fits planning/stream_k_costs.json to measured plans: python benchmarks/gemm_costs.py ROWS.jsonl

A row has a case (m x n x k, bf16, weights stored [n, k]), microseconds of the vendor's library, and of
plans such as "128x256 hybrid" or "64x64 split-k 3" (those of "64x32 tiles" are for
benchmarks/tile_costs.py). Prints the costs of the machine that the rows come
from, how far predictions are off, and what the choices by prediction lose against the best measured.
Needs scipy.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy
from scipy.optimize import least_squares

from rooftile.planning.hardware import H200
from rooftile.planning.roofline import linear_work
from rooftile.planning.stream_k import (
    Decomposition,
    Product,
    cluster_k,
    data_parallel,
    hybrid,
    product_of,
    split_k,
    stream_k,
)
from rooftile.planning.stream_k_cost import (
    APART_BANDWIDTH,
    APART_ROUND,
    APART_TOGETHER,
    MOST_STREAMED,
    SHAPES,
    STREAMED,
    broken_share,
    clusters,
    is_apart,
    shape_of,
    tiling_of,
)

SMS = H200.units
MACHINE = (
    *("launch", "start", "bandwidth", "sharpness", "streamed", "apart"),
    *("exchange", "exchange_bandwidth", "passing_bandwidth"),
)
COSTS = ("setup", "iteration", "publish", "fixup", "broken_lines")
VENDOR = ("launch", "flops", "start", "bandwidth", "depth", "broken_lines", "sharpness")
TILES = " tiles"
PASSING = " +"
GUESSES = {
    8: (4.0, 700.0, 4.0, 3.4, 0.05, 0.1, 1.5),
    2: (9.0, 160.0, 9.0, 1.0, 0.1, 0.01, 4.0),
    1: (4.0, 150.0, 4.0, 3.4, 0.05, 0.1, 1.5),
}
NEAR = 1.5  # plans slower than this times the best count less: none of them will be chosen


@dataclass(frozen=True)
class Measured:
    case: str  # with the run that it was measured in
    plan: Decomposition
    us: float
    bytes: float
    broken: float  # share of the operands' rows that do not begin on cache lines
    passing: bool  # operands were the first to leave the L2 cache


def decomposition(product: Product, name: str) -> Decomposition:
    shape, *rest = name.split()
    scheme, *split = rest or ("cluster-k",)
    tile, _, parts = shape.partition("k")
    tiling = tiling_of(*map(int, re.split("[x/]", tile)), itemsize=2)
    if parts:
        tiling = replace(tiling, ctas=tiling.ctas * int(parts), split=int(parts))
        return cluster_k(product, tiling, clusters(SMS, tiling.ctas))
    units = clusters(SMS, tiling.ctas)
    if scheme == "split-k":
        return split_k(product, tiling, units, int(split[0]))
    build = {"data-parallel": data_parallel, "stream-k": stream_k, "hybrid": hybrid}[scheme]
    return build(product, tiling, units)


def predicted(x: Sequence[float], row: Measured) -> float:
    """Microseconds; planning/stream_k_cost.py has the same in seconds."""
    launch, start, bandwidth, sharpness, streamed, apart, *exchange = x[: len(MACHINE)]
    plan = row.plan
    at = len(MACHINE) + len(COSTS) * SHAPES.index(shape_of(plan.tiling))
    setup, iteration, publish, fixup, broken = x[at : at + len(COSTS)]
    tiling = plan.tiling
    if tiling.split > 1:
        setup += exchange[0] + 4e-6 * tiling.area * tiling.split / tiling.ctas / exchange[1]
        iteration /= tiling.split
    iteration *= 1 + broken * row.broken * plan.num_ctas * plan.tiling.ctas / SMS
    iteration *= 1 + streamed * (plan.scheme in STREAMED)
    others = plan.most_parts - 1
    computing = launch + iteration * plan.most_steps + setup * plan.most_segments
    if is_apart(plan):
        parts = 4.0 * plan.product.m * plan.product.n * plan.group_ctas
        rounds = -(-plan.group_ctas // APART_TOGETHER)
        computing += apart + 1e6 * (2 * parts / APART_BANDWIDTH + rounds * APART_ROUND)
    else:
        computing += (publish if others else 0) + fixup * others
    reading = start + row.bytes / (exchange[2] if row.passing else bandwidth) / 1e6
    return (computing**sharpness + reading**sharpness) ** (1 / sharpness)


def vendor_predicted(x: Sequence[float], product: Product, bytes: float, broken: float) -> float:
    launch, tflops, start, bandwidth, depth, lines, sharpness = x
    waves = -(-product.m // 128) * -(-product.n // 128) / SMS
    flops = 2.0 * product.m * product.n * product.k
    computing = launch + flops / tflops / 1e6 * (1 + lines * broken)
    computing += depth * -(-product.k // 64) * math.exp(-waves)
    reading = start + bytes / bandwidth / 1e6
    return (computing**sharpness + reading**sharpness) ** (1 / sharpness)


def fit(residuals, guess: Sequence[float]) -> list[float]:
    found = least_squares(
        lambda x: residuals(numpy.abs(x)), guess, loss="soft_l1", f_scale=0.05, max_nfev=300
    )
    return [float(value) for value in numpy.abs(found.x)]


def fit_vendor(times: dict[str, list[float]], unit: int) -> tuple[list[float], float]:
    """Costs of the vendor's library, and by how much predictions are off.

    unit: elements that rows consist of, 8 where the library's fast kernels can take them.
    """
    known = [
        (
            product,
            linear_work(product.m, product.k, product.n).bytes,
            broken_share(2 * product.k),
            us,
        )
        for case, found in times.items()
        for product in (product_of(case),)
        for us in found
    ]

    def off(y: Sequence[float]) -> list[float]:
        return [math.log(vendor_predicted(y, *row[:3]) / row[3]) for row in known]

    y = fit(off, GUESSES[unit])
    return y, float(numpy.std(off(y)))


def main(file: Path) -> None:
    rows: list[Measured] = []
    vendor: dict[int, dict[str, list[float]]] = {8: {}, 2: {}, 1: {}}
    for line in file.read_text().splitlines():
        record = json.loads(line)
        product = product_of(record["case"])
        unit = math.gcd(8, product.n, product.k)
        times = vendor[2 if unit == 4 else unit].setdefault(record["case"], [])
        times.append(record["vendor"])
        if unit != 8:
            continue  # copies come first
        moved = linear_work(product.m, product.k, product.n).bytes
        for name, us in record["plans"].items():
            if not name.endswith(TILES):
                plan = decomposition(product, name.removesuffix(PASSING))
                if (
                    plan.scheme == "stream-k"
                    and (product.m + product.n) * product.k > MOST_STREAMED
                ):
                    continue
                case = f"{record['run']} {record['case']}"
                broken, passing = broken_share(2 * product.k), name.endswith(PASSING)
                rows.append(Measured(case, plan, us, moved, broken, passing))
    best: dict[str, float] = {}
    for row in rows:
        best[row.case] = min(best.get(row.case, math.inf), row.us)

    def off(x: Sequence[float]) -> list[float]:
        return [
            math.log(predicted(x, row) / row.us) / (1 if row.us < NEAR * best[row.case] else 3)
            for row in rows
        ]

    guess = [4.0, 4.0, 4.0, 3.0, 0.05, 2.0, 1.0, 0.06, 4.5]
    for block_m, block_n, *ctas in SHAPES:
        size = block_m * block_n / (128 * 256) / (ctas or [1])[0]
        guess += [0.8, 0.55 * size + 0.05, 1.5, 2 * size, 0.3]
    x = fit(off, guess)
    fitted = {}
    for unit, times in vendor.items():
        fitted[unit], error = fit_vendor(times, unit)
        print(f"the vendor is off by {error:.1%} where rows are multiples of {unit}")
    print(json.dumps(as_data(x, fitted), indent=2))
    print(f"plans are off by {numpy.std(off(x)):.1%}")
    lost = []
    for case in best:
        mine = [row for row in rows if row.case == case]
        lost.append(min(mine, key=lambda row: predicted(x, row)).us / best[case])
    print(f"choices by prediction lose {numpy.exp(numpy.mean(numpy.log(lost))) - 1:.1%}")


def as_data(x: Sequence[float], vendor: dict[int, list[float]]) -> dict[str, object]:
    def scaled(names: Sequence[str], values: Sequence[float]) -> dict[str, float]:
        plain = {
            "sharpness": 1.0,
            "streamed": 1.0,
            "broken_lines": 1.0,
            "bandwidth": 1e12,
            "exchange_bandwidth": 1e12,
            "passing_bandwidth": 1e12,
            "flops": 1e12,
        }
        pairs = zip(names, values, strict=False)
        return {name: float(f"{value * plain.get(name, 1e-6):.4g}") for name, value in pairs}

    costs = {}
    for i, (block_m, block_n, *ctas) in enumerate(SHAPES):
        name = "/".join([f"{block_m}x{block_n}", *map(str, ctas)])
        at = len(MACHINE) + len(COSTS) * i
        costs[name] = scaled(COSTS, x[at : at + len(COSTS)])
    libraries = {str(unit): scaled(VENDOR, y) for unit, y in vendor.items()}
    return {H200.name: {**scaled(MACHINE, x), "costs": costs, "vendor": libraries}}


if __name__ == "__main__":
    main(Path(sys.argv[1]))
