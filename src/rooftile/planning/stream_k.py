"""How the tiles of a matrix product are shared out among SMs (Osama et al. 2023, arXiv 2301.03598).

A product [m, n, k] is cut into output tiles; a tile takes `iterations` steps along K. Numbered tile
after tile, all these steps form one line, and a scheme says which piece of it each CTA takes:

- data-parallel: whole tiles in turn. The last wave leaves SMs idle.
- split-k: every tile in `split` equal parts along K.
- joined-k: the same, whose parts the last CTA adds, however many rows there are.
- cluster-k: the same by the CTAs of one cluster, which exchange their sums without the memory.
- stream-k: equal pieces of the line, across the borders of tiles.
- hybrid: stream-k over the partial wave and one full wave, whole tiles after that ("two-tile
  Stream-K + data-parallel", section 5.2).

A CTA walks its piece from its last tile to its first. So what it publishes for others, the first part
along K of its last tile, comes out first; and what it has to wait for, the parts before its own of
its first tile, comes from CTAs of lower numbers that published first thing. The CTA that holds the
last part along K of a tile finishes it and adds the parts in the order of K.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, NamedTuple

from rooftile.planning.case_words import check_numbers
from rooftile.planning.tile_width import is_odd

Scheme = Literal["data-parallel", "split-k", "joined-k", "cluster-k", "stream-k", "hybrid"]
STREAMED: tuple[Scheme, ...] = ("stream-k", "hybrid")


@dataclass(frozen=True)
class Product:
    """out [m, n] = a [m, k] @ b [k, n]"""

    m: int
    n: int
    k: int

    def __post_init__(self) -> None:
        if min(self.m, self.n, self.k) < 1:
            raise ValueError(f"a product of {self}; m, n and k must be at least 1")

    def __str__(self) -> str:
        return f"{self.m}x{self.n}x{self.k}"


def product_of(text: str) -> Product:
    """The product that a case such as `2176x2176x4096` (m, n, k) names.

    Raises:
        ValueError: the text is not understood, or a number too large.
    """
    match = re.fullmatch(r"(\d+)x(\d+)x(\d+)", text.strip(), re.ASCII)
    if match is None:
        raise ValueError(
            f"case {text!r:.80} is not understood; write m, n and k as '2176x2176x4096'"
        )
    check_numbers(match[0], f"case {text!r:.80}")
    m, n, k = map(int, match.groups())
    return Product(m, n, k)


@dataclass(frozen=True)
class Tiling:
    """Elements of an output tile, and of one step along K.

    ctas: of a cluster, that compute a tile together: a decomposition's CTA is all of them.
    split: parts of each step along K that different CTAs of the cluster compute, some of the steps
        each; the others have some of the rows each, and where they are also side by side, some of
        the columns.
    across: CTAs side by side.
    """

    block_m: int
    block_n: int
    block_k: int
    ctas: int = 1
    split: int = 1
    across: int = 1

    @property
    def area(self) -> int:
        return self.block_m * self.block_n

    @property
    def sharers(self) -> int:
        """CTAs one below the other, of which each loads a part of the columns for all."""
        return self.ctas // self.split // self.across

    @property
    def cta_m(self) -> int:
        """Rows of one CTA."""
        return self.block_m // self.sharers

    @property
    def is_wide(self) -> bool:
        """Whether CTAs are side by side, or their columns no power of two: see tile_width.py."""
        return self.across > 1 or is_odd(self.block_n)

    @property
    def is_tall(self) -> bool:
        """Whether warpgroups have 128 rows each, of no power of two of columns: they add no parts."""
        return self.is_wide and self.cta_m > 128

    @property
    def cta_n(self) -> int:
        """Columns of one CTA."""
        return self.block_n // self.across

    def tiles(self, product: Product) -> int:
        return -(-product.m // self.block_m) * -(-product.n // self.block_n)

    def iterations(self, product: Product) -> int:
        """Steps along K of one tile."""
        return -(-product.k // self.block_k)

    def __str__(self) -> str:
        tile = f"{self.block_m}x{self.block_n}x{self.block_k}"
        rows = f"/{self.sharers}" if self.sharers > 1 or self.across > 1 else ""
        rows += f"x{self.across}" if self.across > 1 else ""
        return tile + rows + (f"k{self.split}" if self.split > 1 else "")


@dataclass(frozen=True)
class Segment:
    """Steps `first` to `last` (exclusive) along K of a tile: what a CTA accumulates in one go."""

    tile: int
    first: int
    last: int

    @property
    def iterations(self) -> int:
        return self.last - self.first


class Most(NamedTuple):
    """The most that a CTA of a decomposition has.

    steps: along K. streamed: of these, while other CTAs are elsewhere along K. segments: or one more.
    parts: CTAs that share a tile, or one more.
    """

    steps: int
    streamed: int
    segments: int
    parts: int


@dataclass(frozen=True)
class Decomposition:
    """Who computes what. Build one with the functions below.

    The steps of the first `stream_tiles` tiles form a line, which is cut into pieces: every
    `group_ctas` CTAs share the steps of `group_tiles` tiles evenly. The other tiles are taken whole.
    """

    scheme: Scheme
    product: Product
    tiling: Tiling
    num_ctas: int
    stream_tiles: int = 0
    group_ctas: int = 1
    group_tiles: int = 0

    @property
    def tiles(self) -> int:
        return self.tiling.tiles(self.product)

    @property
    def iterations(self) -> int:
        """Steps along K of one tile."""
        return self.tiling.iterations(self.product)

    def bound(self, cta: int) -> int:
        """Where on the line of stream_tiles x iterations steps the CTA's piece begins, and that of
        the CTA before it ends. Pieces of one group differ by one step at most.
        """
        group, within = divmod(cta, self.group_ctas)
        steps = self.group_tiles * self.iterations
        return group * steps + within * steps // self.group_ctas

    def segments(self, cta: int) -> Iterator[Segment]:
        """The CTA's work in the order in which it does it."""
        begin, end = self.bound(cta), self.bound(cta + 1)
        while end > begin:
            tile = (end - 1) // self.iterations
            first = max(begin, tile * self.iterations)
            yield Segment(tile, first - tile * self.iterations, end - tile * self.iterations)
            end = first
        for tile in range(self.stream_tiles + cta, self.tiles, self.num_ctas):
            yield Segment(tile, 0, self.iterations)

    @cached_property
    def parts(self) -> dict[int, tuple[int, ...]]:
        """The CTAs of each tile that several share, in the order of K; the last one finishes it."""
        found: dict[int, list[tuple[int, int]]] = {}
        for cta in range(self.num_ctas):
            for segment in self.segments(cta):
                if segment.iterations < self.iterations:
                    found.setdefault(segment.tile, []).append((segment.first, cta))
        return {tile: tuple(cta for _, cta in sorted(parts)) for tile, parts in found.items()}

    @cached_property
    def most(self) -> Most:
        """Of the CTA that has most of each, without a walk through them."""
        iterations = self.iterations
        whole = -(-(self.tiles - self.stream_tiles) // self.num_ctas)
        if not self.stream_tiles:
            return Most(whole * iterations, 0, whole, 1)
        steps = self.group_tiles * iterations
        piece = -(-steps // self.group_ctas)
        streamed = piece if self.scheme in STREAMED else 0
        if self.group_tiles == 1:
            return Most(piece + whole * iterations, streamed, 1 + whole, self.group_ctas)
        segments = (piece - 2) // iterations + 2 + whole
        # Ends of pieces that can lie inside one tile, and one more.
        parts = -(-(iterations - 1) * self.group_ctas // steps) + 1
        return Most(piece + whole * iterations, streamed, segments, parts)

    def waves(self, num_sms: int) -> float:
        """Waves of whole tiles that the machine's SMs would need."""
        return self.tiles / num_sms

    def efficiency(self, num_sms: int) -> float:
        """Share of the SMs' steps that are used: all steps over SMs x the longest CTA's steps
        (quantization efficiency, section 3).
        """
        return self.tiles * self.iterations / (num_sms * self.most.steps)


def data_parallel(product: Product, tiling: Tiling, num_sms: int) -> Decomposition:
    """Whole tiles in turn, by a CTA per SM."""
    return Decomposition("data-parallel", product, tiling, min(tiling.tiles(product), num_sms))


def cluster_k(product: Product, tiling: Tiling, num_clusters: int) -> Decomposition:
    """Whole tiles in turn by clusters, whose CTAs share a tile's steps: `tiling.split` parts."""
    return Decomposition("cluster-k", product, tiling, min(tiling.tiles(product), num_clusters))


def split_k(product: Product, tiling: Tiling, num_sms: int, split: int) -> Decomposition:
    """Every tile in `split` parts along K, each on an SM of its own.

    Raises:
        ValueError: more parts than steps along K, or than SMs.
    """
    tiles, iterations = tiling.tiles(product), tiling.iterations(product)
    if not 1 <= split <= iterations or tiles * split > num_sms:
        raise ValueError(
            f"split is {split}; {product} has {tiles} tiles of {iterations} steps along K, and every "
            f"part needs one of {num_sms} SMs"
        )
    return Decomposition("split-k", product, tiling, tiles * split, tiles, split, 1)


def joined_k(product: Product, tiling: Tiling, num_sms: int, split: int) -> Decomposition:
    """As `split_k`, whose parts the CTA with the last of them adds: no other launch does.

    Raises:
        ValueError: as `split_k`.
    """
    return replace(split_k(product, tiling, num_sms, split), scheme="joined-k")


def stream_k(product: Product, tiling: Tiling, num_ctas: int) -> Decomposition:
    """All steps in equal pieces for `num_ctas` CTAs, no more of them than steps."""
    tiles = tiling.tiles(product)
    if num_ctas < 1:
        raise ValueError(f"num_ctas is {num_ctas}; it must be at least 1")
    num_ctas = min(num_ctas, tiles * tiling.iterations(product))
    return Decomposition("stream-k", product, tiling, num_ctas, tiles, num_ctas, tiles)


def hybrid(product: Product, tiling: Tiling, num_sms: int) -> Decomposition:
    """Stream-k over the partial wave and one full wave, then whole tiles: every CTA streams between
    one and two tiles' worth of steps, so a tile has at most two parts.
    """
    tiles = tiling.tiles(product)
    if tiles < num_sms:
        return stream_k(product, tiling, num_sms)
    partial = tiles % num_sms
    streamed = num_sms + partial if partial else 0
    return Decomposition("hybrid", product, tiling, num_sms, streamed, num_sms, streamed)
