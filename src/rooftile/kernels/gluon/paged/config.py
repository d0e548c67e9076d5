"""How each kind of call is run, with the measurement behind each choice."""

from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True)
class Config:
    """Tile sizes and roles. Measurements: docs/performance.md."""

    dim: int  # of the tiles; smaller head dims are filled up with zeros by the copy engine
    groups: int  # consumer warpgroups of 64 packed rows
    block: int  # keys per tile
    stages: int  # of values, and of keys unless `k_stages` says otherwise
    registers: tuple[int, int]  # of the second consumer, and of the producer
    few: int = 0  # packed rows of an item, where these are columns of products; 0: 64 a group
    ctas: int = 1  # on an SM
    q_stages: int = 2  # tiles of Q of a warpgroup
    k_stages: int = 0  # 0: as many as of values
    own_output: bool = False  # outputs, and keys and values of a second pass, have their own memory
    lazy: bool = True
    anchored: bool = False  # the row maximum is that of an item's last keys: OnlineSoftmax.weigh
    overlapped: bool = True  # the softmax of a tile runs under the product of the one before
    sums_in_parts: bool = False  # lanes exchange their sums once an item, not once a tile
    item_cost: int = 1500  # clocks beyond the tiles
    min_piece: int = 1  # KV tiles
    drawn: bool = False  # shares, or whole strips, go to whichever CTA is free
    loaders: int = 1  # warps that load: 2 have keys and values to themselves
    by_threads: bool = False  # consumers release keys and values thread by thread: see Ring
    in_turns: bool = True  # (overlapped) warpgroups take turns at the matrix unit
    reads_ahead: bool = False  # (overlapped) an item's message is read before the one before ends

    @property
    def tile_rows(self) -> tuple[int, ...]:
        """Sizes of query tiles."""
        rows = self.few or 64
        return tuple(rows * n for n in range(1, self.groups + 1))

    def __post_init__(self) -> None:
        if self.anchored and not self.own_output:
            raise ValueError("an anchored maximum needs own_output: the memory of its second pass")
        if self.reads_ahead and not self.overlapped:
            raise ValueError("reads_ahead is for overlapped tiles: under an item's last product")
        if self.q_stages == 1 and self.loaders == 2 and not self.own_output:
            raise ValueError(
                "with one tile of queries and two loaders the next item's queries come while an output "
                "leaves: set own_output, or q_stages to 2"
            )
        if self.k_stages not in (0, self.stages) and (self.loaders == 1 or not self.overlapped):
            raise ValueError(
                f"k_stages is {self.k_stages} and stages {self.stages}; they may differ where keys and "
                f"values have a warp each, and are overlapped"
            )

    @property
    def most_registers(self) -> int | None:
        """Registers a thread at launch, so that `ctas` fit; `None`: what a lone CTA may have."""
        if self.ctas == 1:
            return None
        warps = 4 * (self.groups + 1)  # the producers' warps count as four
        return 2**16 // (32 * warps * self.ctas) // 8 * 8


