"""Keys, the queue's limit, what the log holds."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import httpx
import openai
import pytest

from tests.server.live import LiveServer

Make = Callable[..., LiveServer]
BODY: dict[str, Any] = {"prompt": "secret prompt", "max_tokens": 2}


def test_keys(make_server: Make) -> None:
    server = make_server(config={"api_keys": ("first", "zweiter-schlüssel")})
    with server.http() as http:
        for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
            refused = http.post(path, json=BODY)
            assert refused.status_code == 401
            assert refused.headers["www-authenticate"] == "Bearer"
            assert refused.json()["error"]["code"] == "invalid_api_key"
        assert http.get("/v1/models").status_code == 401
        for open_path in ("/health", "/metrics", "/version", "/", "/openapi.json"):
            assert http.get(open_path).status_code == 200
        for given, status in (
            ("Bearer first", 200), ("bearer first", 200), ("Bearer  first", 200),
            ("Bearer zweiter-schlüssel", 200), ("Bearer firs", 401), ("Bearer first1", 401),
            ("Bearer", 401), ("first", 401), ("Basic first", 401),
            ("Bearer \xff\xfe", 401),
        ):  # fmt: skip
            answer = http.post(
                "/v1/completions", json=BODY, headers={"Authorization": given.encode()}
            )
            assert answer.status_code == status, given
    assert server.openai(api_key="first").models.list().data[0].id == "tiny"
    with pytest.raises(openai.AuthenticationError):
        server.openai(api_key="wrong").models.list()


def test_a_key_is_asked_for_before_the_body_is_read(make_server: Make) -> None:
    server = make_server(config={"api_keys": ("key",)})
    with server.http() as http:
        assert http.post("/v1/completions", content=b"x" * 2**20).status_code == 401


def test_a_full_queue(make_server: Make) -> None:
    server = make_server(config={"max_queue": 2}, max_num_seqs=2)
    body = {"prompt": "x", "max_tokens": 150, "ignore_eos": True}

    async def main() -> list[httpx.Response]:
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as http:
            posts = [http.post("/v1/completions", json=body) for _ in range(12)]
            answers = []
            with server.standing_still() as gate:
                for answer in asyncio.as_completed(posts):
                    answers.append(await answer)
                    if len(answers) == 8:
                        gate.open()
            return answers

    answers = asyncio.run(main())
    assert [answer.status_code for answer in answers] == [429] * 8 + [200] * 4
    refused = answers[0]
    assert refused.json()["error"]["code"] == "queue_full"
    assert refused.headers["retry-after"] == "1"
    with server.http() as http:
        never = http.post("/v1/completions", json={**body, "prompt": ["x"] * 5})
        assert (never.status_code, never.json()["error"]["param"]) == (400, "prompt")
        assert http.post("/v1/completions", json={**body, "max_tokens": 1}).status_code == 200
    server.assert_idle()


@pytest.mark.parametrize("asked", [False, True])
def test_the_log_has_prompts_only_when_asked(
    make_server: Make, caplog: pytest.LogCaptureFixture, asked: bool
) -> None:
    caplog.set_level(logging.DEBUG)
    server = make_server(config={"log_prompts": asked, "api_keys": ("key-of-somebody",)})
    headers = {"Authorization": "Bearer key-of-somebody", "X-Request-Id": "id-1"}
    with server.http(headers=headers) as http:
        chat = {"messages": [{"role": "user", "content": "secret message"}], "max_tokens": 1}
        assert http.post("/v1/completions", json=BODY).status_code == 200
        assert http.post("/v1/chat/completions", json=chat).status_code == 200
        assert http.post("/v1/completions", json={**BODY, "prompt": [5000]}).status_code == 400
        assert (
            http.post("/v1/completions?q=secret", json={**BODY, "n": "secret"}).status_code == 400
        )
        assert http.get("/a%0Ab").status_code == 404
    ours = [r.getMessage() for r in caplog.records if r.name.startswith("rooftile")]
    log = "\n".join(ours)
    assert "POST /v1/completions 200" in log
    assert "id-1" in log
    assert "key-of-somebody" not in log
    assert ("secret" in log) == asked
    assert all("\n" not in line for line in ours)


def test_served_names(make_server: Make) -> None:
    server = make_server(config={"model_names": ("alpha", "org/beta")})
    client = server.openai()
    assert [model.id for model in client.models.list().data] == ["alpha", "org/beta"]
    assert client.models.retrieve("org/beta").id == "org/beta"
    for name in ("alpha", "org/beta"):
        assert client.completions.create(model=name, prompt="x", max_tokens=1).model == name
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="tiny", prompt="x")
