"""`rooftile bench serve`: the load it makes, what it measures, servers that misbehave."""

from __future__ import annotations

import asyncio
import json
import math
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path
from statistics import mean, stdev
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from rooftile.bench import serve_load
from rooftile.bench.serve_client import RequestFailed, Target
from rooftile.bench.serve_load import Load, Record, run_load
from rooftile.bench.serve_report import Report, percentile
from rooftile.cli.main import app
from tests.server.conftest import make_engine, make_server, tiny_path  # noqa: F401
from tests.server.live import LiveServer

LOAD = {"num_requests": 6, "input_len": 3, "output_len": 4}


def bench(*options: str) -> Any:
    return CliRunner(env={"COLUMNS": "200"}).invoke(app, ["bench", "serve", *options])


def test_against_our_server(make_server: Callable[..., LiveServer], tmp_path: Path) -> None:  # noqa: F811
    server = make_server(config={"api_keys": ("key",)})
    file = tmp_path / "run.jsonl"
    for more in (["-c", "3"], ["--rate", "200", "--chat"], ["-c", "2", "--vocab-size", "256"]):
        result = bench(
            "--url", server.url, "--api-key", "key", "-n", "8", "--input-len", "4",
            "--output-len", "5", "--json", str(file), *more,
        )  # fmt: skip
        assert result.exit_code == 0, result.output
        assert "tiny at http://127.0.0.1" in result.stdout
        for said in ("(TTFT)", "(ITL)", "(E2E)", "p50", "p99", "requests/s", "new tokens/s"):
            assert said in result.stdout
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    runs = [line for line in lines if line["kind"] == "run"]
    requests = [line for line in lines if line["kind"] == "request"]
    assert (len(runs), len(requests)) == (3, 24)
    for run in runs:
        assert run["output_tokens"] == 8 * 5
        assert run["output_tokens_per_second"] == pytest.approx(40 / run["seconds"])
        for kind in ("ttft", "itl", "e2e"):
            if run[kind]["p50"] is None:  # where all tokens of each answer came at once
                assert kind == "itl"
                continue
            assert 0 < run[kind]["p50"] <= run[kind]["p90"] <= run[kind]["p99"]
        assert run["ttft"]["mean"] < run["e2e"]["mean"]
    assert runs[2]["prompt_tokens"] == 8 * 4  # token ids, so exactly
    for request in requests:
        assert request["start"] < request["events"][0] <= request["events"][-1] <= request["end"]
        assert request["output_tokens"] == 5
    server.assert_idle()


def test_the_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    records = [Record(0.0, [0.1 * i, 0.2 * i], 0.3 * i, 5, 0, 2) for i in range(1, 6)]
    for name in ("plot.png", "plot.svg"):
        Report(Load(concurrency=1, **LOAD), records).plot(tmp_path / name, "a title")
        assert (tmp_path / name).stat().st_size > 5000


def test_the_same_seed_makes_the_same_requests() -> None:
    load = Load(concurrency=2, **LOAD)
    assert load.bodies("m") == load.bodies("m")
    assert load.bodies("m") != Load(concurrency=2, seed=1, **LOAD).bodies("m")
    body = load.bodies("m")[0]
    assert len(body["prompt"].split()) == 3
    assert (body["max_tokens"], body["stream"], body["ignore_eos"]) == (4, True, True)
    plain = Load(concurrency=2, ignore_eos=False, chat=True, **LOAD).bodies("m")[0]
    assert "ignore_eos" not in plain
    assert plain["messages"][0]["role"] == "user"


