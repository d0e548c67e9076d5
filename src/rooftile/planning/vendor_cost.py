"""What the vendor's library takes for a matrix product, as a black box with costs that were fitted."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from rooftile.planning.hardware import Machine
from rooftile.planning.roofline import linear_work
from rooftile.planning.stream_k import Product, Tiling
from rooftile.planning.stream_k_cost import LINE_BYTES, row_alignment
from rooftile.planning.stream_k_prices import STEP_BYTES

GRAIN = 64  # rows and columns that the library's tiles are multiples of, for all that is known
MARGIN = 0.97  # of its predicted time that a kernel of ours may take at most


@dataclass(frozen=True)
class Vendor:
    """Costs in seconds, operations and bytes a second.

    seconds^sharpness = (launch + flops / rate ...)^sharpness + (start + bytes / bandwidth)^sharpness

    depth: of a step along K that tiles too few for the machine do not hide; deep: steps that are many,
        which the library shares out among more tiles. broken_lines: share that multiplying takes longer
        where all rows begin inside lines of the cache. storing: bytes of results that nothing hides.
    """

    launch: float
    flops: float
    start: float
    bandwidth: float
    depth: float
    broken_lines: float
    sharpness: float
    storing: float
    deep: float


@cache
def _measured(machine: str) -> dict[int, Vendor] | None:
    """By the elements of 2 bytes that rows of operands and result consist of: 8, 2 (or 4), 1."""
    row = json.loads(Path(__file__).with_name("vendor_costs.json").read_text()).get(machine)
    return row and {int(unit): Vendor(**costs) for unit, costs in row.items()}


def broken_share(row_bytes: int) -> float:
    """Of rows of this many bytes, the share that begin inside a cache line."""
    return 1 - row_alignment(row_bytes) / LINE_BYTES


def predict_vendor(
    product: Product,
    machine: Machine,
    itemsize: int = 2,
    broken: float = 0.0,
    row_bytes: int = 16,
) -> float | None:
    """Seconds that the vendor's library takes, `None` where it was not measured.

    broken: share of the operands' rows that do not begin on cache lines (`broken_share`).
    row_bytes: the largest power of two, up to 16, of which rows of the operands and of the result are
        multiples.
    """
    known = _measured(machine.name)
    if known is None:
        return None
    vendor = known[8 if row_bytes >= 16 else 2 if row_bytes >= 4 else 1]
    return seconds_of(vendor, product, machine, itemsize, broken)


def seconds_of(
    vendor: Vendor, product: Product, machine: Machine, itemsize: int, broken: float
) -> float:
    """By costs that were fitted; broken: as for `predict_vendor`."""
    m, n, k = product.m, product.n, product.k
    work = linear_work(m, k, n, itemsize)
    whole = linear_work(-(-m // GRAIN) * GRAIN, k, -(-n // GRAIN) * GRAIN, itemsize)
    computing = vendor.launch + whole.flops / vendor.flops * (
        itemsize / 2 + vendor.broken_lines * broken
    )
    square = Tiling(128, 128, STEP_BYTES // itemsize)
    waves = square.tiles(product) / machine.units
    steps = -vendor.deep * math.expm1(-square.iterations(product) / vendor.deep)
    computing += vendor.depth * steps * math.exp(-waves) + 2 * m * n / vendor.storing
    reading = vendor.start + work.bytes / vendor.bandwidth
    # Beside the longer of the two, since microseconds to the power of 60 are no numbers.
    longer, s = max(computing, reading), vendor.sharpness
    return float(longer * (1 + (min(computing, reading) / longer) ** s) ** (1 / s))
