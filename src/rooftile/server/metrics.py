"""Prometheus metrics: names as vLLM has them, under the prefix `rooftile:`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from rooftile.engine.outputs import EngineStats, RequestOutput

PREFIX = "rooftile:"
LABEL = "model_name"
SECONDS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 1.5,
    2.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
HISTOGRAMS = {
    "time_to_first_token_seconds": "From a request's arrival to its first token.",
    "inter_token_latency_seconds": "Between two tokens of one sequence.",
    "e2e_request_latency_seconds": "From a request's arrival to its end.",
    "request_queue_time_seconds": "From a request's arrival to its first step.",
    "request_prefill_time_seconds": "From a request's first step to its first token.",
    "request_decode_time_seconds": "From a request's first token to its end.",
}
REASONS = ("stop", "length", "abort", "error")


class Metrics:
    """Histograms and finish reasons are counted as requests end; the rest is read off the engine."""

    def __init__(self, model_name: str) -> None:
        self._model_name = model_name
        self._registry = CollectorRegistry()
        self._histograms = {
            name: Histogram(
                PREFIX + name, help, [LABEL], registry=self._registry, buckets=SECONDS
            ).labels(model_name)
            for name, help in HISTOGRAMS.items()
        }
        success = Counter(
            PREFIX + "request_success",
            "Sequences that ended, by the reason.",
            [LABEL, "finished_reason"],
            registry=self._registry,
        )
        self._success = {reason: success.labels(model_name, reason) for reason in REASONS}
        self._stats: EngineStats | None = None
        self._registry.register(_EngineCollector(self))

    def count(self, output: RequestOutput) -> None:
        """Take a finished request in."""
        times = output.metrics
        self._observe("time_to_first_token_seconds", times.arrival, times.first_token)
        self._observe("e2e_request_latency_seconds", times.arrival, times.finished)
        self._observe("request_queue_time_seconds", times.arrival, times.scheduled)
        self._observe("request_prefill_time_seconds", times.scheduled, times.first_token)
        self._observe("request_decode_time_seconds", times.first_token, times.finished)
        between = self._histograms["inter_token_latency_seconds"]
        for choice in output.outputs:
            for earlier, later in zip(choice.token_times, choice.token_times[1:], strict=False):
                between.observe(later - earlier)
            if choice.finish_reason is not None:
                self._success[choice.finish_reason].inc()

    def _observe(self, name: str, start: float | None, end: float | None) -> None:
        if start is not None and end is not None:
            self._histograms[name].observe(end - start)

    def render(self, stats: EngineStats | None) -> bytes:
        """The text that Prometheus reads; stats: None where the engine cannot be asked."""
        self._stats = stats
        return generate_latest(self._registry)

    def of_engine(self) -> Iterator[Metric]:
        stats = self._stats
        if stats is None:
            return
        usable = max(stats.kv.total, 1)
        for name, help, gauge in (
            ("num_requests_running", "Requests that run.", stats.num_running),
            ("num_requests_waiting", "Requests that wait to run.", stats.num_waiting),
            (
                "kv_cache_usage_perc",
                "KV pages in use (1: all of them).",
                stats.kv.in_use / usable,
            ),
        ):
            metric: Metric = GaugeMetricFamily(PREFIX + name, help, labels=[LABEL])
            metric.add_sample(PREFIX + name, {LABEL: self._model_name}, gauge)
            yield metric
        for name, help, count in (
            (
                "prefix_cache_queries",
                "Tokens looked up in the prefix cache.",
                stats.kv.prefix_queries_tokens,
            ),
            ("prefix_cache_hits", "Of those, found there.", stats.kv.prefix_hit_tokens),
            ("prompt_tokens", "Tokens of prompts.", stats.prompt_tokens),
            ("generation_tokens", "Tokens generated.", stats.generation_tokens),
            ("num_preemptions", "Requests preempted for want of pages.", stats.num_preemptions),
        ):
            metric = CounterMetricFamily(PREFIX + name, help, labels=[LABEL])
            metric.add_sample(f"{PREFIX}{name}_total", {LABEL: self._model_name}, count)
            yield metric


class _EngineCollector:
    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        return self._metrics.of_engine()
