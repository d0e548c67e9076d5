"""Names of decode cases, and the timelines that are drawn of them."""

from __future__ import annotations

import pytest
from hypothesis import given

from rooftile.planning.decode_case import decode_case
from rooftile.planning.hardware import H200
from rooftile.planning.split_cost import split_spec, tile_clocks
from rooftile.planning.split_timeline import Timeline, equal_splits, naive, planned
from rooftile.types import SplitSpec
from tests.planning.split_batches import Lengths, batches


def test_words() -> None:
    case = decode_case("b64 loguniform128..32k h32/8 d128 page64")
    assert case.q_lens == (1,) * 64
    assert 128 <= min(case.kv_lens) < max(case.kv_lens) <= 32768
    assert case == decode_case(case.name)
    assert (case.num_q_heads, case.num_kv_heads, case.group_size) == (32, 8, 4)
    assert (case.k_dim, case.v_dim, case.page_size, case.window) == (128, 128, 64, -1)
    skewed = decode_case("b3 one4k rest512 q2 h8 d64 fp8 window1k")
    assert skewed.kv_lens == (4096, 512, 512)
    assert skewed.q_lens == (2, 2, 2)
    assert skewed.kv_bytes == (1026 + 2 * 512) * 8 * 128
    shared = decode_case("b3 100 shared64 h8 d64")
    assert (shared.shared, shared.kv_bytes) == (64, (64 + 3 * 36) * 8 * 128 * 2)
    latent = decode_case("b2 100 h16/1 d576/512 qall")
    assert latent.q_lens == latent.kv_lens == (100, 100)
    assert latent.kv_bytes == 200 * 576 * 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("b64 h8 d64", "has no 'keys' word"),
        ("b64 4k h8 d64 4k", "says '4k' after '4k'"),
        ("b64 4k h8 d64 pages", "'pages' is not understood"),
        ("b64 one4k h8 d64", "one and rest go together"),
        ("b64 loguniform9..3 h8 d64", "must go up"),
        ("b64 4k h8/3 d64", "multiple of key-value heads"),
        ("b64 100 shared65 h8 d64", "whole pages before every query"),
        ("b64 64 shared64 h8 d64", "whole pages before every query"),
    ],
)
def test_what_is_not_understood(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        decode_case(text)


def test_tiles_that_are_read_cost_what_reading_takes() -> None:
    # 64 keys of 256 elements in 2 bytes, at 4.8 TB/s over 132 units of 1.83 GHz.
    assert tile_clocks(16, 64, 256, 2) == round(32768 / (4.8e12 / 132 / 1.83e9))
    assert tile_clocks(16, 64, 256, 1) == round(16384 / (4.8e12 / 132 / 1.83e9))
    assert tile_clocks(128, 64, 256, 2) == 2048 + 512


@given(batch=batches())
def test_timelines_do_all_work_once_and_no_sm_does_two_things(
    batch: tuple[SplitSpec, Lengths],
) -> None:
    spec, lengths = batch
    lens = [q for q, _ in lengths], [kv for _, kv in lengths]
    shown = [naive(spec, *lens), equal_splits(spec, *lens), planned(spec, *lens)]
    for timeline in shown:
        last = [0] * spec.num_ctas
        for busy in sorted(timeline.work, key=lambda busy: busy.start):
            assert busy.start >= last[busy.sm]
            last[busy.sm] = busy.end
        assert 0 <= timeline.share_busy <= 1
    whole, _, cut = ({(b.request, b.kv_head) for b in t.work} for t in shown)
    assert whole == cut


def test_a_plan_beats_the_others_where_lengths_are_skewed() -> None:
    case = decode_case("b64 one32k rest512 h32/8 d128")
    spec = split_spec(case, H200)

    def clocks(timeline: Timeline) -> int:
        return timeline.clocks

    assert spec.num_ctas == 132
    assert clocks(planned(spec, case.q_lens, case.kv_lens)) * 5 < clocks(
        naive(spec, case.q_lens, case.kv_lens)
    )
    one = decode_case("b1 64k h32/8 d128")
    spec = split_spec(one, H200)
    split = equal_splits(spec, one.q_lens, one.kv_lens)
    assert split.parts == 8 * 16
    assert clocks(split) * 10 < clocks(naive(spec, one.q_lens, one.kv_lens))
