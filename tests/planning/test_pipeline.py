"""The pipeline model against clocks worked out by hand."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rooftile.planning.attention_case import attention_case
from rooftile.planning.cores import CORES, core_of
from rooftile.planning.pipeline import Tile, best_tile, blocks_of, ceiling, pipeline, wasted
from rooftile.planning.timetable import IN_FLIGHT, timetable


def test_hopper_at_head_dim_128_by_hand() -> None:
    line = pipeline(core_of("h200"), Tile(128, 128), 128, 128)
    assert line.busy == pytest.approx(
        {
            "matrix": 2 * (2 * 128 * 128 * 128) / 4096,  # two products: 2048
            "exp": 128 * 128 / 16,  # 1024
            "vector": 128 * 128 * 6 / 128,  # 768
            "L2 read": 2 * 128 * (128 + 128) / (5120 / 132),  # 64 KiB: 1690
        }
    )
    assert line.binds == "matrix"
    assert line.block_clocks == 2048
    assert line.matrix_share == 1
    # Q of 32 KiB and two stages of 64 KiB; float32 scores and outputs of 64 KiB each.
    assert line.tile_bytes == 160 * 1024
    assert line.accumulator_bytes == 128 * 1024
    assert line.fits
    # The first block alone: QK 1024, softmax 1024, PV 1024, after a copy of 1690.
    assert line.tile_clocks(1) == pytest.approx(3072 + 1689.6)
    assert line.tile_clocks(3) == pytest.approx(3072 + 1689.6 + 2 * 2048)
    assert line.tile_clocks(0) == 0


def test_at_head_dim_64_exponentials_cost_what_the_products_cost() -> None:
    line = pipeline(core_of("h100"), Tile(192, 128), 64, 64)
    assert line.busy["exp"] == line.busy["matrix"] == 1536


def test_blackwell_is_bound_by_exponentials_at_256_rows_and_by_reads_at_128() -> None:
    """FlashAttention-4, section 2: as many clocks for exponentials as for products at d128."""
    wide = pipeline(core_of("b200"), Tile(256, 128), 128, 128)
    assert wide.busy["exp"] == wide.busy["matrix"] == 2048
    assert wide.matrix_share == 1
    assert pipeline(core_of("b200"), Tile(128, 128), 128, 128).binds == "L2 read"


def test_ascend_moves_data_between_its_cores_by_hand() -> None:
    line = pipeline(core_of("ascend-910b"), Tile(128, 128), 128, 128)
    scores = 128 * 128
    assert line.busy == pytest.approx(
        {
            "matrix": 2 * 2 * scores * 128 / 8192,  # 1024
            "L2 read": (2 * 128 * 256 + 2 * scores) / 110,  # K, V and weights: 894
            "L2 write": (4 * scores + 4 * 128 * 128) / 86,  # scores, partial outputs: 1524
            "vector read": (4 * scores + 4 * 128 * 128) / 220,
            "vector write": 2 * scores / 128,
            "vector": (6 * scores + 2 * 128 * 128) / 128,  # 1024
            "exp": scores / 128,
        }
    )
    assert line.binds == "L2 write"
    assert line.matrix_share == pytest.approx(1024 / 1524.09, rel=1e-4)
    other = best_tile(core_of("ascend-910b"), 128, 128)
    assert other.binds == "matrix"
    assert other.tile.block > 128  # partial outputs are exchanged once for more keys


def test_on_a_cpu_nothing_overlaps_but_loads() -> None:
    line = pipeline(core_of("cpu"), Tile(64, 64), 64, 64)
    matrix, exp, vector = 4 * 64 * 64 * 64 / 64, 64 * 64 / 1.6, 64 * 64 * 6 / 16
    assert line.block_clocks == matrix + exp + vector
    assert line.matrix_share == pytest.approx(matrix / (matrix + exp + vector))


@given(
    q=st.integers(1, 300), kv=st.integers(0, 300), rows=st.sampled_from([16, 64]),
    block=st.sampled_from([16, 64]), causal=st.booleans(),
)  # fmt: skip
def test_blocks_that_tiles_visit_are_those_with_a_visible_key(
    q: int, kv: int, rows: int, block: int, causal: bool
) -> None:
    def seen(first: int, last: int) -> int:
        keys = [j for j in range(kv) for i in (last,) if not causal or j <= i + kv - q]
        return len({j // block for j in keys})

    tiles = [(r, min(r + rows, q) - 1) for r in range(0, q, rows)]
    assert blocks_of(q, kv, Tile(rows, block), causal) == [seen(*tile) for tile in tiles]


def test_a_call_by_hand() -> None:
    # 2 heads x 3 tiles of 128 rows, causal: 1, 2 and 3 blocks.
    case = attention_case("b1 s384 h2/1 d128 causal")
    line = pipeline(core_of("h200"), Tile(128, 128), 128, 128)
    top = ceiling(line, case)
    assert (top.tiles, top.blocks) == (6, 12)
    once = 3072 + 5 * 0 + 1689.6
    clocks = 2 * (3 * once + (0 + 1 + 2) * 2048)
    assert top.limits["matrix"] == pytest.approx(clocks / 132 / 1.83e9)
    assert top.limits["longest tile"] == pytest.approx((once + 2 * 2048) / 1.83e9)
    assert top.binds == "longest tile"  # six tiles leave most of 132 cores idle
    assert top.tflops == pytest.approx(case.work().flops / top.seconds / 1e12)
    # 384 x 385 / 2 of 6 blocks of 128 x 128 scores.
    assert wasted(case, line.tile) == pytest.approx(1 - 384 * 385 / 2 / (6 * 128 * 128))


@pytest.mark.parametrize("name", CORES)
@given(
    rows=st.sampled_from([64, 128]), block=st.sampled_from([64, 128]), dim=st.sampled_from([64, 128]),
    streams=st.integers(1, 3), blocks=st.integers(1, 12),
)  # fmt: skip
def test_timetables_keep_their_promises(
    name: str, rows: int, block: int, dim: int, streams: int, blocks: int
) -> None:
    line = pipeline(core_of(name), Tile(rows, block), dim, dim)
    events = timetable(line, blocks, streams)
    stages = [stage.name for stage in line.stages]
    for unit in {event.unit for event in events}:
        mine = sorted((e for e in events if e.unit == unit), key=lambda e: e.start)
        assert all(a.end <= b.start + 1e-6 for a, b in pairwise(mine)), unit
    start = {(e.stage, e.block, e.stream): e.start for e in events}
    end: dict[tuple[str, int, int], float] = {}
    for e in events:
        key = (e.stage, e.block, e.stream)
        end[key] = max(end.get(key, 0.0), e.end)
    for stream in range(streams):
        for i in range(blocks):
            for before, after in pairwise(stages[1:]):
                assert start[after, i, stream] >= end[before, i, stream] - 1e-6
            assert start[stages[1], i, stream] >= end[stages[0], i, 0] - 1e-6
            if i >= IN_FLIGHT:
                assert start[stages[1], i, stream] >= end[stages[-1], i - IN_FLIGHT, stream] - 1e-6
    # Never faster than the bound of the steady state.
    assert max(end.values()) >= blocks * line.block_clocks - 1e-6


def test_two_warpgroups_come_within_five_percent_of_the_bound() -> None:
    line = pipeline(core_of("h200"), Tile(128, 128), 128, 128)
    end = max(event.end for event in timetable(line, 60, 2))
    assert end / 60 < 1.05 * line.block_clocks


def test_unknown_machines_are_refused() -> None:
    with pytest.raises(ValueError, match=r"no machine 'h300'; choose from h100, h200, b200"):
        core_of("h300")
    with pytest.raises(ValueError, match="no tile of head dims 8192"):
        best_tile(core_of("h200"), 8192, 8192)
