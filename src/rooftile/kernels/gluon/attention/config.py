"""How each head dim and length is run, with the measurement behind each threshold."""

from __future__ import annotations

from dataclasses import dataclass, replace

from rooftile.planning.key_shares import (
    Costs,
    Shares,
    blocks_of_keys,
    least_clocks,
    share_out,
    whole_tiles,
)


@dataclass(frozen=True)
class Config:
    """How a head dim is run: tile sizes, roles and switches. Measurements: docs/performance.md."""

    dim: int  # of the tiles; smaller head dims are filled up with zeros by the copy engine
    groups: int  # consumer warpgroups of 64 query rows
    block: int  # keys per tile
    stages: int
    consumer_registers: int
    producer_registers: int
    turns: int = 1
    overlapped: bool = True  # the softmax of a block runs under the product of the one before
    ctas: int = 1  # that share an SM
    lazy: bool = True
    anchored: bool = (
        False  # the row maximum is that of a tile's first keys, see OnlineSoftmax.weigh
    )
    sums_in_parts: bool = False  # lanes exchange their sums once a tile, not once a block
    software_share: int = 0
    own_output: bool = True  # needs shared memory for outputs and a second Q tile
    dynamic: str = "unequal"  # when tiles go to whichever CTA is free: always, unequal, never
    dependent: bool = True  # starts under the end of the kernel before: tile/dependent.py
    by_threads: bool = False  # consumers release what they have read thread by thread: see Ring
    loads_early: bool = False  # dense CTAs load their first tile first of all: first_tile.py
    reads_ahead: bool = False  # (overlapped) a tile's message is read before the one before ends
    last_rounds: int | None = None  # drawn tiles are the last so many of a CTA's, None: all it can

    def __post_init__(self) -> None:
        if self.overlapped and self.stages < 2:
            raise ValueError(
                f"stages is {self.stages}; overlapped products hold a V while they wait for the next "
                f"K, so they need 2"
            )

        if self.loads_early and not self.own_output:
            raise ValueError(
                "loads_early takes an output tile of its own: queries are loaded first"
            )

        if self.turns not in (1, self.groups):
            raise ValueError(
                f"turns is {self.turns}; all {self.groups} warpgroups take turns, or none: 1"
            )

    @property
    def costs(self) -> Costs:
        """Of a CTA's work while all are busy, products at 0.75 (0.86) of their rate. With these, times of
        whole and of cut tiles come out within a tenth of what was measured on an H200."""
        products = 4 * self.tile_rows * self.block * self.dim // 4096  # clocks
        block = products * self.ctas * (4 if self.dim < 256 else 7) // (3 if self.dim < 256 else 6)
        return Costs(block, 6000 * self.ctas, 3000 * self.ctas, 8000 * self.dim // 128)

    @property
    def most_registers(self) -> int | None:
        """Registers a thread at launch, so that `ctas` fit; `None`: what a lone CTA may have."""
        if self.ctas == 1:
            return None
        warps = 4 * (self.groups + 1)  # the producer's warp counts as four
        return 2**16 // (32 * warps * self.ctas) // 8 * 8

    @property
    def most_sorted(self) -> int:
        """Sequences, with one for padding, that a CTA sorts for itself, as its shared memory allows."""
        return 128 if self.ctas == 1 else 64

    def has_one_copy(self, alibi: bool) -> bool:
        """Whether the consumers share one copy of their code, which takes half as long to compile.

        H200, time with one over time with a copy each: d96, d128, d192 and d256 0.98 to 1.00, ragged d128 1.01 to
        1.02, ragged d256 1.005; d64 in tiles of 192 rows 1.015, which would take 3 s to compile. Left with a copy
        each: d64 in two CTAs, 1.01 to 1.04, and 192 rows with ALiBi, for want of registers.
        """
        return self.dim > 64 or (self.groups == 3 and not alibi)

    def of_few_bits(self) -> Config:
        """For float16, which ends at 2^16: too soon for weights under an anchored maximum."""
        if self.anchored and self.dim == 128 and self.block == 64:  # fewer keys do not pay then
            return PLAIN_128
        return replace(self, anchored=False)

    def rounds(self, num_tiles: int, ctas: int) -> int:
        """How many tiles a CTA takes in turn before it draws."""
        if self.last_rounds is None:
            return 1
        return max(num_tiles // ctas - self.last_rounds, 1)

    @property
    def tile_rows(self) -> int:
        return 64 * self.groups


CONFIGS = {
    64: Config(64, 3, 128, 2, 160, 32, turns=3),
    128: Config(128, 2, 128, 2, 240, 24, turns=2),
    256: Config(256, 2, 64, 2, 232, 40, own_output=False),
}
# Short sequences at head dim 64: tiles of 128 rows waste less than 192, also on the diagonal, and two
# CTAs of two warpgroups overlap each other where a tile has too few blocks to overlap its own.
# H200, share of cuDNN with this, with 128 rows in one CTA and with 192: full s256 1.05, 0.95, 0.70,
# s512 1.05, 0.98, 0.97, s768 1.04, 0.98, 1.11; causal s512 1.12, 0.91, 0.74, s2048 1.09, 0.97, 0.89,
# s8192 1.10, 0.98, 1.11; with anchored maxima this and 192: full s1024 1.23, 1.01, s2048 1.26, 1.12, s8192
# 1.26, 1.28; causal s2048 1.24, 1.01, s8192 1.29, 1.19, s16384 1.31, 1.26.
# A first tile that is loaded early spares calls of this length 1 to 2 us (docs/performance.md): here, and at
# head dim 128 up to 1,024 queries.
SHORT_64 = Config(
    *(64, 2, 64, 4, 104, 24), overlapped=False, ctas=2, sums_in_parts=True, loads_early=True
)
SHORT_Q_LEN = 4096
# Causal calls of one or two tiles of rows: H200, s256, us with releases by a warpgroup and by its threads:
# 30.1, 29.4 (full 31.4, 31.9).
CAUSAL_64 = replace(SHORT_64, by_threads=True)
# More than two tiles of rows: the two CTAs of an SM run at different speeds, so the last two of each
# one's tiles are drawn. H200, share of cuDNN in turn, drawn, the last two drawn: full s512 1.12, 1.15,
# 1.16, s768 1.14, 1.19, 1.20; causal s512 1.23, 1.23, 1.27, s768 1.27, 1.27, 1.27, s2048 -, 1.19, 1.05; s256
# 1.07, -, 0.94.
DRAWN_64 = replace(SHORT_64, anchored=True, dynamic="always", last_rounds=2)
DRAWN_64_Q_LEN = 257
# H200, us with the last 1, 2, 3, 4 of a CTA's tiles drawn: causal s512 58.3 57.0 57.5 57.8, s768 106.4 102.8
# 101.4 101.2; full the same with each.
FEW_LAST_64_Q_LEN = 512
LAST_DRAWN_64_Q_LEN = 768  # longer causal calls need all of their tiles to be even
# One or two tiles of rows at head dim 128, seen whole: tiles of 64 keys start sooner. H200, share of
# cuDNN with 64 and 128 keys: full s256 1.02, 0.96, s512 0.99, 1.03.
SHORT_128 = Config(128, 2, 64, 4, 240, 24, loads_early=True)
SHORT_128_Q_LENS = range(129, 257)
# More than two tiles of rows: the softmax of a tile's first block and the product of its last, which nothing
# overlaps, are half as long with 64 keys, and a block of them under an anchored maximum has 205 instructions,
# less than half of 467. H200, share of cuDNN with 128 keys and a running maximum, with this in turn (causal:
# all drawn), the last 2, 3, 4 drawn: full s512 1.07, 1.10, 1.11, 1.11, 1.11, s768 1.09, 1.11, 1.13, 1.13, 1.13,
# s1024 1.10, -, 1.13, 1.13, 1.13; causal s512 1.04, -, 1.10, 1.10, 1.11, s768 1.11, -, 1.13, 1.15, 1.15, s1024
# 1.09, 1.13, 1.12, 1.13, 1.14, and with sums in parts 1.12, 1.17, 1.14 (full 0.5% less); s2048 1.15, 1.04, causal
# 1.16, 1.15.
DRAWN_128 = replace(
    SHORT_128, anchored=True, by_threads=True, reads_ahead=True, dynamic="always", last_rounds=4
)
DRAWN_128_Q_LEN = 1024
# Causal calls of up to two tiles of rows, and float16 up to 1,024 queries. Share of cuDNN without and with the
# message read ahead: s512 1.07, 1.08, s768 1.09, 1.10, causal 1.02, 1.03, 1.13, 1.14; all and the last two of a
# CTA's causal tiles drawn: s512 0.98, 1.02, s768 1.05, 1.08, s1024 1.05, 1.07, s2048 1.14, 0.91.
PLAIN_128 = replace(CONFIGS[128], reads_ahead=True, last_rounds=2, loads_early=True)
# An anchored maximum saves a third of a block's instructions, and costs a check at a tile's end. H200,
# share of cuDNN without and with it: d64 full s512 1.03, 1.12, s2048 1.10, 1.12, s16384 1.19, 1.29; causal
# s512 1.15, 1.23, s16384 1.17, 1.26; d128 full s512 1.04, 1.02, s2048 1.07, 1.10, s16384 1.07, 1.09; causal
# s768 1.16, 1.12, s2048 1.11, 1.13, s16384 1.23, 1.28; d256 full s2048 1.07, 1.00, s16384 1.11, 1.03, causal
# s16384 1.20, 0.95, where the loops spill: not chosen. Releases by threads, share of cuDNN without and with
# them: d128 full s2048 1.12, 1.15, s16384 1.17, 1.21, causal 1.14, 1.16, s8192 1.30, 1.32; d64 full s8192 1.27,
# 1.28, d256 s512 1.06, 1.06, causal 1.02, 1.03: not chosen, at d64 for it spills where a call has all options.
ANCHORED = {
    dim: replace(config, anchored=True, by_threads=dim == 128) for dim, config in CONFIGS.items()
}
ANCHORED_Q_LEN = 1025
# Head dims up to 192 have the registers for it (two accumulators of 128 + 64 columns). H200, share of cuDNN
# without and with it: b8 s2048 192 full 0.96, 1.00, causal 0.96, 0.99, 192/128 0.99, 1.01, 0.97, 1.00; b2
# s8192 0.98, 1.02, 1.07, 1.12, 1.00, 1.04, 1.10, 1.16; b16 s1024 192 causal 1.00, 1.02.
ANCHORED_192_Q_LEN = 1024
# Functions of the caller take registers that two CTAs do not have.
MODIFIED_64 = replace(SHORT_64, ctas=1, consumer_registers=240, sums_in_parts=False)
# Keys at a time in a second pass over a tile (again.py). It is rare, and a fifth of what is compiled:
# with 64 instead of 16 a shape class takes 7% longer to compile.
AGAIN_ROWS = 16
MOST_TILES_SORTED = 2**15 - 1  # of a head, where CTAs sort sequences: their starts are 16-bit
UNBOUNDED = 2**30  # beyond every length
# Calls of few tiles are cut along their keys, which is worth 10% to 65% where it spares a tenth of the time,
# never so beyond a few tiles a CTA (planning/key_shares.py; docs/performance.md, "Few tiles").
MOST_TILES_CUT = 6  # a CTA
CUT_BELOW = 0.9  # of the clocks of whole tiles
# Where keys and values do not fit into the L2 cache, CTAs at different places along them read more from
# memory: 512 x 32768, 32/8 heads, d128 375 us whole, 458 cut.
CACHED_BYTES = 48 * 2**20
BEYOND_CACHE = 0.75
ALONE = 0.73  # of a block's clocks, where only one of two CTAs that fit on an SM has a tile
# K and V of the heads that are worked on at a time, in bytes: few heads share the L2 cache, many
# make a long list of tiles to balance. Full attention has nothing to balance and takes one head
# after the other. H200, bf16, TFLOP/s:
#   full    one head, 8, 24 MiB   h16 d128 s512 537 526 494, s2048 688 686 658, s16384 702 704 706
#   causal  one head, 8, 24, 64   h16 d128 s512 235 261 321 -, s2048 533 548 542 498,
#                                 s8192 619 629 632 670; h8 d256 s16384 681 680 678 773
SECTION_BYTES = ((1024, 24 * 2**20), (4096, 8 * 2**20), (2**31, 64 * 2**20))  # q_len up to: bytes
# Up to here drawing tiles from a counter costs more than it balances. H200, causal, share of cuDNN
# drawn and in turn: d64 s256 0.97, 1.02, s512 1.15, 1.12, s768 1.16, 1.08; d128 s256 0.87, 0.89,
# s512 0.99, 0.97, s768 1.06, 1.03; d256 s512 1.00, 0.95.
IN_TURN_Q_LEN = 256
# Heads at a time then: long and short tiles come out even. H200, causal s256, us, 8 heads, 16, all that
# share 24 MiB: d64 29.9 31.5 32.0, d128 47.3 48.9 50.6 (cuDNN 33.1 and 47.0).
IN_TURN_HEADS = 8


def config_of(
    k_dim: int,
    v_dim: int,
    q_len: int,
    right: int,
    has_alibi: bool = False,
    has_mods: bool = False,
) -> Config:
    """q_len: of a sequence; of a ragged batch, a typical one."""
    dim = next(dim for dim in CONFIGS if dim >= max(k_dim, v_dim))
    if dim == 64 and has_mods:
        return MODIFIED_64
    if has_alibi or has_mods:  # what they need does not fit into the registers beside the rest
        if dim == 64 and q_len <= SHORT_Q_LEN:
            return SHORT_64
        return replace(CONFIGS[dim], overlapped=dim < 256)
    if dim == 64 and (right >= 0 or q_len <= SHORT_Q_LEN):
        if q_len < DRAWN_64_Q_LEN:
            return CAUSAL_64 if right >= 0 else SHORT_64
        if right >= 0 and q_len > LAST_DRAWN_64_Q_LEN:
            return replace(DRAWN_64, last_rounds=None)
        return DRAWN_64 if q_len <= FEW_LAST_64_Q_LEN else replace(DRAWN_64, last_rounds=4)
    if dim == 128 and right < 0 and q_len in SHORT_128_Q_LENS:
        return SHORT_128
    if dim == 128 and q_len <= DRAWN_128_Q_LEN:
        if q_len <= IN_TURN_Q_LEN:
            return PLAIN_128
        return replace(DRAWN_128, sums_in_parts=right >= 0)
    if dim == 256 and max(k_dim, v_dim) <= 192 and q_len >= ANCHORED_192_Q_LEN:
        return ANCHORED[256]
    return ANCHORED[dim] if dim < 256 and q_len >= ANCHORED_Q_LEN else CONFIGS[dim]


@dataclass(frozen=True)
class Short:
    """How dense calls are run whose keys are one tile, see short/."""

    dim: int
    keys: int  # of a tile, at most
    ctas: int  # of four warps, that share an SM
    rows: int = 64  # of queries in a tile

    @property
    def most_registers(self) -> int:
        return min(2**16 // (128 * self.ctas) // 8 * 8, 255)


# H200, b32 h16 s128, share of cuDNN with this, with SHORT_64 or CONFIGS[128]: d64 full 1.11, 1.02, causal
# 1.17, 1.08; d128 full 1.08, 1.00, causal 1.12, 0.99. 256 keys at d64: full 1.18, 1.10, causal 0.95, 1.13.
SHORT = (Short(64, keys=128, ctas=4), Short(64, keys=256, ctas=2), Short(128, keys=128, ctas=2))
# A causal mask leaves out much of 256 keys, which a tile takes as a whole.
SHORT_CAUSAL = (Short(64, keys=128, ctas=4), Short(128, keys=128, ctas=2))


def short_of(k_dim: int, v_dim: int, kv_len: int, plain: bool, causal: bool) -> Short | None:
    """plain: nothing but a causal mask changes the scores; causal: there is one."""
    if not plain or k_dim != v_dim:
        return None
    shorts = SHORT_CAUSAL if causal else SHORT
    return next((x for x in shorts if x.dim == k_dim and kv_len <= x.keys), None)


def columns_used(tile: int, columns: int) -> int:
    """How many columns of a tile take part in products, the others being zeros: see tile/halves.py."""
    quarters = -(-4 * columns // tile)
    return tile * max(quarters, 2) // 4


def box_columns(tile: int, columns: int) -> int:
    """Of the boxes that a tile is loaded by: 64 where that spares the copy engine writing zeros."""
    used = columns_used(tile, columns)
    return 64 if used < tile and used % 64 == 0 else tile


def heads_at_a_time(dim: int, q_len: int, head_bytes: int) -> int:
    """Key-value heads that causal tiles are taken from before those of others.

    dim: of the tiles; head_bytes: of the keys and values of a head.
    """
    if q_len <= IN_TURN_Q_LEN:
        return IN_TURN_HEADS
    section = next(size for longest, size in SECTION_BYTES if q_len <= longest)
    # H200, b4 s4096, us, 8 MiB and 64: h8 d256 450 396, h32 d64 520 506; h16 d128 421 426, h32/8 d128 772 834.
    if 2048 < q_len <= 4096 and dim != 128:
        section = SECTION_BYTES[-1][1]
    return max(section // head_bytes, 1)


def section_of(
    dim: int, q_len: int, right: int, head_bytes: int, group_size: int, heads: int
) -> int:
    """Query heads, of all sequences together, whose tiles a dense call takes before those of others."""
    together = heads_at_a_time(dim, q_len, head_bytes) if right >= 0 else 1
    return min(together * group_size, heads)


def typical_length(tokens: int, batch: int, longest: int) -> int:
    """Of a ragged batch: most of the work is in sequences longer than the mean."""
    return min(longest, 2 * tokens // max(batch, 1))


def shares_of(
    config: Config,
    heads: int,  # of all sequences together
    q_len: int,
    kv_len: int,
    left: int,
    right: int,
    places: int,  # CTAs at a time
    last_first: bool,  # the kernel counts a sequence's last tile first
    kv_bytes: int,  # of all keys and values
    heads_together: int = 0,  # whose whole tiles are taken before those of others, 0: of all
) -> Shares | None:
    """How a dense call is cut along its keys, or None where whole tiles take about as long."""
    if -(-q_len // config.tile_rows) * heads > MOST_TILES_CUT * places:
        return None
    tiles = [
        blocks_of_keys(row0, config.tile_rows, q_len, kv_len, left, right, config.block)
        for row0 in range(0, q_len, config.tile_rows)
    ]
    if last_first:
        tiles.reverse()
    limit = CUT_BELOW * whole_tiles(tiles, heads, places, config.costs, heads_together or heads)
    if kv_bytes > CACHED_BYTES:
        limit *= BEYOND_CACHE
    if len(tiles) * heads * config.ctas <= places and config.ctas > 1:
        limit *= ALONE
    if least_clocks(tiles, heads, places, config.costs) > limit:
        return None
    shares = share_out(tiles, heads, places, config.costs)
    return shares if shares.clocks <= limit else None