@pytest.mark.parametrize(
    "change",
    [
        {"num_requests": 0}, {"input_len": 0}, {"output_len": -1}, {"concurrency": 0},
        {"rate": 5.0}, {"concurrency": None}, {"rate": 0.0, "concurrency": None},
        {"vocab_size": 5, "chat": True},
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"is|give|leave"):
        Load(**{"concurrency": 1, **LOAD, **change})


def test_percentiles() -> None:
    assert percentile([3.0], 99) == 3.0
    assert percentile([4.0, 1.0, 2.0, 3.0], 50) == 2.5
    assert percentile(list(map(float, range(101))), 90) == 90.0
    assert math.isnan(percentile([], 50))


@pytest.mark.parametrize(
    ("url", "host", "port", "prefix"),
    [
        ("http://h", "h", 80, ""),
        ("https://h", "h", 443, ""),
        ("http://h:8000/v1", "h", 8000, ""),
        ("http://[::1]:80/a/b/", "::1", 80, "/a/b"),
    ],
)
def test_urls(url: str, host: str, port: int, prefix: str) -> None:
    target = Target.parse(url)
    assert (target.host, target.port, target.prefix) == (host, port, prefix)


@pytest.mark.parametrize("url", ["", "localhost:8000", "ftp://h", "http://", "http://h:port"])
def test_bad_urls(url: str) -> None:
    with pytest.raises(ValueError, match="url is"):
        Target.parse(url)


def test_poisson_arrivals_keep_their_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mean and spread of the gaps are those of an exponential distribution."""
    load = Load(num_requests=400, input_len=1, output_len=1, rate=2000.0)
    now = 5.0

    async def sleep(seconds: float) -> None:
        nonlocal now
        await asyncio.sleep(0)  # the others run
        now += max(seconds, 0.0) + 0.0001  # a little late

    monkeypatch.setattr(serve_load, "time", SimpleNamespace(perf_counter=lambda: now))
    # There alone: servers of other tests sleep as well.
    monkeypatch.setattr(serve_load, "asyncio", SimpleNamespace(**{**vars(asyncio), "sleep": sleep}))

    class Silent(Target):
        async def stream(self, path: str, body: dict[str, Any]) -> Any:  # type: ignore[override]
            yield {"choices": [{"text": "x"}]}

    records = asyncio.run(run_load(Silent("h", 1, False, ""), "m", load))
    assert len(records) == 400
    gaps = [b.start - a.start for a, b in pairwise(records)]
    assert mean(gaps) == pytest.approx(1 / 2000, rel=0.1)  # being late does not add up
    assert stdev(gaps) == pytest.approx(1 / 2000, rel=0.15)


class OddServer(BaseHTTPRequestHandler):
    """Answers by the model's name: what servers do when they are not well."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._send(b'{"data": [{"id": "odd"}]}')

    def do_POST(self) -> None:
        length = int(self.headers["Content-Length"])
        model = json.loads(self.rfile.read(length))["model"]
        event = b'data: {"choices": [{"text": "x"}]}\n\n'
        if model == "plain":  # no usage, an event a part, a comment, ends without [DONE]
            self._parts(event[:9], event[9:], b": keep-alive\n\n", event + event)
        elif model == "error":
            self._parts(event, b'data: {"error": {"message": "it broke"}}\n\n')
        elif model == "cut":
            self._parts(event, end=False)
        elif model == "empty":
            self._parts(b"data: [DONE]\n\n")
        elif model == "garbage":
            self._parts(b"data: {nonsense\n\n")
        elif model == "refused":
            self._send(b'{"error": {"message": "too much"}}', 429)
        else:
            self._send(b"<html>", 502)

    def _send(self, content: bytes, status: int = 200) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def _parts(self, *parts: bytes, end: bool = True) -> None:
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for part in parts:
            self.wfile.write(f"{len(part):x}\r\n".encode() + part + b"\r\n")
        if end:
            self.wfile.write(b"0\r\n\r\n")
        self.close_connection = True

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def odd() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), OddServer)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("error", "it broke"),
        ("cut", "the answer broke off"),
        ("empty", "the answer had no text"),
        ("garbage", "the answer broke off: JSONDecodeError"),
        ("refused", "429: too much"),
        ("other", "502: <html>"),
    ],
)
def test_failures_are_counted_and_said(odd: str, model: str, said: str) -> None:
    result = bench("--url", odd, "--model", model, "-n", "3", "-c", "2", "--warm-up", "0")
    assert result.exit_code == 1
    assert f"3 x {said}" in result.stdout


def test_a_server_without_usage(odd: str) -> None:
    load = Load(concurrency=1, **LOAD)
    records = asyncio.run(run_load(Target.parse(odd), "plain", load))
    assert [(r.error, r.output_tokens, len(r.events)) for r in records] == [(None, 3, 3)] * 6


def test_nobody_there() -> None:
    result = bench("--url", "http://127.0.0.1:1")
    assert result.exit_code == 1
    assert result.stderr.startswith("error: http://127.0.0.1:1: cannot connect")
    with pytest.raises(RequestFailed):
        asyncio.run(Target.parse("http://127.0.0.1:1").get("/v1/models"))


def test_either_concurrency_or_rate() -> None:
    assert bench("-c", "2", "--rate", "3").exit_code == 2
