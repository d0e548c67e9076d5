"""Loading, a dead engine, ending: what clients see, and that nobody hangs."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from rooftile.cli.main import app
from rooftile.engine.async_llm import AsyncLLM
from rooftile.engine.process import EngineProcess
from rooftile.server import run
from rooftile.server.address import bind
from tests.server.live import ONLY_X, LiveServer
from tests.support.gate import wait_until

Make = Callable[..., LiveServer]
LONG: dict[str, Any] = {"prompt": "x", "max_tokens": 150, "ignore_eos": True, **ONLY_X}


def slow_down(server: LiveServer, seconds: float = 0.02) -> None:
    """Make each step of a thread's engine take a while, so that requests stay open."""
    core = server.llm._engine._core  # type: ignore[union-attr]
    step = core.step

    def slow() -> Any:
        time.sleep(seconds)
        return step()

    core.step = slow  # type: ignore[method-assign]


def test_while_the_model_loads(make_engine: Callable[..., AsyncLLM]) -> None:
    gate = threading.Event()

    def load() -> AsyncLLM:
        gate.wait(60)
        return make_engine()

    server = LiveServer(load, wait=False)
    with server.http() as http:
        assert http.get("/health").status_code == 503
        refused = http.post("/v1/completions", json=LONG)
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "loading"
        assert refused.headers["retry-after"] == "1"
        assert http.get("/v1/models").status_code == 503
        assert http.get("/metrics").status_code == 200
        assert http.get("/version").status_code == 200
        assert http.get("/").status_code == 200
        gate.set()
        server.wait_until_ready()
        assert http.get("/health").status_code == 200
        assert http.post("/v1/completions", json=LONG).status_code == 200
    server.end()
    assert server.error is None


def test_a_model_that_cannot_be_loaded_ends_the_server() -> None:
    def load() -> AsyncLLM:
        raise ValueError("no such model")

    server = LiveServer(load, wait=False)
    server.thread.join(60)
    assert str(server.error) == "no such model"


@pytest.mark.parametrize("kind", ["thread", "process"])
def test_a_crash_of_the_engine(make_server: Make, kind: str) -> None:
    server = make_server(kind)
    engine = server.llm._engine
    with server.http() as http, ThreadPoolExecutor() as pool:

        def stream() -> str:
            body = {**LONG, "n": 200, "stream": True}
            with http.stream("POST", "/v1/completions", json=body) as response:
                for line in response.iter_lines():
                    started.set()
                    if '"error"' in line:
                        return line
            return "no error event"

        if kind == "thread":
            slow_down(server)
        started = threading.Event()
        streaming = pool.submit(stream)
        assert started.wait(60)
        # From here on the engine stands still: no request can be answered before the crash.
        go_on = threading.Event()
        if isinstance(engine, EngineProcess):
            os.kill(engine.pid, signal.SIGSTOP)
        else:

            def broken() -> None:
                go_on.wait(120)
                raise MemoryError("secret detail of the engine")

            engine._core.step = broken  # type: ignore[union-attr, assignment]
        whole = [pool.submit(http.post, "/v1/completions", json=LONG) for _ in "ab"]
        wait_until(lambda: server.open_sequences == 202)
        if isinstance(engine, EngineProcess):
            os.kill(engine.pid, signal.SIGKILL)
        go_on.set()
        assert '"code":"engine_dead"' in streaming.result(60)
        for future in whole:
            answer = future.result(60)
            assert answer.status_code == 503
            assert answer.json()["error"]["code"] == "engine_dead"
            assert "secret detail" not in answer.text
        assert http.get("/health").status_code == 503
        assert http.post("/v1/completions", json=LONG).json()["error"]["code"] == "engine_dead"
        assert http.get("/metrics").status_code == 200
    assert server.open_sequences == 0
    server.end()


def test_an_engine_that_dies_while_idle_is_noticed(make_server: Make) -> None:
    server = make_server("process")
    engine = server.llm._engine
    assert isinstance(engine, EngineProcess)
    os.kill(engine.pid, signal.SIGKILL)
    with server.http() as http:
        wait_until(lambda: http.get("/health").status_code == 503)


