"""/metrics: the numbers, against what was asked."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.server.live import LiveServer

HISTOGRAMS = {
    "time_to_first_token_seconds", "inter_token_latency_seconds", "e2e_request_latency_seconds",
    "request_queue_time_seconds", "request_prefill_time_seconds", "request_decode_time_seconds",
}  # fmt: skip


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long the engine takes to answer, its numbers are there."""
    monkeypatch.setattr("rooftile.server.app.STATS_SECONDS", 60.0)


def read(server: LiveServer) -> dict[str, float]:
    """Values by name, the finish reason appended where there is one."""
    with server.http() as http:
        response = http.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    values = {}
    for family in text_string_to_metric_families(response.text):
        for sample in family.samples:
            assert sample.labels["model_name"] == "tiny"
            if "le" not in sample.labels:
                reason = sample.labels.get("finished_reason", "")
                values[sample.name.removeprefix("rooftile:") + reason] = sample.value
    return values


@pytest.mark.parametrize("kind", ["thread", "process"])
def test_the_numbers(make_server: Callable[..., LiveServer], kind: str) -> None:
    server = make_server(kind)
    assert read(server)["generation_tokens_total"] == 0
    with server.http() as http:
        body = {"prompt": "p" * 21, "max_tokens": 9, "ignore_eos": True, "n": 2}
        for _ in range(2):
            assert http.post("/v1/completions", json=body).status_code == 200
    values = read(server)
    expected = {
        "num_requests_running": 0, "num_requests_waiting": 0, "kv_cache_usage_perc": 0,
        "prompt_tokens_total": 42, "generation_tokens_total": 36, "num_preemptions_total": 0,
        "request_success_totallength": 4, "request_success_totalstop": 0,
        "request_success_totalabort": 0, "request_success_totalerror": 0,
        "prefix_cache_hits_total": 20,
        "time_to_first_token_seconds_count": 2, "e2e_request_latency_seconds_count": 2,
        "request_queue_time_seconds_count": 2, "request_prefill_time_seconds_count": 2,
        "request_decode_time_seconds_count": 2, "inter_token_latency_seconds_count": 4 * 8,
    }  # fmt: skip
    assert {name: values[name] for name in expected} == expected
    assert values["prefix_cache_queries_total"] >= 42
    parts = sum(
        values[f"request_{part}_time_seconds_sum"] for part in ("queue", "prefill", "decode")
    )
    assert parts == pytest.approx(values["e2e_request_latency_seconds_sum"], rel=0.05)


def test_the_dashboard_asks_for_metrics_that_exist(
    make_server: Callable[..., LiveServer],
) -> None:
    server = make_server()
    known = set(read(server))
    (file,) = (Path(__file__).parents[2] / "docs" / "grafana").glob("*.json")
    dashboard = json.loads(file.read_text())
    asked = set()
    for panel in dashboard["panels"]:
        for target in panel.get("targets", ()):
            asked |= set(re.findall(r"rooftile:(\w+)", target["expr"]))
    assert asked
    for name in asked:
        base = name.removesuffix("_bucket").removesuffix("_sum").removesuffix("_count")
        assert (
            name in known
            or f"{base}_count" in known
            or any(value.startswith(name) for value in known)
        ), name
    assert {f"{name}_bucket" for name in HISTOGRAMS} <= asked
