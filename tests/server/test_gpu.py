"""`rooftile serve` on a GPU: a child process that answers, streams, is left by clients, and ends."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from tests.engine.conftest import write_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
WIDE = {"hidden_size": 128, "head_dim": 32, "num_attention_heads": 4, "intermediate_size": 256}
LONG = {"max_position_embeddings": 2048}
MODEL = "tiny-on-gpu"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[subprocess.Popen[str], str]]:
    path = write_model(tmp_path_factory.mktemp("tiny"), **WIDE, **LONG)
    process, url = start(path)
    yield process, url
    process.kill()
    process.communicate()


def start(path: Path) -> tuple[subprocess.Popen[str], str]:
    command = [
        sys.executable, "-c", "from rooftile.cli.main import app; app()", "serve",
        "-m", str(path), "--random-weights", "--device", "cuda", "--num-pages", "400",
        "--max-num-seqs", "32", "--port", "0", "--served-model-name", MODEL,
    ]  # fmt: skip
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # so that a process it leaves behind can be found
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    found = re.search(r"is ready at (http://\S+)", line)
    if found is None:
        process.kill()
        pytest.fail(f"{line}{process.communicate()[1]}")
    return process, found[1]


def gauge(http: httpx.Client, name: str) -> float:
    for line in http.get("/metrics").text.splitlines():
        if line.startswith(f"rooftile:{name}{{"):
            return float(line.split()[-1])
    raise AssertionError(f"no metric {name}")


def assert_idle(http: httpx.Client) -> None:
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    deadline = time.monotonic() + 20
    while any(left := [gauge(http, name) for name in names]):
        assert time.monotonic() < deadline, dict(zip(names, left, strict=True))
        time.sleep(0.05)


def test_it_answers_and_streams(served: tuple[subprocess.Popen[str], str]) -> None:
    with httpx.Client(base_url=served[1], timeout=60) as http:
        assert http.get("/v1/models").json()["data"][0]["id"] == MODEL
        body: dict[str, Any] = {
            "model": MODEL, "prompt": "Once upon", "max_tokens": 1000, "temperature": 0,
            "ignore_eos": True,
        }  # fmt: skip
        whole = http.post("/v1/completions", json=body).json()
        assert whole["usage"]["completion_tokens"] == 1000
        assert whole["choices"][0]["finish_reason"] == "length"
        with http.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
            lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
        assert lines[-1] == "[DONE]"
        chunks = [json.loads(line)["choices"] for line in lines[:-1]]
        assert len(chunks) > 5  # as it grows
        text = "".join(choices[0]["text"] for choices in chunks if choices)
        assert text == whole["choices"][0]["text"]
        chat = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5}
        assert http.post("/v1/chat/completions", json=chat).json()["choices"][0]["message"]
        assert_idle(http)


def test_a_storm_of_clients_of_whom_many_leave(served: tuple[subprocess.Popen[str], str]) -> None:
    url = served[1]
    draw = random.Random(0)
    plans = [
        (draw.randrange(1, 100), draw.randrange(1, 50), draw.choice([1, 1, 3]), draw.random() < 0.4)
        for _ in range(300)
    ]

    def ask(plan: tuple[int, int, int, bool]) -> int:
        length, tokens, n, leaves = plan
        body = {
            "model": MODEL, "prompt": "x" * length, "max_tokens": tokens, "n": n,
            "temperature": 0.8, "top_p": 0.9, "ignore_eos": True,
        }  # fmt: skip
        with httpx.Client(base_url=url, timeout=60) as http:
            if not leaves:
                answer = http.post("/v1/completions", json=body)
                assert answer.status_code == 200, answer.text
                return int(answer.json()["usage"]["completion_tokens"]) - n * tokens
            with http.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
                for _ in response.iter_lines():
                    break  # the client leaves in the middle
        return 0

    with ThreadPoolExecutor(48) as clients:
        assert set(clients.map(ask, plans)) == {0}
    with httpx.Client(base_url=url, timeout=60) as http:
        assert_idle(http)


def test_it_ends_and_leaves_nothing(served: tuple[subprocess.Popen[str], str]) -> None:
    """The last of the module: the engine's process ends with the server's."""
    process, _ = served
    group = os.getpgid(process.pid)
    process.send_signal(signal.SIGTERM)
    _, log = process.communicate(timeout=30)
    assert process.returncode == 0, log
    assert "Traceback" not in log
    deadline = time.monotonic() + 10
    while True:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return
        assert time.monotonic() < deadline, "a process is left"
        time.sleep(0.05)