def test_a_failing_step_is_one_requests_error(make_server: Make) -> None:
    server = make_server()
    runner = server.llm._engine._core._runner  # type: ignore[union-attr]
    launch = runner.launch

    def failing(step: Any) -> Any:
        if any(13 in entry.token_ids for entry in step.entries):
            raise RuntimeError("an unlucky token")
        return launch(step)

    runner.launch = failing  # type: ignore[method-assign]
    with server.http() as http:
        good = {"prompt": [1, 2, 3], "max_tokens": 1}
        bad = http.post("/v1/completions", json={**good, "prompt": [1, 13, 3]})
        assert bad.status_code == 500
        assert "an unlucky token" in bad.json()["error"]["message"]
        body = {**good, "prompt": [1, 13, 3], "stream": True}
        with http.stream("POST", "/v1/completions", json=body) as response:
            assert response.status_code == 500  # nothing was sent before
        assert http.post("/v1/completions", json=good).status_code == 200
    server.assert_idle()


@pytest.mark.parametrize("drain", [600.0, 0.3])
def test_ending_lets_requests_finish_for_a_while(
    make_server: Make, drain: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "LAST_SECONDS", 60.0)
    server = make_server(config={"drain_seconds": drain})

    def stream() -> list[str]:
        body = {**LONG, "stream": True}
        with server.http() as http, http.stream("POST", "/v1/completions", json=body) as response:
            started.set()
            return [line for line in response.iter_lines() if line]

    started = threading.Event()
    with (
        ThreadPoolExecutor() as pool,
        server.http() as kept,
        server.standing_still() as gate,
    ):
        assert kept.get("/health").status_code == 200
        streaming = pool.submit(stream)
        assert started.wait(60)
        whole = pool.submit(kept.post, "/v1/completions", json=LONG)
        server.wait_until_begun(2)
        server.server.end()
        wait_until(lambda: server.server.service.draining)
        if drain == 600.0:
            gate.open()
        lines, answer = streaming.result(60), whole.result(60)
    server.thread.join(60)
    assert lines[-1] == "data: [DONE]"
    if drain == 600.0:
        assert '"finish_reason":"length"' in lines[-2]
        assert answer.status_code == 200
    else:
        assert '"code":"shutting_down"' in lines[-2]
        assert answer.status_code == 503
    assert not server.thread.is_alive()
    assert server.error is None
    with pytest.raises(httpx.ConnectError):
        httpx.get(server.url)


def test_ending_twice_ends_at_once(make_server: Make) -> None:
    server = make_server(config={"drain_seconds": 1000.0})
    with (
        ThreadPoolExecutor() as pool,
        server.http() as http,
        server.standing_still(),
    ):
        whole = pool.submit(http.post, "/v1/completions", json=LONG)
        server.wait_until_begun(1)
        server.server.end()
        wait_until(lambda: server.server.service.draining)
        assert not whole.done()
        server.server.end()
        assert whole.result(60).json()["error"]["code"] == "shutting_down"
    server.thread.join(60)
    assert not server.thread.is_alive()


def test_what_is_being_encoded_when_all_ends_does_not_begin(
    make_server: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = make_server(config={"drain_seconds": 1000.0})
    tokenizer = server.llm.tokenizer
    assert tokenizer is not None
    encode, encoding, go_on = tokenizer.encode, threading.Event(), threading.Event()

    def slow(text: str, add_special_tokens: bool = True) -> list[int]:
        encoding.set()
        assert go_on.wait(60)
        return encode(text, add_special_tokens)

    monkeypatch.setattr(tokenizer, "encode", slow)
    with ThreadPoolExecutor() as pool, server.http() as http:
        whole = pool.submit(http.post, "/v1/completions", json=LONG)
        try:
            assert encoding.wait(60)
            server.server.end()
            server.server.end()
            wait_until(lambda: server.server.service.ended)
        finally:
            go_on.set()
        assert whole.result(60).json()["error"]["code"] == "shutting_down"
    server.thread.join(60)
    assert not server.thread.is_alive()


def test_a_reader_that_never_reads_cannot_keep_it_alive(
    make_server: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "LAST_SECONDS", 1.0)
    server = make_server(config={"drain_seconds": 1.0})
    body = json.dumps({**LONG, "prompt": ["x"] * 100, "logprobs": 20, "stream": True}).encode()
    host, port = server.url.removeprefix("http://").split(":")
    with socket.socket() as reader:
        reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        reader.connect((host, int(port)))
        reader.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n%s" % (len(body), body)
        )
        wait_until(lambda: server.stats().generation_tokens >= 2000)
        server.end()
    assert server.error is None


