"""Which decomposition of a matrix product, of those that the kernel has, takes least."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from rooftile.planning.hardware import H200, Machine
from rooftile.planning.stream_k import (
    Decomposition,
    Product,
    Tiling,
    cluster_k,
    data_parallel,
    hybrid,
    joined_k,
    split_k,
    stream_k,
)
from rooftile.planning.stream_k_bound import bound_of
from rooftile.planning.stream_k_cost import WHOLE_LINES, clusters, is_apart, predict, why
from rooftile.planning.stream_k_prices import SHAPES, STEP_BYTES, tiling_of
from rooftile.planning.tile_width import FILLS, NARROWEST, TOGETHER, WIDEST, is_odd, step_of

# Tiles whose steps along K the CTAs of a cluster can share: how many of those, one below the other,
# load columns together, and how many share k.
CLUSTERED: dict[tuple[int, int], tuple[tuple[int, int], ...]] = {
    (128, 128): ((1, 2), (1, 4), (1, 8), (2, 2), (2, 4)),
    (64, 256): ((1, 2), (1, 4), (2, 2), (2, 4)),
    (64, 128): ((1, 2), (1, 4), (2, 2), (2, 4)),
    (64, 64): ((1, 2), (1, 4)),
    (128, 256): ((1, 2), (2, 2)),
}
FEW_ROWS = 64  # what tiles of more rows are of no use to
# Elements of operands that CTAs at different places along K may share: what the L2 cache does not
# hold is read by each of them (640 x 1280 x 16384 took 64 microseconds so, and 52 split in two).
MOST_STREAMED = 30_000_000
MOST_JOINED = 3  # parts that the CTA which finishes a tile adds
WIDEST_JOINED = 208  # columns of such a tile, of any width: more would not leave registers enough
EQUAL = 1.01  # predictions are not better than this
SPLITS = (2, 3, 4, 6, 8, 12, 16, 24, 32)


@dataclass(frozen=True)
class Choice:
    """transposed: it is one of n x m x k, whose result is stored transposed. copied: as for `predict`."""

    decomposition: Decomposition
    seconds: float
    transposed: bool = False
    copied: bool = False

    @property
    def asked(self) -> Product:
        """The product that it is for."""
        product = self.decomposition.product
        if self.transposed:
            return Product(product.n, product.m, product.k)
        return product


def tilings_for(
    product: Product, itemsize: int = 2, in_clusters: bool = True, num_sms: int = H200.units
) -> list[Tiling]:
    """Tiles that the kernel has for a product.

    in_clusters: k is the contiguous dimension of both operands, of two bytes, so that the CTAs of a
        cluster can load columns together, and share k, and tiles can have any width.
    """
    few = product.m <= FEW_ROWS
    shapes = [x for x in SHAPES if len(x) == 2 and not (few and x[0] > FEW_ROWS)]
    found = [tiling_of(*shape, itemsize=itemsize) for shape in shapes]
    if few or not in_clusters:
        return found
    # Half of the CTAs of a cluster have rows at least.
    together = [x for x in SHAPES if len(x) == 3 and product.m > x[0] // 2]
    found += [tiling_of(*shape, itemsize=itemsize) for shape in together]
    found += wide_tilings(product, num_sms)
    found += [
        Tiling(block_m * sharers, block_n, STEP_BYTES // itemsize, sharers * split, split)
        for (block_m, block_n), splits in CLUSTERED.items()
        for sharers, split in splits
        if sharers == 1 or product.m > block_m
    ]
    return found


def wide_tilings(product: Product, num_sms: int) -> list[Tiling]:
    """Tiles as wide as makes them, or a few parts of each, fill all multiprocessors a few times."""
    found: dict[Tiling, None] = {}
    for rows in NARROWEST:
        for sharers, across in TOGETHER[rows]:
            tiles_m = -(-product.m // (rows * sharers))
            if sharers > 1 and product.m <= rows * sharers // 2:
                continue
            units, step = clusters(num_sms, sharers * across), step_of(rows, sharers)
            for turns, split in FILLS:
                tiles_n = units * turns // (tiles_m * split)
                if not tiles_n:
                    continue
                width = -(-product.n // (tiles_n * across * step)) * step
                if NARROWEST[rows] <= width <= WIDEST[rows] and (across > 1 or is_odd(width)):
                    tiling = Tiling(rows * sharers, width * across, 64, sharers * across, 1, across)
                    found[tiling] = None
    return list(found)


def may_be_joined(tiling: Tiling) -> bool:
    """Whether the CTA that finishes a tile can add its parts."""
    return not tiling.is_tall and (tiling.cta_n <= WIDEST_JOINED or not tiling.is_wide)


def may_stream(product: Product) -> bool:
    """Whether CTAs at different places along K find its operands in the L2 cache."""
    return (product.m + product.n) * product.k < MOST_STREAMED


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
                if split <= MOST_JOINED and product.m > FEW_ROWS and may_be_joined(tiling):
                    yield joined_k(product, tiling, num_sms, split)
        if tiling.is_wide:
            continue  # it is as wide as makes that superfluous
        if tiles >= num_sms:
            yield hybrid(product, tiling, num_sms)
        elif may_stream(product):
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


def least(timed: Sequence[tuple[float, Decomposition]]) -> tuple[float, Decomposition]:
    """Seconds and plan of the one that takes least, or 1% more with tiles in fewer parts: many that are
    written at a time can take longer than predicted (384 x 384 x 16384 in 14 parts: 26.8
    microseconds, predicted 22.9)."""
    enough = EQUAL * min(seconds for seconds, _ in timed)
    equal = [pair for pair in timed if pair[0] <= enough]
    return min(equal, key=lambda pair: (cuts(pair[1]), pair[0]))


def cuts(plan: Decomposition) -> int:
    """Parts along k that every tile is cut in."""
    return plan.group_ctas if plan.scheme in ("split-k", "joined-k") else plan.tiling.split


def options_for(
    product: Product,
    num_sms: int,
    itemsize: int = 2,
    tilings: Iterable[Tiling] | None = None,
    plain: bool = True,
    turnable: bool = False,
) -> list[tuple[Product, Tiling]]:
    """What tiles can be of: the product itself, or the transposed one, another object even where it is as
    large. Arguments as for `choose`."""
    if tilings is None:
        tilings = tilings_for(product, itemsize, plain, num_sms)
    options = [(product, tiling) for tiling in tilings]
    turned = Product(product.n, product.m, product.k)
    # Few rows are multiplied by weights that may be at rest, which other kernels load early.
    if turnable and min(turned.m, turned.n) > FEW_ROWS and turned.m != turned.n:
        of_turned = tilings_for(turned, itemsize, plain, num_sms)
        options += [(turned, tiling) for tiling in of_turned if may_be_transposed(tiling)]
    return options


def choose(
    product: Product,
    machine: Machine,
    itemsize: int = 2,
    tilings: Iterable[Tiling] | None = None,
    rows: tuple[int, int] = WHOLE_LINES,
    plain: bool = True,
    turnable: bool = False,
    copied: bool = False,
) -> Choice:
    """The decomposition that is predicted to take least (see `least`).

    tilings: those to choose from, `None` for the kernel's. rows, plain, copied: as for `predict`.
    turnable: the result may be stored transposed (kernels/gluon/gemm/plan.py: Plan).
    """
    options = options_for(product, machine.units, itemsize, tilings, plain, turnable)
    bounds = [bound_of(*option, machine, itemsize) for option in options]
    fastest = math.inf
    timed: list[tuple[float, Decomposition]] = []
    for bound in sorted(bounds, key=lambda x: x.seconds):
        if bound.seconds > EQUAL * fastest:
            break
        what = bound.product
        for plan in candidates(what, machine.units, [bound.tiling]):
            if what is not product and is_apart(plan):
                continue
            if bound.of(plan) > EQUAL * fastest:
                continue  # most of them, and a tenth of the work
            turned = what is not product
            seconds = predict(plan, machine, itemsize, rows, plain, turned, copied)
            fastest = min(fastest, seconds)
            timed.append((seconds, plan))
    seconds, best = least(timed)
    return Choice(best, seconds, best.product != product, copied)


def may_be_transposed(tiling: Tiling) -> bool:
    """Whether its warpgroups have 64 rows each, and no cluster shares its steps along K."""
    return (tiling.cta_m <= 128 or is_odd(tiling.cta_n)) and tiling.split == 1


def reason(choice: Choice, machine: Machine, rows: tuple[int, int] = WHOLE_LINES) -> str:
    """Why a decomposition was chosen for operands of two bytes whose contiguous dimension is k."""
    best, product = choice.decomposition, choice.decomposition.product
    tiles = f"{best.tiles} tiles of {best.tiling} on {machine.units} SMs"
    if choice.transposed:
        tiles += f", of {product}, stored transposed"
    units = clusters(machine.units, best.tiling.ctas)
    because = why(best, machine, rows, choice.copied)
    if best.scheme == "data-parallel":
        return f"{tiles}: {best.efficiency(units):.0%} of the SMs' steps are used; {because}"
    whole = min(
        predict(plan, machine, rows=rows, plain=True, copied=choice.copied)
        for tiling in tilings_for(product)
        if tiling.split == 1
        for plan in [data_parallel(product, tiling, clusters(machine.units, tiling.ctas))]
    )
    return (
        f"{tiles}: {whole / choice.seconds:.2f}x the speed of whole tiles, which would leave SMs idle; "
        f"{because}"
    )
