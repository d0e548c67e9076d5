"""The server with a real model and a real vocabulary."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from rooftile.engine.async_llm import AsyncLLM
from tests.server.live import LiveServer

QUESTION: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def demo() -> Iterator[LiveServer]:
    server = LiveServer(lambda: AsyncLLM("demo", num_pages=200, max_num_seqs=8))
    yield server
    server.assert_idle()
    server.end()


def test_it_answers(demo: LiveServer) -> None:
    client = demo.openai()
    params: dict[str, Any] = {
        "model": "tiny", "messages": QUESTION, "temperature": 0, "max_tokens": 20,
        "logprobs": True, "top_logprobs": 1,
    }  # fmt: skip
    (choice,) = client.chat.completions.create(**params).choices
    assert "Paris" in choice.message.content
    assert choice.finish_reason == "stop"
    *text, end = choice.logprobs.content
    assert "".join(entry.token for entry in text) == choice.message.content
    assert end.token == "<|im_end|>"
    chunks = list(client.chat.completions.create(**params, stream=True))
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert streamed == choice.message.content


def test_it_writes_json(demo: LiveServer) -> None:
    pytest.importorskip("xgrammar", reason="xgrammar is not installed")
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}, "big": {"type": "boolean"}},
        "required": ["city", "big"],
        "additionalProperties": False,
    }
    answer = demo.openai().chat.completions.create(
        model="tiny", messages=QUESTION, temperature=0, max_tokens=60,
        response_format={"type": "json_schema", "json_schema": {"name": "city", "schema": schema}},
    )  # fmt: skip
    assert answer.choices[0].finish_reason == "stop"
    found = json.loads(answer.choices[0].message.content or "")
    assert set(found) == {"city", "big"}


def test_characters_of_several_tokens(demo: LiveServer) -> None:
    """Echoed and tokenized text comes back whole, whatever its tokens are."""
    text = "naïve 😀 日本語 \u0301x"
    with demo.http() as http:
        body = {"prompt": text, "echo": True, "max_tokens": 0, "logprobs": 1}
        choice = http.post("/v1/completions", json=body).json()["choices"][0]
        assert choice["text"] == text
        tokens = choice["logprobs"]["tokens"]
        assert any(token.startswith("bytes:") for token in tokens)
        assert choice["logprobs"]["text_offset"] == sorted(choice["logprobs"]["text_offset"])
        ids = http.post("/tokenize", json={"prompt": text}).json()["tokens"]
        assert len(ids) == len(tokens)
        assert http.post("/detokenize", json={"tokens": ids}).json()["prompt"] == text
