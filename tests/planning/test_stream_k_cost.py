"""Prices of matrix products: bounds, what makes a step dearer, and what recorded times say of choices."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rooftile.bench.ops.gemm_plans import (
    PASSING,
    TILES,
    TURNED,
    Record,
    current,
    level,
    mean_of,
    name_of,
    plan_named,
    pooled,
    read_records,
    replay,
)
from rooftile.planning.hardware import ASCEND_910B, B200, H100, H200
from rooftile.planning.stream_k import Product, data_parallel, product_of
from rooftile.planning.stream_k_bound import bound_of
from rooftile.planning.stream_k_choice import (
    EQUAL,
    candidates,
    choose,
    cuts,
    reason,
    tilings_for,
    wide_tilings,
)
from rooftile.planning.stream_k_cost import (
    WHOLE_LINES,
    clusters,
    counts,
    is_passing,
    predict,
    row_alignment,
    why,
)
from rooftile.planning.stream_k_prices import (
    ALL_SHAPES,
    machinery,
    shape_of,
    tiling_of,
)
from rooftile.planning.tile_width import FILLS, NARROWEST, WIDEST, step_of

RECORDED = Path(__file__).parents[2] / "benchmarks/results/nvidia-h200/gemm_plans.jsonl"
ALIGNMENTS = st.tuples(*[st.sampled_from([16, 32, 64, 128])] * 2)
SIZES = st.integers(1, 9000)


@cache
def recorded() -> list[Record]:
    return level(read_records(RECORDED))


@given(SIZES, SIZES, SIZES, ALIGNMENTS, st.sampled_from([1, 2]))
def test_the_choice_is_the_least_of_all_candidates_or_has_fewer_parts(
    m: int, n: int, k: int, rows: tuple[int, int], itemsize: int
) -> None:
    product, plain = Product(m, n, k), itemsize == 2
    tilings = tilings_for(product, itemsize, plain)
    plans = list(candidates(product, H200.units, tilings))
    times = [predict(plan, H200, itemsize, rows, plain) for plan in plans]
    chosen = choose(product, H200, itemsize, None, rows, plain)
    assert min(times) <= chosen.seconds <= EQUAL * min(times)
    equal = [p for p, time in zip(plans, times, strict=True) if time <= EQUAL * min(times)]
    assert cuts(chosen.decomposition) == min(map(cuts, equal))


@given(SIZES, SIZES, SIZES)
def test_rows_that_begin_inside_lines_and_sectors_cost_more(m: int, n: int, k: int) -> None:
    product = Product(m, n, k)
    for plan in candidates(product, H200.units, tilings_for(product)):
        times = [predict(plan, H200, rows=(unit, unit)) for unit in (128, 64, 32, 16)]
        assert times == sorted(times)
        assert times[1] == times[2]  # sectors are fetched whole
        mixed = predict(plan, H200, rows=(16, 128))
        assert times[0] <= mixed <= times[3]


def test_alignment_of_rows() -> None:
    assert [row_alignment(n) for n in (8192, 128, 192, 160, 176, 2)] == [128, 128, 64, 32, 16, 2]


def test_operands_pass_only_where_few_read_a_line_and_rows_are_whole_lines() -> None:
    def passes(
        case: tuple[int, int, int], rows: tuple[int, int] = WHOLE_LINES, side: int = 128
    ) -> bool:
        plan = data_parallel(Product(*case), tiling_of(side, side, itemsize=2), H200.units)
        return is_passing(plan, 2, rows)

    assert passes((256, 6144, 4096))
    assert not passes((256, 6144, 4096), (128, 16))
    assert not passes((2048, 2048, 2048))
    assert not passes((64, 6144, 4096))
    assert passes((712, 1256, 5568))
    assert not passes((712, 1256, 5568), side=64)


def test_a_name_stands_for_its_plan() -> None:
    for record in read_records(RECORDED):
        for name in record.plans:
            if name.endswith(TILES):
                continue
            plan = plan_named(record.product, name)
            found = name_of(plan, name.startswith(TURNED), name.endswith(PASSING))
            assert found == name.replace("/1k", "k")  # as the first runs wrote it
            assert plan_named(record.product, found) == plan


def test_what_the_busiest_cta_does() -> None:
    plan = data_parallel(Product(300, 300, 640), tiling_of(128, 128, itemsize=2), H200.units)
    found = counts(plan, H200, rows=(32, 16))
    assert (found.clocks, found.received) == (512, 256)
    assert (found.steps, found.scattered, found.stored) == (10, 0, 256)
    assert found.outside == 128 * 3 - 300
    assert found.broken == pytest.approx(256 * 9 / 132)
    assert found.split == pytest.approx(128 * 9 / 132)
    assert found.split_stored == found.stored  # rows of 600 bytes
    pair = data_parallel(Product(256, 256, 640), tiling_of(256, 256, 2, itemsize=2), 66)
    assert counts(pair, H200).received == 384
    assert counts(pair, H200, rows=(64, 64)).broken == pytest.approx(256 * 2 / 132)


def test_results_cost_what_is_stored_and_where_it_begins() -> None:
    def stored(name: str, transposed: bool = False, n: int = 2048) -> tuple[float, float]:
        plan = plan_named(Product(1000, n, 640), name)  # 1000 columns of the transposed: 2000 bytes
        found = counts(plan, H200, transposed=transposed)
        return found.stored / plan.most.segments, found.split_stored / plan.most.segments

    assert stored("128x128 data-parallel") == (256, 0)
    assert stored("128x192 data-parallel") == (384, 0)
    # 160 columns are stored 64 at a time, 32 of them twice; 152 begin inside sectors.
    assert stored("128x160 data-parallel") == (384, 0)
    assert stored("128x152 data-parallel") == (384, 384)
    assert stored("128x128 data-parallel", n=2040) == (256, 256)
    assert stored("128x160 data-parallel", transposed=True) == (384, 384)
    assert stored("64x64 data-parallel") == (64, 0)


def test_ctas_elsewhere_along_k_load_their_lines_alone() -> None:
    product = Product(2176, 2176, 4096)  # 289 tiles of 128 x 128: 157 streamed, then one each
    found = counts(plan_named(product, "128x128 hybrid"), H200)
    assert (found.steps, found.scattered, found.alone) == (77 + 64, 77 + 64, 256)
    large = counts(plan_named(Product(8192, 8192, 8192), "128x128 hybrid"), H200)
    assert large.scattered == large.steps - 30 * 128 + 128  # one of 30 whole tiles
    prices = machinery(H200).prices
    assert prices.step(found, scattered=True) > prices.step(found)
    # Pairs of large tiles multiply for as long as the cache takes.
    pair = counts(plan_named(product, "256x256/2 hybrid"), H200)
    assert prices.step(pair, scattered=True) < 1.02 * prices.step(pair)


def test_operands_that_were_copied_are_loaded_alone() -> None:
    """So that tiles that ask for fewer lines win: as measured on an H200 (gemm_plans of copied operands), 62.5
    microseconds instead of 78.4, 137.8 instead of 159.6, 41.5 instead of 48.8."""
    for case in ("422x4425x4975", "6705x660x6613", "968x1326x5554"):
        product = product_of(case)
        asked = []
        for copied in (False, True):
            best = choose(product, H200, copied=copied)
            plan = best.decomposition
            found = counts(plan, H200, copied=copied)
            assert found.scattered == (found.steps if copied else 0)
            assert best.seconds == predict(plan, H200, plain=True, copied=copied)
            assert best.copied == copied
            asked.append(found.alone * found.steps)
        assert asked[1] < 0.8 * asked[0]
        assert predict(plan, H200, copied=True) > predict(plan, H200)


def test_the_launch_that_adds_parts_is_late_where_no_multiprocessor_is_free() -> None:
    product = Product(128, 128, 32768)
    late = [
        counts(plan_named(product, name), H200).late
        for name in ("64x128 split-k 32", "64x64 split-k 32", "64x64 split-k 33")
    ]
    assert late[0] == 0.0
    assert 0.8 < late[1] < late[2] == 1.0


def test_clusters_that_run_at_one_time() -> None:
    assert [clusters(132, ctas) for ctas in (1, 2, 4, 8)] == [132, 66, 30, 15]
    assert clusters(4, 8) == 1


def test_other_machines_have_prices_at_their_own_clock_and_bandwidth() -> None:
    plan = data_parallel(Product(16, 65536, 8192), tiling_of(64, 128, itemsize=2), 132)
    for machine in (H100, B200, ASCEND_910B):
        prices = machinery(machine).prices
        faster = prices.clock / machinery(H200).prices.clock
        assert faster == pytest.approx(machine.clock / H200.clock)
    assert predict(plan, H100) > predict(plan, H200)
    fewer = replace(H200, units=66)
    assert machinery(fewer).prices == machinery(H200).prices
    assert set(machinery(H200).pace) == set(ALL_SHAPES)


@given(SIZES, SIZES)
def test_tiles_of_any_width_fill_the_machine(m: int, n: int) -> None:
    product = Product(m, n, 640)
    for tiling in wide_tilings(product, H200.units):
        rows, columns = tiling.cta_m, tiling.cta_n
        assert (rows, 0, tiling.sharers, tiling.across) == shape_of(tiling)
        assert columns % 8 == 0
        assert columns // (2 if rows == 64 else 1) % 8 == 0  # of a warpgroup
        assert columns // tiling.sharers % 8 == 0  # that one CTA loads
        assert NARROWEST[rows] <= columns <= WIDEST[rows]
        # As narrow as fill the machine so often, or in so many parts.
        units = clusters(H200.units, tiling.ctas)
        tiles_m, tiles_n = -(-m // tiling.block_m), -(-n // tiling.block_n)
        narrower = columns - step_of(rows, tiling.sharers)
        more = tiles_m * -(-n // (narrower * tiling.across))
        assert any(
            split * tiles_m * tiles_n <= units * turns < split * more for turns, split in FILLS
        )


def test_tiles_of_any_width_need_plain_operands_and_many_rows() -> None:
    product = Product(704, 3712, 3928)
    assert any(x.is_wide for x in tilings_for(product))
    for other in (tilings_for(product, 2, False), tilings_for(Product(64, 3712, 3928))):
        assert other
        assert not any(x.is_wide for x in other)


def test_products_are_turned_where_that_fills_the_machine() -> None:
    """160 rows are 256 in tiles of 128, and the columns of one tile as columns."""
    product = Product(160, 6424, 4624)
    straight = choose(product, H200, 2, None, (32, 32))
    turned = choose(product, H200, 2, None, (32, 32), turnable=True)
    assert not straight.transposed
    assert turned.transposed
    assert turned.decomposition.product == Product(6424, 160, 4624)
    assert turned.seconds < 0.95 * straight.seconds
    assert "transposed" in reason(turned, H200, (32, 32))
    square = choose(Product(1000, 1000, 1000), H200, 2, None, (16, 16), turnable=True)
    assert not square.transposed
    few = choose(Product(64, 4096, 1024), H200, 2, None, (128, 128), turnable=True)
    assert not few.transposed


@given(SIZES, SIZES, SIZES, ALIGNMENTS)
def test_no_plan_takes_less_than_its_bounds(m: int, n: int, k: int, rows: tuple[int, int]) -> None:
    product = Product(m, n, k)
    for tiling in tilings_for(product):
        bound = bound_of(product, tiling, H200)
        for plan in candidates(product, H200.units, [tiling]):
            seconds = predict(plan, H200, 2, rows, True) * (1 + 1e-9)
            assert bound.seconds <= seconds
            assert bound.of(plan) <= seconds


def test_why_says_what_binds() -> None:
    square = data_parallel(Product(4096, 4096, 4096), tiling_of(128, 256, itemsize=2), 132)
    assert "matrix unit" in why(square, H200)
    broken = data_parallel(Product(4096, 4096, 4088), tiling_of(128, 256, itemsize=2), 132)
    assert "inside cache lines" in why(broken, H200, (16, 16))
    few = data_parallel(Product(100, 65536, 4096), tiling_of(128, 256, itemsize=2), 132)
    assert "reading memory" in why(few, H200)
    choice = choose(Product(128, 128, 32768), H200)
    assert "the speed of whole tiles" in reason(choice, H200)


def test_choices_are_near_the_best_of_the_plans_that_were_timed() -> None:
    """Replayed from recorded times of an H200: 17 products of the list, and 200 random ones."""
    found = replay(pooled(current(recorded())))
    assert len(found) > 200
    assert mean_of([x.regret for x in found]) < 1.03
    assert mean_of([x.auto_us / min(x.record.vendor, x.best_us) for x in found]) < 1.02


@pytest.mark.parametrize(
    "case",
    [
        *("8192x8192x8192", "4096x4096x4096", "2048x2048x2048", "1024x1024x1024"),
        *("512x4096x14336", "256x4096x14336", "128x4096x14336", "256x6144x4096"),
        *("1536x1536x8192", "1792x2304x4096", "2176x2176x4096", "3072x3072x3072"),
        *("384x384x16384", "128x128x32768", "640x1280x16384", "4352x2304x2048"),
        "1000x1000x1000",
    ],
)
def test_choices_on_the_list(case: str) -> None:
    runs = [record for record in current(recorded()) if record.case == case]
    (found,) = replay(pooled(runs))
    assert (
        found.regret < 1.13
    )  # 128x4096x14336: tiles of 64x64, but not turned ones, are faster than they cost


def test_a_wrong_price_shows() -> None:
    """The replay can fail: without the prices of what a multiprocessor loads choices lose more."""
    merged = pooled(current(recorded()))
    wrong = replace(machinery(H200).prices, received=0.0, split=0.0, broken=0.0)

    def predicted(record: Record, plan, passing: bool) -> float:  # type: ignore[no-untyped-def]
        found = counts(plan, H200, 2, record.rows, passing)
        return wrong.seconds(found, 1.0)

    right = mean_of([x.regret for x in replay(merged)])
    assert mean_of([x.regret for x in replay(merged, predicted)]) > right + 0.005
