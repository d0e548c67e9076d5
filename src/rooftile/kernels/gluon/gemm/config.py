"""Tile shapes of the matrix product and what each costs in shared memory and registers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from rooftile.planning.stream_k import Tiling
from rooftile.planning.stream_k_choice import CLUSTERED
from rooftile.planning.tile_width import PIECE, is_odd, power_below, takes_turns

SHARED_BYTES = 225 * 1024  # of one CTA, a little left for barriers
CHUNK_BYTES = 128  # of a row, that are stored at a time
MOST_STAGES, MANY_STAGES = 16, 8
PIECE_BYTES = 64 * PIECE * 4  # of sums


@dataclass(frozen=True)
class Config:
    """How a product is run. Measurements: docs/performance.md.

    split_rows: the two consumer warpgroups share a tile's rows, else its columns.
    buffers: shared tiles for results of two bytes, of each warpgroup.
    sharers: CTAs, one below the other, that load the columns of their tiles together.
    across: CTAs, side by side, that load the rows of their tiles together.
    split: CTAs that share a tile's steps along K.
    alone: one CTA, with the ring of tile/cluster.py, for operands whose contiguous dimension is k.
    passing: operands, whose contiguous dimension must be k, are the first to leave the L2 cache.
    """

    block_m: int
    block_n: int
    split_rows: bool
    stages: int
    buffers: int
    block_bytes: int = 128  # of one row of a step along K
    consumer_registers: int = 240
    producer_registers: int = 24
    sharers: int = 1
    split: int = 1
    across: int = 1
    passing: bool = False
    alone: bool = False

    @property
    def cluster(self) -> int:
        return self.sharers * self.across * self.split

    @property
    def joined(self) -> bool:
        """Whether the ring is that of tile/cluster.py."""
        return self.cluster > 1 or self.passing or self.alone or self.is_odd

    @property
    def in_turn(self) -> bool:
        """Whether the consumer warpgroups take a tile's steps in turn, each all of its columns: turns.py."""
        return self.joined and takes_turns(self.block_m, self.block_n)

    @property
    def traded(self) -> int:
        """Bytes of shared memory in which they hand over sums then."""
        return 2 * (self.block_n // (2 * PIECE)) * PIECE_BYTES if self.in_turn else 0

    @property
    def is_odd(self) -> bool:
        """Whether its columns are no power of two: see accumulator.py."""
        return is_odd(self.block_n)

    @property
    def can_pass(self) -> bool:
        """Small tiles were checked on a GPU where operands stay in the cache only."""
        return self.block_n > 32 and (
            self.split < 4 or self.sharers > 1 or self.block_m * self.block_n > 64 * 128
        )

    @cached_property
    def passing_on(self) -> Config:
        """The same with operands that are the first to leave the L2 cache."""
        return replace(self.by_itself, passing=True)

    @cached_property
    def by_itself(self) -> Config:
        """The same with the ring of tile/cluster.py."""
        if self.joined:
            return self
        config = replace(self, alone=True, consumer_registers=232, producer_registers=40)
        return config.with_room

    @property
    def with_room(self) -> Config:
        """As many stages as there is room for beside results, and of these as many chunks as do not wait for
        each other, at the cost of one stage at most where there are many."""
        stage = (self.block_m + self.block_n) * self.block_bytes
        room, chunks = SHARED_BYTES - self.traded, -(-self.columns(False) // self.chunk(False, 2))

        def stages_beside(results: int) -> int:
            stages = min((room - results) // stage, MOST_STAGES)
            return stages - stages % 2 if self.in_turn else stages  # each belongs to one warpgroup

        stages = stages_beside(self.chunk_bytes(4))
        fewer = stages_beside(max(chunks * self.chunk_bytes(2), self.chunk_bytes(4)))
        if stages >= MANY_STAGES and fewer >= stages - (2 if self.in_turn else 1):
            stages = fewer
        buffers = min((room - stages * stage) // self.chunk_bytes(2), chunks)
        return replace(self, stages=stages, buffers=buffers)

    def chunk_bytes(self, out_itemsize: int, gated: bool = False) -> int:
        """Of what both warpgroups store at a time."""
        return 2 * self.stored_rows * self.chunk(gated, out_itemsize) * out_itemsize

    def buffers_of(self, out_itemsize: int, gated: bool = False) -> int:
        """Shared tiles for results of each warpgroup, where these are of so many bytes each."""
        stages = self.stages * (self.block_m + self.block_n) * self.block_bytes
        room = SHARED_BYTES - self.traded - stages
        return max(min(self.buffers, room // self.chunk_bytes(out_itemsize, gated)), 1)

    def block_k(self, itemsize: int) -> int:
        return self.block_bytes // itemsize

    def tiling(self, itemsize: int) -> Tiling:
        return Tiling(
            self.block_m * self.sharers,
            self.block_n * self.across,
            self.block_k(itemsize),
            self.cluster,
            self.split,
            self.across,
        )

    @property
    def rows(self) -> int:
        """Rows of a tile that one warpgroup multiplies."""
        return self.block_m // 2 if self.split_rows else self.block_m

    @property
    def stored_rows(self) -> int:
        """Of these, that it stores at a time."""
        return 64 if self.is_odd else self.rows

    def columns(self, gated: bool) -> int:
        """Columns of a result that one warpgroup stores."""
        return self.block_n // (1 if self.split_rows else 2) // (2 if gated else 1) // self.split

    def chunk(self, gated: bool, out_itemsize: int) -> int:
        """Columns that a warpgroup stores at a time."""
        return power_below(min(self.columns(gated), CHUNK_BYTES // out_itemsize))

    def b_boxes(self, gated: bool, b_by_rows: bool) -> int:
        """Boxes of the right operand in a step."""
        if gated:
            return 2 if self.split_rows else 4
        return 2 if b_by_rows and not self.split_rows else 1

    @property
    def odd_box(self) -> tuple[int, int] | None:
        """The right operand's box where Triton has no name for it, elements of two bytes."""
        return (self.block_n // self.sharers, self.block_k(2)) if self.is_odd else None

    def b_columns(self, gated: bool, b_by_rows: bool) -> int:
        """Of a box of the right operand, as Triton is told."""
        if self.is_odd:
            return PIECE
        return self.block_n // self.b_boxes(gated, b_by_rows) // self.sharers

    @property
    def places(self) -> tuple[int, int]:
        """Where Triton puts the operands' stages in shared memory: larger ones first."""
        a, b = (self.stages * n * self.block_bytes for n in (self.block_m, self.block_n))
        return (0, a) if a >= b else (b, 0)

    def shared_bytes(self, out_itemsize: int, gated: bool) -> int:
        operands = self.stages * (self.block_m + self.block_n) * self.block_bytes
        results = self.buffers_of(out_itemsize, gated) * self.chunk_bytes(out_itemsize, gated)
        return operands + self.traded + results


LARGE = Config(128, 256, True, 4, 2)
TALL = Config(256, 128, True, 4, 1)
SQUARE = Config(128, 128, True, 6, 2)
FLAT = Config(64, 256, False, 5, 1)
FEW_128 = Config(64, 128, False, 6, 1)
FEW_64 = Config(64, 64, False, 8, 1)
FEW_32 = Config(64, 32, False, 10, 1)


def _cluster(
    block_m: int,
    block_n: int,
    split_rows: bool,
    stages: int,
    buffers: int,
    sharers: int,
    split: int,
) -> Config:
    """All warps of a cluster meet, so that there are as many producers as fill the launch's warps."""
    config = Config(
        block_m, block_n, split_rows, stages, buffers, 128, 232, 40, sharers=sharers, split=split
    )
    return config.with_room if config.in_turn else config


PAIR_LARGE = _cluster(128, 256, True, 4, 2, 2, 1)
PAIR_SQUARE = _cluster(128, 128, True, 6, 2, 2, 1)
PAIR_FLAT = _cluster(64, 256, False, 5, 1, 2, 1)
PAIR_64 = _cluster(64, 128, False, 7, 1, 2, 1)
QUAD_SQUARE = _cluster(128, 128, True, 6, 2, 4, 1)
QUAD_64 = _cluster(64, 128, False, 7, 1, 4, 1)
CONFIGS = (LARGE, TALL, SQUARE, FLAT, FEW_128, FEW_64, FEW_32)
# For operands whose contiguous dimension is k.
PAIRS = (PAIR_LARGE, PAIR_SQUARE, PAIR_FLAT, PAIR_64)
QUADS = (QUAD_SQUARE, QUAD_64)
SPLIT = tuple(
    _cluster(*tile, sharers, split)
    for tile in (
        (128, 128, True, 6, 2),
        (64, 256, False, 5, 1),
        (64, 128, False, 7, 1),
        (64, 64, False, 8, 1),
        (128, 256, True, 4, 2),
    )
    for sharers, split in CLUSTERED[tile[0], tile[1]]
)


def wide(tiling: Tiling) -> Config:
    """Of a tiling of planning/tile_width.py, for operands of two bytes whose contiguous dimension is k, and
    no gate: as many stages as there is room for beside a tile of results or two."""
    rows, columns = tiling.cta_m, tiling.cta_n
    config = _cluster(rows, columns, rows > 64, 1, 1, tiling.sharers, 1)
    # Results have less room than either operand, since Triton puts larger ones first (`places`).
    return replace(config, across=tiling.across).with_room


def constants(
    config: Config,
    *,
    itemsize: int,
    out_itemsize: int = 2,
    a_rows: int,
    a_by_rows: bool,
    b_by_rows: bool,
    activation: str,
    has_bias: bool,
    has_residual: bool,
    has_scales: bool,
    out_unit: int,
    ahead: bool,
    streamed: bool,
    apart: bool,
    transposed: bool = False,
) -> tuple[tuple[str, Any], ...]:
    """The compile-time arguments of `matmul_kernel`, in its order."""
    gated = activation.endswith("_and_mul")
    return (
        ("block_m", config.block_m),
        ("block_n", config.block_n),
        ("block_k", config.block_k(itemsize)),
        ("a_rows", a_rows),
        ("split_rows", config.split_rows),
        ("stages", config.stages),
        ("buffers", config.buffers_of(out_itemsize, gated)),
        ("consumer_registers", config.consumer_registers),
        ("producer_registers", config.producer_registers),
        ("a_by_rows", a_by_rows),
        ("b_by_rows", b_by_rows),
        ("b_boxes", config.b_boxes(gated, b_by_rows)),
        ("gated", gated),
        ("activation", activation.removesuffix("_and_mul")),
        ("has_bias", has_bias),
        ("has_residual", has_residual),
        ("has_scales", has_scales),
        ("out_unit", out_unit),
        ("ahead", ahead),
        ("streamed", streamed),
        ("apart", apart),
        ("sharers", config.sharers),
        ("split", config.split),
        ("across", config.across),
        ("a_at", config.places[0]),
        ("b_at", config.places[1]),
        ("passing", config.passing),
        ("transposed", transposed),
        ("alone", config.alone),
        ("in_turn", config.in_turn),
        ("traded", config.traded),
    )
