"""How one product is run: a tile shape, and who computes which steps."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache
from math import sqrt

from rooftile.kernels.gluon.gemm.config import CONFIGS, PAIRS, QUADS, SPLIT, Config, wide
from rooftile.kernels.gluon.tile.divisor import divisor_fields
from rooftile.kernels.triton_version import TRITON_VERSION
from rooftile.planning.hardware import H200
from rooftile.planning.stream_k import Decomposition, Product, Tiling, data_parallel
from rooftile.planning.stream_k_choice import FEW_ROWS, Choice, choose
from rooftile.planning.stream_k_cost import WHOLE_LINES, is_apart, is_passing, predict

_CONFIGS = {
    itemsize: {x.tiling(itemsize): x for x in CONFIGS + PAIRS + QUADS + SPLIT}
    for itemsize in (1, 2)
}


@cache
def config_of(tiling: Tiling, itemsize: int) -> Config:
    """How the tiles of a decomposition are computed."""
    return wide(tiling) if tiling.is_wide else _CONFIGS[itemsize][tiling]


@dataclass(frozen=True, eq=False)  # one object for each call of its kind: hashed by identity
class Plan:
    """The numbers of planning/stream_k.py: Decomposition that the kernel gets.

    band: rows of tiles that are walked together.
    apart: parts of tiles are stored by themselves and added by another launch (sums.py).
    seconds: that it is predicted to take.
    transposed: m and n are those of the other way round: b's columns are its rows, and what it computes
        is stored transposed. For results whose rows are multiples of 16 bytes, tiles whose warpgroups
        have 64 rows, and no more than a bias after the product.
    """

    config: Config
    m: int
    num_ctas: int
    tiles_m: int
    tiles_n: int
    iterations: int
    stream_tiles: int
    group_ctas: int
    group_tiles: int
    band: int
    apart: bool = False
    seconds: float = 0.0
    transposed: bool = False

    def a_rows(self, by_rows: bool) -> int:
        """Rows of a's box. The copy engine takes as long for rows beyond the matrix as for others,
        so a box of few rows ends with them; what the rows after it hold reaches no result.
        """
        if not by_rows or self.m > self.config.block_m or self.config.joined:
            return self.config.block_m
        return max(1 << (self.m - 1).bit_length(), 8)

    @cached_property
    def joined(self) -> Plan:
        """The same with parts that are added where a tile is finished."""
        return replace(self, apart=False)

    @cached_property
    def numbers(self) -> tuple[int, ...]:
        """The fields of `Shares` that are not known when a kernel is compiled."""
        return (
            *(self.tiles_m * self.tiles_n, self.tiles_m),
            *divisor_fields(self.band),
            *divisor_fields(self.tiles_m % self.band or self.band),
            *divisor_fields(self.band * self.tiles_n),
            *divisor_fields(self.iterations),
            self.stream_tiles,
            *divisor_fields(self.group_ctas),
            self.group_tiles * self.iterations,
        )

    @property
    def part_rows(self) -> int:
        """Rows of a part of all tiles, where parts are stored by themselves."""
        return self.tiles_m * self.config.block_m * self.config.sharers

    @property
    def part_elements(self) -> int:
        """Size of the workspace for parts, in float32."""
        return self.num_ctas * self.config.block_m * self.config.block_n if self.stream_tiles else 0


def plan_of(config: Config, decomposition: Decomposition, seconds: float = 0.0) -> Plan:
    product, tiling = decomposition.product, decomposition.tiling
    # Where the steps of a tile are shared a cluster computes one tile, and the rest wait for a place.
    workers = decomposition.tiles if config.split > 1 else decomposition.num_ctas
    # The tiles that run at one time cover a square, so that they share operands.
    band = round(sqrt(decomposition.num_ctas * tiling.block_n / tiling.block_m))
    return Plan(
        config,
        product.m,
        workers * config.cluster,
        -(-product.m // tiling.block_m),
        -(-product.n // tiling.block_n),
        decomposition.iterations,
        decomposition.stream_tiles,
        decomposition.group_ctas,
        decomposition.group_tiles,
        max(band, 1),
        is_apart(decomposition),
        seconds,
    )


@lru_cache(maxsize=4096)
def choose_plan(
    m: int,
    n: int,
    k: int,
    itemsize: int,
    num_sms: int,
    batch_invariant: bool = False,
    rows: tuple[int, int] = WHOLE_LINES,
    in_pairs: bool = False,
    turnable: bool = False,
    copied: bool = False,
) -> Plan:
    """The plan that is predicted to take least (planning/stream_k_cost.py).

    batch_invariant: whole tiles of a shape that depends on n and k alone, the one that is best for
        64 rows.
    rows: bytes that rows of a and of b are multiples of, a line of the cache at most.
    in_pairs: k is the contiguous dimension of both operands, so CTAs may load columns together.
    turnable: the result may be stored transposed: see `Plan`.
    copied: the launch before has written the operands.
    """
    machine = replace(H200, units=num_sms)
    if batch_invariant:
        few = [x for x in CONFIGS if x.block_m == FEW_ROWS]
        whole = [data_parallel(Product(FEW_ROWS, n, k), x.tiling(itemsize), num_sms) for x in few]
        times = [predict(x, machine, itemsize) for x in whole]
        config = few[times.index(min(times))]
        found = data_parallel(Product(m, n, k), config.tiling(itemsize), num_sms)
        return plan_of(config, found, predict(found, machine, itemsize, rows, copied=copied))
    product = Product(m, n, k)
    plain = in_pairs and TRITON_VERSION == (3, 6) and num_sms % 2 == 0
    best = choose(product, machine, itemsize, None, rows, plain, turnable and plain, copied)
    return plan_of_choice(best, itemsize, rows, plain)


def plan_of_choice(choice: Choice, itemsize: int, rows: tuple[int, int], plain: bool) -> Plan:
    """How a choice is run. rows: as for `choose_plan`. plain: the ring of tile/cluster.py can load its operands."""
    found = choice.decomposition
    config = config_of(found.tiling, itemsize)
    # Few rows may be multiplied by weights that are loaded early.
    if plain and choice.asked.m > FEW_ROWS:
        config = config.by_itself
    if plain and config.can_pass and is_passing(found, itemsize, rows):
        config = config.passing_on
    return replace(plan_of(config, found, choice.seconds), transposed=choice.transposed)
