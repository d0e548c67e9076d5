"""Fits planning/tile_costs.json to measured plans: python benchmarks/tile_costs.py ROWS.jsonl

Takes the plans named "64x32 tiles" of rows as rooftile/bench/ops/gemm_plans.py says, up to 30
microseconds, and copies of operands ("copies"). Needs scipy.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy
from scipy.optimize import least_squares

from rooftile.bench.ops.gemm_plans import (
    DEEP_TILES,
    TILES,
    has_deep_ring,
    level,
    pooled,
    read_records,
)
from rooftile.planning.hardware import H200
from rooftile.planning.roofline import linear_work
from rooftile.planning.stream_k import Product
from rooftile.planning.tile_cost import STEP

RESIDENT = {"64x16": 1, "64x32": 3, "64x64": 3, "128x64": 2}
UNITS = (1, 2, 8)
MOST_US = 30.0
NEAR, FAR = 1.15, 1.5
COPY_SECONDS = 1.2e-6  # that a launch of copies adds to that of the product
MACHINE = ("launch", "start", "bandwidth", "sharpness")


def predicted(x: Sequence[float], shape: str, product: Product, deep: bool = False) -> float:
    """Microseconds; planning/tile_cost.py has the same in seconds. deep: with a ring of six stages."""
    launch, start, bandwidth, sharpness = x[:4]
    unit = math.gcd(product.k, 8)
    at = 4 + 10 * list(RESIDENT).index(shape)
    odd = x[at]
    setup, work, latency = x[at + 1 + 3 * UNITS.index(2 if unit == 4 else unit) :][:3]
    if deep:
        latency = x[4 + 10 * len(RESIDENT) + list(RESIDENT).index(shape)]
    block_m, block_n = map(int, shape.split("x"))
    tiles = -(-product.m // block_m) * -(-product.n // block_n)
    share, steps = -(-tiles // H200.units), -(-product.k // STEP)
    waiting = -(-share // RESIDENT[shape]) * steps * latency
    computing = launch + setup + ((share * steps * work) ** 3 + waiting**3) ** (1 / 3)
    computing += odd if product.n % 2 else 0.0
    moved = linear_work(product.m, product.k, product.n).bytes
    reading = start + moved / bandwidth / 1e6
    return (computing**sharpness + reading**sharpness) ** (1 / sharpness)


def main(file: Path) -> None:
    records = level(read_records(file))
    best = {record.case: min(record.plans.values()) for record in pooled(records) if record.plans}
    known: list[tuple[str, Product, bool, float, float]] = []
    copies: list[tuple[float, float]] = []  # bytes, microseconds of their launch
    for record in records:
        product = record.product
        for name, us in record.plans.items():
            shape = name.removesuffix(TILES)
            if name != shape and shape in RESIDENT and us < MOST_US:
                # What is much slower than another plan, or the library, will not be chosen.
                slower = us / min(best[record.case], record.vendor)
                deep = record.run >= DEEP_TILES and has_deep_ring(record, name)
                far = 1 if slower < NEAR else 2 if slower < FAR else 4
                known.append((shape, product, deep, us, far))
        if record.copies is not None:
            copies.append(((product.m + product.n) * product.k * 2.0, record.copies))

    def off(x: Sequence[float]) -> list[float]:
        return [math.log(predicted(numpy.abs(x), *row[:3]) / row[3]) / row[4] for row in known]

    guess = (
        [4.0, 5.0, 3.5, 2.5] + [2.0, *(0.5, 0.5, 1.0) * 3] * len(RESIDENT) + [0.2] * len(RESIDENT)
    )
    x = numpy.abs(least_squares(off, guess, loss="soft_l1", f_scale=0.05, max_nfev=400).x)
    measured = {(shape, math.gcd(product.k, 8)) for shape, product, *_ in known}
    odd = {shape for shape, product, *_ in known if product.n % 2}
    data = as_data([float(v) for v in x], copies, measured, odd)
    print(json.dumps({H200.name: data}, indent=2))
    near = [error for error, row in zip(off(x), known, strict=True) if row[4] == 1]
    print(f"{len(near)} times of tiles that are near the best are off by {numpy.std(near):.1%}")


def as_data(
    x: Sequence[float],
    copies: list[tuple[float, float]],
    measured: set[tuple[str, int]],  # shapes and elements that are loaded at a time
    measured_odd: set[str],  # shapes
) -> dict[str, object]:
    """What was not measured is left out: the fit has no more than its guess of it."""

    def seconds(value: float) -> float:
        return float(f"{value * 1e-6:.4g}")

    data: dict[str, object] = {
        "launch": seconds(x[0]),
        "start": seconds(x[1]),
        "bandwidth": float(f"{x[2] * 1e12:.4g}"),
        "sharpness": float(f"{x[3]:.4g}"),
    }
    slope = numpy.polyfit([moved for moved, _ in copies], [us for _, us in copies], 1)[0]
    data |= {"copy": COPY_SECONDS, "copy_bandwidth": float(f"{2e6 / slope:.4g}")}
    tiles = {}
    for i, (shape, resident) in enumerate(RESIDENT.items()):
        odd, *rest = x[4 + 10 * i : 14 + 10 * i]
        costs: dict[str, object] = {"resident": resident}
        costs["odd"] = seconds(odd) if shape in measured_odd else None
        for j, name in enumerate(("setup", "work", "latency")):
            costs[name] = {
                str(unit): seconds(rest[3 * u + j])
                for u, unit in enumerate(UNITS)
                if (shape, unit) in measured
            }
        costs["deep"] = seconds(x[4 + 10 * len(RESIDENT) + i])
        tiles[shape] = costs
    return data | {"tiles": tiles}


if __name__ == "__main__":
    main(Path(sys.argv[1]))
