"""Tile sizes of differential attention, by the dims of keys and values."""

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Config:
    """k_dim, v_dim: of the tiles; smaller dims are filled up with zeros by the copy engine."""

    k_dim: int
    v_dim: int
    block: int  # keys per tile
    stages: int
    turns: int  # 2: the warpgroups take turns at the matrix unit, 1: they do not
    q_stages: int = 2
    consumer_registers: int = 232
    producer_registers: int = 40
    lazy: bool = True
    anchored: bool = (
        False  # the row maximum is that of a tile's first keys, see attention/config.py
    )
    shared_keys: bool = False  # there is room for one ring of keys alone


CONFIGS = (
    Config(64, 64, 128, 2, 2, anchored=True),
    Config(64, 128, 128, 2, 2, anchored=True),
    Config(128, 128, 128, 2, 2, anchored=True, shared_keys=True),
    Config(128, 128, 64, 2, 2),
    Config(128, 256, 64, 2, 1, q_stages=1),
    Config(256, 256, 64, 2, 1, q_stages=1, shared_keys=True),
)
ROWS = 64  # query rows of a tile, the same ones for both warpgroups
WIDEST_OF_TWO = 128  # keys of a pair that are not the same one


def config_of(k_dim: int, v_dim: int, shared_keys: bool, few_bits: bool) -> Config:
    """The smallest that holds them. shared_keys: of both queries of a pair; few_bits: of the exponent,
    as float16 has, too few for weights under an anchored maximum."""
    config = next(
        c
        for c in CONFIGS
        if c.k_dim >= k_dim and c.v_dim >= v_dim and (shared_keys or not c.shared_keys)
    )
    return replace(config, anchored=False) if few_bits else config
