"""Decompositions of matrix products: everything computed once, waits that end, textbook examples."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rooftile.planning.hardware import H200
from rooftile.planning.stream_k import (
    Decomposition,
    Product,
    Tiling,
    data_parallel,
    hybrid,
    joined_k,
    split_k,
    stream_k,
)
from rooftile.planning.stream_k_choice import choose
from rooftile.planning.stream_k_cost import (
    Costs,
    predict,
)
from rooftile.planning.stream_k_timeline import timeline

COSTS = Costs(setup=2.0, iteration=1.0, publish=0.5, fixup=0.5)


@st.composite
def decompositions(draw: st.DrawFn) -> Decomposition:
    product = Product(*(draw(st.integers(1, 700)) for _ in range(3)))
    tiling = Tiling(*(draw(st.sampled_from([16, 32, 64, 128])) for _ in range(3)))
    num_sms = draw(st.integers(1, 40))
    scheme = draw(st.sampled_from(["data-parallel", "split-k", "joined-k", "stream-k", "hybrid"]))
    if scheme == "data-parallel":
        return data_parallel(product, tiling, num_sms)
    if scheme in ("split-k", "joined-k"):
        split = draw(st.integers(1, tiling.iterations(product)))
        cut = split_k if scheme == "split-k" else joined_k
        return cut(product, tiling, tiling.tiles(product) * split + num_sms, split)
    if scheme == "stream-k":
        return stream_k(product, tiling, num_sms)
    return hybrid(product, tiling, num_sms)


@given(decompositions())
def test_every_step_is_computed_once(plan: Decomposition) -> None:
    steps = Counter(
        (segment.tile, step)
        for cta in range(plan.num_ctas)
        for segment in plan.segments(cta)
        for step in range(segment.first, segment.last)
    )
    assert set(steps.values()) == {1}
    assert steps.keys() == {(t, s) for t in range(plan.tiles) for s in range(plan.iterations)}


@given(decompositions())
def test_no_segment_is_empty_and_no_cta_idle(plan: Decomposition) -> None:
    for cta in range(plan.num_ctas):
        segments = list(plan.segments(cta))
        assert segments
        assert all(segment.iterations > 0 for segment in segments)


@given(decompositions())
def test_streamed_shares_differ_by_one_step(plan: Decomposition) -> None:
    shares = [plan.bound(cta + 1) - plan.bound(cta) for cta in range(plan.num_ctas)]
    assert max(shares) - min(shares) <= 1
    assert sum(shares) == plan.stream_tiles * plan.iterations


@given(decompositions())
def test_a_streamed_tile_waits_only_for_what_lower_ctas_publish_first(plan: Decomposition) -> None:
    for tile, ctas in plan.parts.items():
        assert list(ctas) == sorted(ctas)
        for cta in ctas[:-1]:
            assert next(iter(plan.segments(cta))).tile == tile


@given(decompositions())
def test_timelines_end_and_hold_all_the_work(plan: Decomposition) -> None:
    spans = timeline(plan, COSTS)
    computed = sum(span.end - span.start for span in spans if span.kind == "compute")
    segments = sum(1 for cta in range(plan.num_ctas) for _ in plan.segments(cta))
    assert computed == pytest.approx(plan.tiles * plan.iterations + 2.0 * segments)
    published = Counter(span.tile for span in spans if span.kind == "publish")
    added = Counter(span.tile for span in spans if span.kind == "fixup")
    assert published == added
    assert published == {tile: len(ctas) - 1 for tile, ctas in plan.parts.items()}
    last = dict.fromkeys(range(plan.num_ctas), 0.0)
    for span in spans:
        assert span.start == last[span.cta]
        last[span.cta] = span.end


@given(decompositions())
def test_extremes_need_no_walk_through_the_ctas(plan: Decomposition) -> None:
    segments = [list(plan.segments(cta)) for cta in range(plan.num_ctas)]
    steps = max(sum(segment.iterations for segment in one) for one in segments)
    if plan.stream_tiles in (0, plan.tiles):
        assert plan.most.steps == steps
    assert steps <= plan.most.steps <= steps + plan.iterations
    assert 0 <= plan.most.segments - max(map(len, segments)) <= 1
    parts = max((len(ctas) for ctas in plan.parts.values()), default=1)
    assert 0 <= plan.most.parts - parts <= 1


@given(st.integers(1, 400), st.integers(1, 132))
def test_hybrid_tiles_have_at_most_two_parts(tiles: int, num_sms: int) -> None:
    plan = hybrid(Product(64 * tiles, 64, 640), Tiling(64, 64, 32), num_sms)
    if tiles >= num_sms:
        assert all(len(ctas) == 2 for ctas in plan.parts.values())
        assert plan.stream_tiles < 2 * num_sms


def test_nine_tiles_on_four_sms() -> None:
    """Figures 1 and 2 of the paper: 384 x 384 x 128, tiles of 128 x 128, then of 128 x 64."""
    product = Product(384, 384, 128)
    whole, half = Tiling(128, 128, 4), Tiling(128, 64, 4)
    assert data_parallel(product, whole, 4).efficiency(4) == 0.75
    assert data_parallel(product, half, 4).efficiency(4) == 0.90
    streamed = stream_k(product, whole, 4)
    assert streamed.efficiency(4) == 1.0
    assert [streamed.bound(cta) for cta in range(5)] == [0, 72, 144, 216, 288]
    assert streamed.parts == {2: (0, 1), 4: (1, 2), 6: (2, 3)}
    # From its last tile to its first, the part that others need before anything else.
    assert [(s.tile, s.first, s.last) for s in streamed.segments(1)] == [
        (4, 0, 16), (3, 0, 32), (2, 8, 32),
    ]  # fmt: skip


def test_full_waves_stay_whole() -> None:
    plan = hybrid(Product(1024, 1024, 512), Tiling(128, 128, 64), 32)
    assert plan.stream_tiles == 0
    assert plan.parts == {}
    assert choose(Product(128 * 132, 256, 4096), H200).decomposition.scheme == "data-parallel"


def test_a_wave_and_a_bit_is_streamed_or_computed_in_wider_tiles() -> None:
    choice = choose(Product(2176, 2176, 4096), H200, plain=False)
    assert choice.decomposition.scheme in ("hybrid", "stream-k", "split-k")
    wider = choose(Product(2176, 2176, 4096), H200)
    assert wider.decomposition.tiling.is_wide
    assert wider.seconds < choice.seconds
    whole = data_parallel(Product(2176, 2176, 4096), Tiling(128, 256, 64), 132)
    assert choice.seconds < predict(whole, H200)


def test_few_rows_split_k() -> None:
    """One tile of rows and a long K: only a split along K gives all SMs work."""
    choice = choose(Product(16, 4096, 14336), H200)
    assert choice.decomposition.num_ctas > 64


def test_predictions_stay_under_the_machine() -> None:
    for product in (Product(8192, 8192, 8192), Product(16, 4096, 14336), Product(1, 1, 1)):
        seconds = choose(product, H200).seconds
        flops = 2 * product.m * product.n * product.k
        moved = 2 * (product.m * product.k + product.k * product.n + product.m * product.n)
        assert seconds >= flops / H200.matrix_flops
        assert seconds >= moved / H200.bandwidth


def test_bad_calls_name_the_value() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        Product(0, 4, 4)
    with pytest.raises(ValueError, match="split is 9; 64x64x64 has 1 tiles of 8 steps along K"):
        split_k(Product(64, 64, 64), Tiling(64, 64, 8), 16, 9)
    with pytest.raises(ValueError, match="split is 5; .* needs one of 4 SMs"):
        split_k(Product(64, 64, 64), Tiling(64, 64, 8), 4, 5)
    with pytest.raises(ValueError, match="num_ctas is 0"):
        stream_k(Product(64, 64, 64), Tiling(64, 64, 8), 0)
