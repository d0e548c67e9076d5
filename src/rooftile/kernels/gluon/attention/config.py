"""How each head dim and length is run, with the measurement behind each threshold."""

from dataclasses import dataclass


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
    lazy: bool = True
    software_share: int = 0
    own_output: bool = True  # needs shared memory for outputs and a second Q tile
    dynamic: str = "unequal"  # when tiles go to whichever CTA is free: always, unequal, never

    @property
    def tile_rows(self) -> int:
        return 64 * self.groups


CONFIGS = {
    64: Config(64, 3, 128, 2, 160, 32, turns=3),
    128: Config(128, 2, 128, 2, 240, 24, turns=2),
    256: Config(256, 2, 64, 2, 240, 24, own_output=False),
}
# Tiles of 128 rows instead of 192 at head dim 64: less waste at short lengths and on the diagonal.
# H200, share of cuDNN with 128 and 192 rows: full s256 0.91, 0.56, s512 0.96, 0.94, s768 0.97, 1.06;
# causal s512 0.91, 0.74, s2048 0.94, 0.89, s8192 0.98, 1.02.
SHORT_64 = Config(64, 2, 128, 2, 240, 24, turns=2)
SHORT_Q_LEN = 512
SHORT_CAUSAL_Q_LEN = 4096
UNBOUNDED = 2**30  # beyond every length
# K and V of the heads that are worked on at a time, in bytes: few heads share the L2 cache, many
# make a long list of tiles to balance. Full attention has nothing to balance and takes one head
# after the other. H200, bf16, TFLOP/s:
#   full    one head, 8, 24 MiB   h16 d128 s512 537 526 494, s2048 688 686 658, s16384 702 704 706
#   causal  one head, 8, 24, 64   h16 d128 s512 235 261 321 -, s2048 533 548 542 498,
#                                 s8192 619 629 632 670; h8 d256 s16384 681 680 678 773
SECTION_BYTES = ((1024, 24 * 2**20), (4096, 8 * 2**20), (2**31, 64 * 2**20))  # q_len up to: bytes
# Up to here drawing tiles from a counter costs more than it balances (H200, d128 causal, s512:
# 303 against 322 TFLOP/s, s768 411 against 433, s2048 540 against 525).
IN_TURN_Q_LEN = 1024


def config_of(k_dim: int, v_dim: int, q_len: int, right: int) -> Config:
    dim = next(dim for dim in CONFIGS if dim >= max(k_dim, v_dim))
    if dim == 64 and q_len <= (SHORT_CAUSAL_Q_LEN if right >= 0 else SHORT_Q_LEN):
        return SHORT_64
    return CONFIGS[dim]
