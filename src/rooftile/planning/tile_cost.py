"""What products cost that share nothing among CTAs: whole tiles, and tiles of few rows.

    seconds^sharpness = (launch + compute)^sharpness + (start + bytes / bandwidth)^sharpness

where a multiprocessor with q tiles of s steps, r of which it can hold at a time, computes for
setup + ((q s work)^3 + (ceil(q / r) s latency)^3)^(1/3). The costs are fitted to measurements
(`tile_costs.json`, by benchmarks/tile_costs.py) and are known for the machines listed there only.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from math import ceil
from pathlib import Path

from rooftile.planning.hardware import Machine
from rooftile.planning.roofline import linear_work
from rooftile.planning.stream_k import Product

STEP = 64  # elements along k
STAGES, DEEP = 4, 6  # of a tile's ring
# Steps of 64 x 64 x 64 on each multiprocessor, fewer where pieces of fewer bytes are loaded: what
# takes more is not launch-bound, and was not measured.
MOST_K = 4096
MOST_STEPS = {8: 20, 4: 20, 2: 20, 1: 10}


@dataclass(frozen=True)
class TileCosts:
    """Seconds, by the elements that can be loaded at a time, as far as that was measured.

    resident: tiles that a multiprocessor holds at a time; 1 where such tiles are not taken when it gets several.
    odd: more where a row of the result has an odd number of elements, `None` where that was not measured. deep:
    latency with DEEP stages.
    """

    resident: int
    odd: float | None
    setup: dict[int, float]
    work: dict[int, float]
    latency: dict[int, float]
    deep: float


@dataclass(frozen=True)
class Launches:
    """Costs of the launches of one machine. copy, copy_bandwidth: of operands copied beforehand."""

    launch: float
    start: float
    bandwidth: float
    sharpness: float
    copy: float
    copy_bandwidth: float
    tiles: dict[tuple[int, int], TileCosts]


@cache
def launches(machine: str) -> Launches | None:
    """What was measured on a machine of this name."""
    row = json.loads(Path(__file__).with_name("tile_costs.json").read_text()).get(machine)
    if row is None:
        return None
    tiles = {}
    for shape, costs in row.pop("tiles").items():
        block_m, block_n = map(int, shape.split("x"))
        by_unit = {
            name: {int(unit): seconds for unit, seconds in costs[name].items()}
            for name in ("setup", "work", "latency")
        }
        tiles[block_m, block_n] = TileCosts(
            costs["resident"], costs["odd"], **by_unit, deep=costs["deep"]
        )
    return Launches(**row, tiles=tiles)


def suits_tiles(product: Product, unit: int, units: int) -> bool:
    """Whether a product is so small that whole tiles may take least, on so many multiprocessors.

    unit: as for `predict_tiles`.
    """
    m, n, k = product.m, product.n, product.k
    return m * n * k <= MOST_STEPS[unit] * STEP**3 * units and k <= MOST_K


def is_deep(product: Product, block_m: int, block_n: int, unit: int, units: int) -> bool:
    """Whether a tile's ring has more stages than others': where rows are loaded in whole pieces and no
    multiprocessor has two tiles, so that nobody else needs the shared memory (2432 x 72 x 1176: 12.2 microseconds
    with four, 11.0).

    unit: as for `predict_tiles`.
    """
    return unit == 8 and ceil(product.m / block_m) * ceil(product.n / block_n) <= units


def stages_of(product: Product, block_m: int, block_n: int, unit: int, units: int) -> int:
    """Stages of a tile's ring, none that a short k leaves empty: the code before the loop is as long as the ring.

    unit: as for `predict_tiles`.
    """
    most = DEEP if is_deep(product, block_m, block_n, unit, units) else STAGES
    return min(most, ceil(product.k / STEP) + 1)


def predict_tiles(
    product: Product, block_m: int, block_n: int, unit: int, machine: Machine
) -> float | None:
    """Seconds of a product by tiles of this shape, `None` where it was not measured.

    unit: elements of 2 bytes that can be loaded at a time, 1, 2, 4 or 8.
    """
    known = launches(machine.name)
    if known is None or (block_m, block_n) not in known.tiles:
        return None
    costs = known.tiles[block_m, block_n]
    unit = 2 if unit == 4 else unit
    tiles = ceil(product.m / block_m) * ceil(product.n / block_n)
    steps = ceil(product.k / STEP)
    share = ceil(tiles / machine.units)
    odd = costs.odd if product.n % 2 else 0.0
    if unit not in costs.setup or odd is None or (costs.resident == 1 and share > 1):
        return None
    working = share * steps * costs.work[unit]
    deep = is_deep(product, block_m, block_n, unit, machine.units)
    latency = costs.deep if deep else costs.latency[unit]
    waiting = ceil(share / costs.resident) * steps * latency
    computing = known.launch + costs.setup[unit] + odd + (working**3 + waiting**3) ** (1 / 3)
    moved = linear_work(product.m, product.k, product.n, 2).bytes
    reading = known.start + moved / known.bandwidth
    return float((computing**known.sharpness + reading**known.sharpness) ** (1 / known.sharpness))


def predict_copies(moved: float, machine: Machine) -> float:
    """Seconds that copies of operands add to a product; moved: bytes of what is copied."""
    known = launches(machine.name)
    if not moved or known is None:
        return 0.0
    return known.copy + 2 * moved / known.copy_bandwidth
