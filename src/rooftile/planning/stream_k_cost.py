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
  Lines that were written just before, of operands that had to be copied, are answered so in every step.

The step takes what takes longest, a little more where others take nearly as long. A launch, the first
stages of the ring, which nothing hides, and what follows the steps (parts of tiles) come on top; reading
memory overlaps the steps. What each costs: `stream_k_prices.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

from rooftile.planning.hardware import Machine
from rooftile.planning.stream_k import STREAMED, Decomposition, Tiling
from rooftile.planning.stream_k_prices import Counts, machinery
from rooftile.planning.tile_width import power_below, takes_turns

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


def multiplying(tiling: Tiling, machine: Machine, itemsize: int) -> float:
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
    plain: bool = True,
    copied: bool = False,
) -> Counts:
    """What its busiest CTA does.

    rows: bytes that rows of a and of b are multiples of, a line of the cache at most. transposed: its
        result is stored so. plain: as for `predict`. copied: the launch before has written the operands.
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
    chunk = min(power_below(columns), STORE_BYTES // 2)
    stored = (
        segments * block_m * block_n / columns * -(-columns // chunk) * chunk / (STORE_BYTES // 2)
    )
    places = gcd(m, block_m) if transposed else gcd(n, block_n)
    waits = tiling.ctas == 1 and not tiling.is_wide and not (plain and m > FEW_ROWS)
    steps, exchanged, others = most.steps, 0.0, most.parts - 1
    scattered = most.streamed and min(most.streamed + plan.iterations, most.steps)
    if tiling.split > 1:
        steps = scattered = segments * -(-tiling.iterations(product) // tiling.split)
        exchanged = 4.0 * block_m * block_n * segments
    if copied:
        scattered = steps
    apart = is_apart(plan)
    flops = 2.0 * m * n * k
    operands = float((m + n) * k * itemsize)
    moved = operands + m * n * itemsize
    return Counts(
        multiplying(tiling, machine, itemsize),
        min(flops / HOT_FLOPS * itemsize / 2, 1.0),
        block_m + block_n,
        broken,
        split,
        max(outside_m, outside_n) if segments == 1 else outside_m / tiles_m + outside_n / tiles_n,
        (of_a + of_b) * busy,
        *(0.0 if waits else 0.5 if takes_turns(block_m, block_n) else 1.0, float(waits)),
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
    copied: bool = False,
) -> float:
    """Seconds, without walking through the CTAs.

    rows, transposed, copied: as for `counts`. plain: operands of two bytes whose contiguous dimension is k, which may pass.
    """
    known = machinery(machine)
    passing = plain and is_passing(plan, itemsize, rows)
    found = counts(plan, machine, itemsize, rows, passing, transposed, plain, copied)
    return known.prices.seconds(found, known.pace_of(plan.tiling))


def costs_of(plan: Decomposition, machine: Machine, copied: bool = False) -> Costs:
    """What segments, steps and parts of its CTAs cost, for a timeline. copied: as for `counts`."""
    known = machinery(machine)
    found = counts(plan, machine, copied=copied)
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
    return gcd(row_bytes, LINE_BYTES)


def why(
    plan: Decomposition,
    machine: Machine,
    rows: tuple[int, int] = WHOLE_LINES,
    copied: bool = False,
) -> str:
    """What takes longest of it, in words. rows, copied: as for `counts`."""
    prices = machinery(machine).prices
    found = counts(plan, machine, rows=rows, copied=copied)
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