def test_a_port_is_bound_once() -> None:
    listener = bind("127.0.0.1", 0)
    port = listener.getsockname()[1]
    with pytest.raises(ValueError, match="cannot be used.*another with --port"):
        bind("127.0.0.1", port)
    listener.close()
    bind("127.0.0.1", port).close()
    for elsewhere in ("no.such.host.invalid", "192.0.2.1"):  # no name, and nobody's address
        with pytest.raises(ValueError, match="cannot be used.*another with --host"):
            bind(elsewhere, 0)
    for bad in (70000, -1):
        with pytest.raises(ValueError, match="port is"):
            bind("127.0.0.1", bad)


# ---------------------------------------------------------------------- the command


@pytest.fixture
def serve(tiny_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    running: list[subprocess.Popen[str]] = []

    def start(*options: str) -> subprocess.Popen[str]:
        command = [
            sys.executable, "-c", "from rooftile.cli.main import app; app()", "serve",
            "-m", str(tiny_path), "--random-weights", "--dtype", "float32", "--num-pages", "64",
            "--port", "0", *options,
        ]  # fmt: skip
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        running.append(process)
        return process

    yield start
    for process in running:
        process.kill()
        process.communicate()


def url_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    line = process.stdout.readline()
    found = re.search(r"is ready at (http://\S+)", line)
    assert found is not None, line
    return found[1]


@pytest.mark.parametrize(
    ("number", "kind"), [(signal.SIGTERM, "thread"), (signal.SIGINT, "process")]
)
def test_the_command_ends_with_0(serve: Any, number: signal.Signals, kind: str) -> None:
    process = serve("--engine", kind, "--served-model-name", "mine")
    url = url_of(process)
    assert httpx.get(f"{url}/v1/models").json()["data"][0]["id"] == "mine"
    answer = httpx.post(f"{url}/v1/completions", json={**LONG, "max_tokens": 3})
    assert answer.json()["usage"]["completion_tokens"] == 3
    process.send_signal(number)
    _, log = process.communicate(timeout=120)
    assert process.returncode == 0
    assert "Traceback" not in log
    assert log.count("KV memory holds") == 1
    assert "POST /v1/completions 200" in log


def test_the_command_ends_while_it_loads(serve: Any) -> None:
    process = serve("--engine", "process")
    assert process.stderr is not None
    assert "loading" in process.stderr.readline()
    time.sleep(1.5)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=120)
    assert process.returncode in (0, -signal.SIGTERM)  # the latter before it could listen for it


def test_a_port_in_use_is_one_line(serve: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        process = serve("--port", str(taken.getsockname()[1]))
        _, log = process.communicate(timeout=120)
    assert process.returncode == 1
    assert re.fullmatch(r"error: the address \S+ cannot be used: .*--port\n", log)


def test_a_wrong_engine_option_is_one_line(serve: Any) -> None:
    process = serve("--page-size", "3")
    _, log = process.communicate(timeout=120)
    assert process.returncode == 1
    assert log.endswith("error: page_size is 3; choose a power of two from 1 to 256\n")
    assert "Traceback" not in log


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--engine", "thred"], "engine is 'thred'"),
        (["--max-queue", "-1"], "max_queue is -1"),
        (["--log-level", "loud"], "choose one of debug"),
        (["--api-key", ""], "api_keys has an empty string"),
        (["--port", "99999"], "port is 99999"),
        (["--max-body-mb", "0"], "max_body_bytes is 0"),
        (["--max-body-mb", "inf"], "it must be a finite number"),
        (["--max-body-mb", "nan"], "it must be a finite number"),
        (["--drain-seconds", "inf"], "drain_seconds is inf"),
        (["--drain-seconds", "nan"], "drain_seconds is nan"),
    ],
)
def test_wrong_options_are_refused_before_anything_is_loaded(options: list[str], said: str) -> None:
    result = CliRunner().invoke(app, ["serve", "-m", "demo", *options])
    assert result.exit_code in (1, 2)
    assert said in result.stderr
    assert "Traceback" not in result.output


def test_asyncio_is_not_left_with_tasks(make_server: Make) -> None:
    server = make_server()
    with server.http() as http:
        http.post("/v1/completions", json=LONG)
    server.assert_idle()

    async def count() -> int:
        return len(asyncio.all_tasks())

    def few() -> bool:  # soon: the server, its watch, this one, and the main one
        return asyncio.run_coroutine_threadsafe(count(), server.server._loop).result(60) <= 4

    wait_until(few)
