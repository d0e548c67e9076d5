"""Timing, checking and recording of contenders, with clocks and engines that we control."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from rooftile.bench import measure as measuring
from rooftile.bench.failure import MeasurementFailed
from rooftile.bench.host import Host
from rooftile.bench.measure import Timing, measure, quantile
from rooftile.bench.model_cost import least_seconds
from rooftile.bench.results import Result, append, check_writable
from rooftile.bench.workloads import WORKLOADS, Request
from rooftile.models.config import AttentionSpec, DecoderConfig, LayerSpec, MlpSpec, MoeSpec
from rooftile.planning.hardware import Machine


class Clock:
    now = 0.0

    def perf_counter(self) -> float:
        return self.now


class Fake:
    def __init__(self, name: str, clock: Clock, log: list[str], seconds: list[float]) -> None:
        self.name, self.clock, self.log, self.seconds = name, clock, log, iter(seconds)
        self.runs: list[list[Request]] = []
        self.short = 0

    def run(self, requests: Sequence[Request], temperature: float) -> list[int]:
        self.log.append(self.name)
        self.runs.append(list(requests))
        self.clock.now += next(self.seconds)
        return [r.max_tokens * r.n - self.short for r in requests]


def draw(seed: int) -> list[Request]:
    return WORKLOADS["decode8"].requests(5000, seed=seed, num_requests=2)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(measuring, "time", clock)
    return clock


def test_contenders_take_turns_on_the_same_requests(clock: Clock) -> None:
    log: list[str] = []
    a = Fake("a", clock, log, [100.0, 2.0, 4.0, 3.0])
    b = Fake("b", clock, log, [50.0, 8.0, 8.0, 16.0])
    ours, peer = measure([a, b], WORKLOADS["decode8"], draw, repeats=3)
    assert log == ["a", "b"] * 4
    assert a.runs == b.runs
    assert a.runs[1] != a.runs[2]  # a prefix cache cannot answer a repeat
    assert {r.max_tokens for r in a.runs[0]} == {measuring.WARM_UP_TOKENS}
    assert ours.seconds == (2.0, 4.0, 3.0)  # the warm-up does not count
    assert ours.rates == [128.0, 64.0, pytest.approx(256 / 3)]
    assert ours.rate == pytest.approx(256 / 3)
    assert peer.rate == 32.0


def test_what_counts() -> None:
    requests = [Request((1, 2, 3), 5, 2), Request((1,), 4)]
    counted = [measuring.counted_tokens(requests, m) for m in ("prefill", "output", "total")]
    assert counted == [4, 14, 18]


def test_missing_tokens_void_the_result(clock: Clock) -> None:
    fake = Fake("a", clock, [], [1.0])
    fake.short = 1
    with pytest.raises(MeasurementFailed, match="a made 3 tokens for request 0 instead of 1 x 4"):
        measure([fake], WORKLOADS["decode8"], draw, repeats=1)


def test_repeats_are_checked(clock: Clock) -> None:
    with pytest.raises(ValueError, match="repeats is 0"):
        measure([], WORKLOADS["decode8"], draw, repeats=0)


def test_quantiles() -> None:
    assert quantile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert quantile([1.0, 2.0], 0.2) == pytest.approx(1.2)
    assert Timing("a", (1.0, 3.0), (10, 10)).microseconds() == 2e6


HOST = Host("Some CPU", 2, {}, 0, 0, ())


def result(share: float | None) -> Result:
    return Result(
        suite="engine", case="m decode8", kernel="rooftile", us=2e6, us_p20=1e6, us_p80=3e6,
        tokens_per_second=64.0, counted="output", repeats=3, threads=2, roofline_share=share,
        bound="memory", peers={"transformers": 4e6},
    )  # fmt: skip


def test_results_are_appended_as_lines(tmp_path: Path) -> None:
    for _ in range(2):
        path = append(result(0.5), HOST, tmp_path)
    assert path == tmp_path / "some-cpu-2-cores" / "engine.jsonl"
    first, second = (json.loads(line) for line in path.read_text().splitlines())
    assert first["case"] == second["case"] == "m decode8"
    assert first["peers"] == {"transformers": 4e6}
    assert first["gpu"] is None
    assert first["cpu"] == "Some CPU, 2 cores"
    assert {"commit", "date", "versions"} <= set(first)


def test_a_place_that_cannot_be_written_is_refused_at_once(tmp_path: Path) -> None:
    check_writable(HOST, tmp_path / "new" / "place")
    (tmp_path / "file").touch()
    for root in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ValueError, match=r"cannot be written: .*; give --output another"):
            check_writable(HOST, root)


def test_faster_than_the_roofline_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"1\.20 of the roofline"):
        append(result(1.2), HOST, tmp_path)
    assert not list(tmp_path.rglob("*.jsonl"))


CONFIG = DecoderConfig(
    layers=(LayerSpec(AttentionSpec(num_heads=2, num_kv_heads=1, head_dim=4), MlpSpec(6)),) * 3,
    hidden=8,
    vocab_size=10,
    max_position=100,
)


def test_least_time_of_a_workload_by_hand() -> None:
    # One prompt of 1 token and one answer token: 3 layers and the head, 1 token each.
    # Linear FLOPs: qkv 8 x 16, o 8 x 8, up and gate 8 x 12, down 6 x 8, head 8 x 10.
    flops = 2 * (3 * (8 * 16 + 8 * 8 + 8 * 12 + 6 * 8) + 8 * 10)
    attention = 3 * 2 * 2 * (4 + 4)  # 1 pair, 2 heads
    slow = Machine("slow", 1, 1.0, 1.0, 1e9, 1e9)  # 1 FLOP/s, all else for free
    bound = least_seconds(CONFIG, [Request((1,), 1)], slow)
    assert bound is not None
    assert bound.unit == "matrix"
    assert bound.seconds == pytest.approx(flops + attention)


def test_a_mixture_counts_the_experts_that_a_token_takes() -> None:
    slow = Machine("slow", 1, 1.0, 1.0, 1e9, 1e9)
    layer = replace(CONFIG.layers[0], mlp=MoeSpec(num_experts=5, top_k=2, intermediate=6))
    mixture = least_seconds(replace(CONFIG, layers=(layer,)), [Request((1,), 1)], slow)
    dense = least_seconds(replace(CONFIG, layers=CONFIG.layers[:1]), [Request((1,), 1)], slow)
    assert mixture is not None
    assert dense is not None
    one_expert = 2 * (8 * 12 + 6 * 8)
    assert mixture.seconds == pytest.approx(dense.seconds + one_expert + 2 * 8 * 5)


def test_decode_steps_read_the_weights_each() -> None:
    narrow = Machine("narrow", 1, 1e12, 1.0, 1e9, 1.0)  # 1 byte/s
    one = least_seconds(CONFIG, [Request((1,), 1)], narrow)
    three = least_seconds(CONFIG, [Request((1,), 3)], narrow)
    assert one is not None
    assert three is not None
    assert three.unit == "memory"
    # The KV of one more token in each step: 2 bytes x (4 + 4), 3 layers.
    assert three.seconds == pytest.approx(3 * one.seconds + (1 + 2) * 3 * 16)


def test_shared_kv_has_no_bound() -> None:
    machine = Machine("any", 1, 1.0, 1.0, 1.0, 1.0)
    assert least_seconds(CONFIG, [Request((1,), 1, n=2)], machine) is None
    assert least_seconds(CONFIG, [Request((1, 2), 1)] * 2, machine) is None