UNBOUNDED = 2**30  # beyond every length
# For each head dim, by packed rows of the longest request. H200, bf16, page 16, 32/8 heads, us with one CTA
# of 6 stages, one of 3 stages of 128 keys, two of 3 stages: b32 4k 145 144 136, b128 8k 1005 989 975, b64 of
# 128 to 32k 336 326 320. One producer warp cannot issue 16 boxes of a page each as fast as memory delivers
# them. Two of 3 and of 2 stages: b32 4k 136 135, b128 8k 969 948: what is in flight beyond need only waits.
SMALL = {
    64: (
        Config(64, 1, 64, 6, (0, 64), few=8, ctas=2),
        Config(64, 1, 64, 5, (0, 64), few=16, ctas=2),
        Config(64, 1, 64, 6, (0, 64), ctas=2, q_stages=1),
    ),
    128: (
        Config(128, 1, 64, 2, (0, 64), few=8, ctas=2),
        Config(128, 1, 64, 2, (0, 64), few=16, ctas=2, q_stages=1),
        Config(128, 1, 64, 2, (0, 64), ctas=2, loaders=2),
    ),
    256: (
        Config(256, 1, 64, 3, (0, 112), few=8),
        Config(256, 1, 64, 3, (0, 112), few=16, q_stages=1),
        Config(256, 1, 64, 3, (0, 112), q_stages=1),
    ),
}
# A few long strips: half as many parts to merge. H200, us beside the first of the above: b1 8k 18.9 19.5,
# b1 64k 71.2 72.1, b8 8k 70.9 70.9.
FEW_STRIPS = 32
LONG = {128: Config(128, 1, 128, 2, (0, 112), few=8)}
# Prefill. H200, b2 s8192 32/8 causal and full, share of dense attention with strips cut into equal shares,
# drawn, and drawn with two loaders: page 64 0.83 -, 0.96 0.96, 0.95 0.98; page 16 drawn 0.86 0.85, with two
# loaders 0.89 0.94. What was cut read the keys of all heads at once, and did not find them in the L2 cache.
# Head dim 64 in the short tiles of dense attention, one loader and two: page 64, causal b8 s2048 0.95 0.94, b16
# s1024 0.93 0.92; page 16 0.94 0.93, 0.90 0.90. In the tiles of 128 keys before: 0.87. Head dim 128, us with
# releases by warpgroups and by threads: page 64 b8 s2048 451 444, b2 s8192 1617 1554, b1 s16384 3271 3134; page 16
# 453 447, 1653 1600, 3450 3260.
LARGE = {
    64: Config(
        64, 2, 64, 4, (104, 32), ctas=2, drawn=True, anchored=True, overlapped=False,
        sums_in_parts=True, own_output=True,
    ),
    128: Config(
        128, 2, 128, 2, (224, 56), drawn=True, loaders=2, anchored=True, own_output=True, by_threads=True,
    ),
    256: Config(256, 2, 64, 2, (224, 56), q_stages=1, drawn=True),
}  # fmt: skip
# Small pages, whose keys are many boxes: a third stage of keys in the place of the second tile of queries, which
# are loaded behind the values. Share of dense without and with it: page 16, causal b8 s2048 0.92 0.94, b2 s8192
# 0.93 0.95, b1 s16384 0.94 0.96, full b2 s8192 0.95 0.97; page 64, causal 0.98 0.97, 0.99 0.97, 0.99 0.98. An
# item's end takes 1,000 clocks more, and short strips have many ends: us without and with, b16 s1024 292 and 303,
# b8 s2048 457 and 460, 477 and 465, b4 s4096 881 and 867, b2 s8192 1696 and 1673. At head dim 64 releases by threads,
# us without and with: page 16 b8 s2048 274 273, b2 s8192 1005 989, page 64 270 270, 950 953.
SMALL_PAGE = 64  # keys
SMALL_PAGE_Q_LEN = 2048  # query tokens of the longest request, from which on
SMALL_PAGES = {
    LARGE[64]: replace(LARGE[64], by_threads=True),
    LARGE[128]: replace(LARGE[128], registers=(232, 40), k_stages=3, q_stages=1),
}
# Requests of few queries and keys, as dense attention has them: the first softmax and the last product of an item,
# which nothing overlaps, are half as long with 64 keys, and twice as many stages hide how long boxes take. H200, us
# with 128 keys under a running maximum, with this, without the message ahead, and with one loader: b16 s1024 page 64
# 269 255 257 254, page 16 281 262 263 289 (dense 243).
SHORT = {
    LARGE[128]: replace(LARGE[128], block=64, stages=4, in_turns=False, reads_ahead=True),
}
SHORT_LEN = 1024  # query tokens, and keys, of the longest request, up to which
# Query tokens of a request from which on an anchored maximum pays, causal and full, by head dim and keys of a tile.
# Share of dense without and with it: page 64, causal b16 s1024 0.97 0.96, b8 s2048 0.94 0.96.
ANCHORED = {(64, 64): (1024, 1024), (128, 128): (1025, 1024), (128, 64): (0, 0)}
NEVER_ANCHORED = (UNBOUNDED, UNBOUNDED)
# Pages of 8-bit numbers, whose boxes are 128 columns wide. One CTA of 6 stages of 128 keys, two of 5
# of 64, two of 3 of 128: b32 4k 85 82 80, b128 8k 529 521 527, b64 of 128 to 32k 198 190 180. Two of 3 and 2
# stages of 128: b32 4k 77.5 74.9, b128 8k 494 492.
QUANTISED = {
    128: (
        Config(128, 1, 128, 2, (0, 56), few=8, ctas=2),
        Config(128, 1, 64, 5, (0, 64), few=16, ctas=2),
        Config(128, 2, 64, 8, (224, 56), few=32, drawn=True),
    ),
    256: (
        Config(256, 1, 64, 2, (0, 64), few=8, ctas=2),
        Config(256, 1, 64, 5, (0, 112), few=16),
        Config(256, 1, 64, 5, (0, 112), few=32),
    ),
}
# Most rows of a query tile where requests share prefixes, us with tiles of 64 rows and two CTAs an SM beside
# 128 rows and one: 64 requests, 1k shared, 256 own 40.7 48.4; 256, 2k, 128 82.7 91.4; 32, 8k, 256 42.0 45.3.
SHARED_ROWS = 64
# Clocks of an item beyond its tiles in that case, 2500, 2750, 2870, 3000, 3250: 64 requests, 8k shared, 256 own 43.1
# 41.3 42.9 43.6 43.8, 256, 2k, 128 62.1 61.6 63.3 62.6 62.8.
SHARED_ITEM_COST = 2750


