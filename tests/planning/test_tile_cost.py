"""Prices of whole tiles of the portable kernel, and how deep their rings are."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rooftile.planning.hardware import H200
from rooftile.planning.stream_k import Product
from rooftile.planning.tile_cost import DEEP, STAGES, predict_tiles, stages_of


def test_rings_are_deep_where_no_multiprocessor_has_two_tiles() -> None:
    product = Product(2432, 72, 1176)  # 114 tiles of 64 x 32, 76 of 64 x 64
    assert stages_of(product, 64, 32, 8, 132) == stages_of(product, 64, 64, 8, 132) == DEEP
    assert stages_of(product, 64, 32, 8, 113) == STAGES
    assert stages_of(product, 64, 32, 2, 132) == STAGES  # pieces of four bytes
    assert stages_of(product, 128, 64, 8, 132) == DEEP


def test_no_stage_stays_empty() -> None:
    two_steps = Product(200, 120, 80)  # and a stage that is multiplied
    assert stages_of(two_steps, 64, 16, 8, 132) == 3
    assert stages_of(Product(200, 120, 1), 64, 32, 1, 132) == 2


def test_narrow_tiles_are_known_where_no_multiprocessor_has_two() -> None:
    few, many = Product(1024, 120, 368), Product(1088, 296, 120)  # 128 and 323 tiles of 64 x 16
    narrow, wider = (predict_tiles(few, 64, n, 8, H200) for n in (16, 32))
    assert narrow is not None
    assert wider is not None
    assert narrow < wider  # 5.9 and 6.3 microseconds, measured
    assert predict_tiles(many, 64, 16, 8, H200) is None
    assert predict_tiles(few, 64, 16, 4, H200) is None  # pieces of eight bytes
    assert predict_tiles(replace(few, n=121), 64, 16, 8, H200) is None  # rows of an odd length


@pytest.mark.parametrize(("block_n", "measured"), [(32, 11.0), (64, 11.4)])
def test_a_deep_ring_hides_more(block_n: int, measured: float) -> None:
    product = Product(2432, 72, 1176)
    deep = predict_tiles(product, 64, block_n, 8, H200)
    fewer = predict_tiles(product, 64, block_n, 8, replace(H200, units=75))
    assert deep is not None
    assert fewer is not None
    assert deep * 1e6 == pytest.approx(measured, rel=0.07)
    assert deep < 0.95 * fewer
