"""What clients do to a server that they should not, many at once; afterwards nothing may be left."""

from __future__ import annotations

import asyncio
import gc
import json
import random
import socket
from collections.abc import Callable
from typing import Any

import httpx
import psutil
import pytest

from rooftile.bench.serve_client import Target
from rooftile.bench.serve_load import Load, run_load
from tests.server.live import ONLY_X, LiveServer
from tests.support.gate import wait_until

Make = Callable[..., LiveServer]
LONG: dict[str, Any] = {"prompt": "x" * 40, "max_tokens": 110, "ignore_eos": True}


def raw_request(body: dict[str, Any], path: str = "/v1/completions") -> bytes:
    content = json.dumps(body).encode()
    return (
        f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(content)}\r\n\r\n"
    ).encode() + content


def address(server: LiveServer) -> tuple[str, int]:
    host, port = server.url.removeprefix("http://").split(":")
    return host, int(port)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_aborts_its_request(server: LiveServer, stream: bool) -> None:
    aborted = aborted_count(server)
    body = {**LONG, **ONLY_X, "prompt": ["x", "y"], "n": 20, "stream": stream, "max_tokens": 150}
    with server.standing_still():
        with socket.create_connection(address(server)) as connection:
            connection.sendall(raw_request(body))
            if stream:
                assert connection.recv(100)
            server.wait_until_begun(2)
        wait_until(lambda: server.open_sequences == 0)
    server.assert_idle()
    assert aborted_count(server) == aborted + 40


def aborted_count(server: LiveServer) -> float:
    with server.http() as http:
        for line in http.get("/metrics").text.splitlines():
            if line.startswith("rooftile:request_success_total") and 'reason="abort"' in line:
                return float(line.split()[-1])
    raise AssertionError("no such metric")


def test_a_client_that_leaves_before_its_body_is_there(server: LiveServer) -> None:
    for cut in (10, 60, 130, -1):
        with socket.create_connection(address(server)) as connection:
            connection.sendall(raw_request(LONG)[:cut])
    with server.http() as http:
        assert http.get("/health").status_code == 200


def test_a_storm_of_aborts(server: LiveServer) -> None:
    async def leave(http: httpx.AsyncClient, delay: float) -> None:
        try:
            body = {**LONG, "stream": True, "n": 2}
            await asyncio.wait_for(http.post("/v1/completions", json=body), delay)
        except (asyncio.TimeoutError, httpx.HTTPError):
            pass

    async def main() -> None:
        draw = random.Random(1)
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as http:
            await asyncio.gather(*(leave(http, draw.random() * 0.3) for _ in range(80)))

    asyncio.run(main())
    server.assert_idle()
    with server.http() as http:
        assert http.post("/v1/completions", json={**LONG, "max_tokens": 1}).status_code == 200


@pytest.mark.parametrize("many", [{"prompt": ["x"] * 40}, {"n": 40}], ids=["prompts", "samples"])
def test_a_slow_reader_holds_up_nobody(server: LiveServer, many: dict[str, Any]) -> None:
    """It reads nothing until all is generated, far more than the buffers between hold; then all."""
    body = {**LONG, **many, "logprobs": 20, "stream": True}
    with socket.socket() as reader:
        reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        reader.connect(address(server))
        reader.sendall(raw_request(body))
        wait_until(lambda: server.open_sequences == 40)
        with server.http() as http:
            assert http.post("/v1/completions", json={**LONG, "max_tokens": 2}).status_code == 200
        wait_until(lambda: not busy(server))  # the engine is done while nobody reads
        reader.settimeout(60)
        received = b""
        while b"data: [DONE]" not in received[-200:]:
            part = reader.recv(2**16)
            assert part
            received += part
    assert received.count(b'"finish_reason":"length"') == 40


def busy(server: LiveServer) -> bool:
    stats = server.stats()
    return any((stats.num_running, stats.num_waiting, stats.kv.in_use))


def test_500_connections_at_once(server: LiveServer) -> None:
    load = Load(500, input_len=2, output_len=2, concurrency=500)
    records = asyncio.run(run_load(Target.parse(server.url), "tiny", load))
    assert [(record.error, record.output_tokens) for record in records] == [(None, 2)] * 500


def test_idle_connections_are_nothing(server: LiveServer) -> None:
    connections = [socket.create_connection(address(server)) for _ in range(300)]
    for connection in connections[::3]:
        connection.sendall(b"POST /v1/comp")
    with server.http() as http:
        assert http.post("/v1/completions", json={**LONG, "max_tokens": 2}).status_code == 200
    for connection in connections:
        connection.close()


@pytest.mark.parametrize("requests", [60, pytest.param(200, marks=pytest.mark.slow)])
def test_load_with_random_aborts(server: LiveServer, requests: int) -> None:
    """So many requests, 32 at a time, some of which leave; then the books must balance."""
    draw = random.Random(7)
    kinds: list[tuple[str, dict[str, Any]]] = [
        ("/v1/completions", {"prompt": "p" * 30, "n": 2}),
        ("/v1/completions", {"prompt": ["a", "bb"], "stream": True, "logprobs": 2}),
        ("/v1/completions", {"prompt": [1, 2, 3], "echo": True, "logprobs": 1}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "q"}], "stream": True}),
        ("/v1/completions", {"prompt": "bad", "top_p": 7}),
        ("/v1/completions", {"prompt": "b", "use_beam_search": True, "beam_width": 3}),
    ]

    async def ask(http: httpx.AsyncClient, places: asyncio.Semaphore) -> int | None:
        path, body = draw.choice(kinds)
        body = {**body, "max_tokens": draw.randint(1, 40)}
        leaves = draw.random() < 0.3
        async with places:
            try:
                seconds = draw.random() * 0.2 if leaves else 60
                answer = await asyncio.wait_for(http.post(path, json=body), seconds)
            except asyncio.TimeoutError:
                assert leaves
                return None
        if body.get("stream") and answer.status_code == 200:
            assert answer.text.endswith("data: [DONE]\n\n")
            assert '"error"' not in answer.text
        return answer.status_code

    async def main() -> list[int | None]:
        places = asyncio.Semaphore(32)
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as http:
            return await asyncio.gather(*(ask(http, places) for _ in range(requests)))

    statuses = asyncio.run(main())
    assert set(statuses) <= {200, 400, None}
    assert statuses.count(200) > requests / 3
    server.assert_idle()
    kv = server.stats().kv
    assert kv.free + kv.cached + kv.in_use == kv.total


@pytest.mark.slow
def test_memory_stays_flat(make_server: Make) -> None:
    server = make_server()
    process = psutil.Process()

    def rounds(count: int) -> int:
        async def main() -> None:
            async with httpx.AsyncClient(base_url=server.url, timeout=60) as http:
                for _ in range(count):
                    bodies = [{**LONG, "stream": bool(i % 2), "logprobs": 3} for i in range(20)]
                    waits = [http.post("/v1/completions", json=body) for body in bodies]
                    await asyncio.wait_for(asyncio.gather(*waits), 60)

        asyncio.run(main())
        server.assert_idle()
        gc.collect()
        return process.memory_info().rss

    before = rounds(15)
    after = rounds(30)
    assert after - before < 16 * 2**20