def config_of(
    k_dim: int, v_dim: int, packed_rows: int, quantised: bool, batch_invariant: bool = False,
    strips: int = UNBOUNDED, few_keys: bool = False,
) -> Config:  # fmt: skip
    """packed_rows: of the longest request, query tokens times heads of a group.

    strips: of one query tile each, requests times kv heads; few_keys: see `has_few_keys`.
    With batch_invariant one configuration serves all of them, so that none depends on the others.
    """
    by_dim = QUANTISED if quantised else SMALL
    dim = next(dim for dim in by_dim if dim >= max(k_dim, v_dim))
    largest = by_dim[dim][-1]
    if batch_invariant or packed_rows > largest.tile_rows[-1]:
        config = largest if quantised else LARGE[dim]
        return SHORT.get(config, config) if few_keys and not batch_invariant else config
    if not quantised and dim in LONG and packed_rows <= LONG[dim].few and strips <= FEW_STRIPS:
        return LONG[dim]
    return next(config for config in by_dim[dim] if config.tile_rows[-1] >= packed_rows)


def of_pages(config: Config, page_size: int, max_q_len: int) -> Config:
    """The same for pages of `page_size` keys; plans do not depend on it."""
    many = page_size < SMALL_PAGE and max_q_len >= SMALL_PAGE_Q_LEN
    return SMALL_PAGES.get(config, config) if many else config


def has_few_keys(dtype: torch.dtype, max_q_len: int, max_kv_len: int) -> bool:
    """Whether requests have so few queries and keys that tiles of fewer keys pay. They do under an anchored
    maximum only, whose weights float16 cannot hold."""
    return dtype == torch.bfloat16 and max(max_q_len, max_kv_len) <= SHORT_LEN


def anchored_from(config: Config, right: int) -> int:
    """Query tokens of a request from which on an anchored maximum pays; right: of the window."""
    causal, full = ANCHORED.get((config.dim, config.block), NEVER_ANCHORED)
    return causal if right >= 0 else full


def longest_tile(k_dim: int, v_dim: int) -> int:
    """The most keys of a tile that calls of these dims may have; other tiles divide it."""
    dim = next(dim for dim in SMALL if dim >= max(k_dim, v_dim))
    return max(config.block for config in (*SMALL[dim], LARGE[dim]))
