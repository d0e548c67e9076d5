"""/v1/completions through the official client and by hand."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import openai
import pytest

from rooftile.engine.async_llm import AsyncLLM
from tests.engine.conftest import write_model
from tests.server.conftest import OPTIONS
from tests.server.live import LiveServer

GREEDY: dict[str, Any] = {"model": "tiny", "temperature": 0, "max_tokens": 8}
FULL: dict[str, Any] = {**GREEDY, "extra_body": {"ignore_eos": True}}


def ids(text: str, server: LiveServer) -> list[int]:
    assert server.llm.tokenizer is not None
    return server.llm.tokenizer.encode(text)


def test_a_completion(server: LiveServer) -> None:
    answer = server.openai().completions.create(prompt="hello", **FULL)
    assert answer.object == "text_completion"
    assert answer.model == "tiny"
    assert answer.id.startswith("cmpl-")
    (choice,) = answer.choices
    assert (choice.index, choice.finish_reason, choice.logprobs) == (0, "length", None)
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (5, 8)
    assert answer.usage.total_tokens == 13


def test_every_form_of_a_prompt_and_the_order_of_choices(server: LiveServer) -> None:
    client = server.openai()
    texts = ["one", "three", "fives"]
    alone = [client.completions.create(prompt=text, **FULL).choices[0].text for text in texts]
    forms: list[Any] = [texts, [ids(text, server) for text in texts]]
    for prompts in forms:
        answer = client.completions.create(prompt=prompts, n=2, **FULL)
        assert [choice.index for choice in answer.choices] == list(range(6))
        assert [choice.text for choice in answer.choices] == [t for t in alone for _ in range(2)]
        assert answer.usage is not None
        assert answer.usage.prompt_tokens == 3 + 5 + 5  # once a prompt, whatever n
        assert answer.usage.completion_tokens == 6 * 8
    answer = client.completions.create(prompt=ids("one", server), **FULL)
    assert answer.choices[0].text == alone[0]


def test_a_stream_is_the_same_text(server: LiveServer) -> None:
    client = server.openai()
    prompts = ["stream", "streams"]
    whole = client.completions.create(prompt=prompts, n=2, seed=3, model="tiny", max_tokens=20)
    texts = {choice.index: "" for choice in whole.choices}
    reasons: dict[int, str] = {}
    order = []
    stream = client.completions.create(
        prompt=prompts, n=2, seed=3, model="tiny", max_tokens=20, stream=True,
        stream_options={"include_usage": True},
    )  # fmt: skip
    *chunks, last = stream
    for chunk in chunks:
        (choice,) = chunk.choices
        assert choice.index not in reasons, "a chunk after the terminal one"
        texts[choice.index] += choice.text
        order.append(choice.index)
        if choice.finish_reason is not None:
            reasons[choice.index] = choice.finish_reason
        assert chunk.usage is None
    assert texts == {choice.index: choice.text for choice in whole.choices}
    assert reasons == {choice.index: choice.finish_reason for choice in whole.choices}
    assert order != sorted(order), "the choices of a stream come interleaved"
    assert last.choices == []
    assert last.usage is not None
    assert whole.usage is not None
    assert last.usage.completion_tokens == whole.usage.completion_tokens
    assert len({chunk.id for chunk in (*chunks, last)}) == 1


def test_raw_stream_events(server: LiveServer) -> None:
    body = {**GREEDY, "prompt": "x", "stream": True, "ignore_eos": True}
    with server.http() as http, http.stream("POST", "/v1/completions", json=body) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = list(response.iter_lines())
    assert lines[-2:] == ["data: [DONE]", ""]
    assert all(line.startswith("data: {") for line in lines[:-2] if line)
    assert all(line == "" for line in lines[1::2])
    assert '"usage"' not in "".join(lines)  # not asked for


def test_cached_tokens_are_told(server: LiveServer) -> None:
    client = server.openai()
    prompt = "a prompt of more than a few pages"
    first = client.completions.create(prompt=prompt, **GREEDY, extra_body={"cache_salt": "s1"})
    again = client.completions.create(prompt=prompt, **GREEDY, extra_body={"cache_salt": "s1"})
    other = client.completions.create(prompt=prompt, **GREEDY, extra_body={"cache_salt": "s2"})
    cached = [
        answer.usage.prompt_tokens_details.cached_tokens  # type: ignore[union-attr]
        for answer in (first, again, other)
    ]
    assert cached == [0, 32, 0]  # of 33 tokens on pages of 4; another salt shares nothing
    assert first.choices[0].text == again.choices[0].text == other.choices[0].text


def test_stop_strings_never_show_in_a_stream(server: LiveServer) -> None:
    client = server.openai()
    x = ids("x", server)[-1]
    forced: dict[str, Any] = {"model": "tiny", "prompt": "a", "logit_bias": {str(x): 100}}
    for stop in ("xxxx", ["no", "xxxx"]):
        answer = client.completions.create(stop=stop, max_tokens=20, temperature=0, **forced)
        assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("", "stop")
        stream = client.completions.create(
            stop=stop, max_tokens=20, temperature=0, stream=True, **forced
        )
        assert "".join(chunk.choices[0].text for chunk in stream) == ""
    kept = client.completions.create(
        stop="xxxx", max_tokens=20, temperature=0,
        extra_body={"include_stop_str_in_output": True}, **forced,
    )  # fmt: skip
    assert kept.choices[0].text == "xxxx"


def test_stop_tokens_and_their_reason(server: LiveServer) -> None:
    x = ids("x", server)[-1]
    body = {
        "prompt": "a", "logit_bias": {str(x): 100}, "stop_token_ids": [x], "temperature": 0,
    }  # fmt: skip
    with server.http() as http:
        (choice,) = http.post("/v1/completions", json=body).json()["choices"]
    assert (choice["finish_reason"], choice["stop_reason"], choice["text"]) == ("stop", x, "")


def test_sampling_parameters_reach_the_engine(server: LiveServer) -> None:
    client = server.openai()
    x = ids("x", server)[-1]

    def text(**params: Any) -> str:
        answer = client.completions.create(
            **{"model": "tiny", "prompt": "abc", "max_tokens": 12, **params}
        )
        return answer.choices[0].text

    greedy = text(temperature=0)
    assert text(temperature=1e-30) == greedy  # near-greedy, and not an overflow
    assert text(temperature=5, extra_body={"top_k": 1}) == greedy
    assert text(temperature=5, extra_body={"top_k": -1}, seed=1) != greedy
    assert text(temperature=5, top_p=1e-9) == greedy
    assert text(temperature=5, extra_body={"min_p": 1.0}) == greedy
    assert text(temperature=2, seed=7) == text(temperature=2, seed=7)
    assert text(temperature=2, seed=7) != text(temperature=2, seed=8)
    assert text(temperature=0, logit_bias={str(x): 100}) == "x" * 12
    either = {"logit_bias": {str(x): 50, str(x + 1): 50}, "temperature": 0}
    assert len(set(text(**either))) == 1
    assert set(text(**either, frequency_penalty=2)) == {"x", "y"}
    assert set(text(**either, presence_penalty=2)) == {"x", "y"}
    assert text(temperature=0, extra_body={"repetition_penalty": 50.0}) != greedy
    assert set(text(**either, extra_body={"bad_words": ["x"]})) == {"y"}


@pytest.mark.parametrize("kind", ["thread", "process"])
def test_what_a_request_leaves_out_is_as_the_model_recommends(kind: str, tmp_path: Path) -> None:
    config = write_model(tmp_path) / "generation_config.json"
    config.write_text('{"do_sample": false, "top_k": 3, "repetition_penalty": 1.5}')
    server = LiveServer(lambda: AsyncLLM(tmp_path, engine=kind, **OPTIONS))
    recommended = {"top_k": 3, "repetition_penalty": 1.5, "temperature": 0.0}

    def text(**body: Any) -> str:
        answer = http.post("/v1/completions", json={"prompt": "abc", "max_tokens": 12, **body})
        return str(answer.json()["choices"][0]["text"])

    with server.http() as http:
        (card,) = http.get("/v1/models").json()["data"]
        assert card["sampling_defaults"] == recommended
        default = text()
        assert default == text(**recommended) == text(temperature=None, top_k=None)
        assert default != text(repetition_penalty=1.0)
        free = {"temperature": 5, "top_k": -1, "repetition_penalty": 1, "seed": 1}
        assert len({default, text(temperature=5, seed=1), text(**free)}) == 3
    server.end()
    assert server.error is None


def test_echo_gives_the_prompt_back(server: LiveServer) -> None:
    client = server.openai()
    plain = client.completions.create(prompt="echo me", **FULL).choices[0].text
    for prompt in ("echo me", ids("echo me", server)):
        answer = client.completions.create(prompt=prompt, echo=True, n=2, **FULL)
        assert [choice.text for choice in answer.choices] == ["echo me" + plain] * 2
        stream = client.completions.create(prompt=prompt, echo=True, stream=True, **FULL)
        assert "".join(chunk.choices[0].text for chunk in stream) == "echo me" + plain
    alone = client.completions.create(prompt="only", echo=True, model="tiny", max_tokens=0)
    assert (alone.choices[0].text, alone.choices[0].finish_reason) == ("only", "length")
    assert alone.usage is not None
    assert alone.usage.completion_tokens == 0


def test_beam_search(server: LiveServer) -> None:
    search = {"use_beam_search": True, "beam_width": 3, "ignore_eos": True}
    with server.http() as http:
        body = {"prompt": "beam", "n": 2, "max_tokens": 6, "temperature": 0, **search}
        answer = http.post("/v1/completions", json=body).json()
        texts = [choice["text"] for choice in answer["choices"]]
        assert len(set(texts)) == 2
        assert answer["usage"]["completion_tokens"] == 12
        with http.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
            assert response.read().count(b'"finish_reason":"length"') == 2
        for field, value in (
            ("temperature", 0.5), ("logprobs", 1), ("stop", "x"), ("n", 4), ("echo", True),
            ("top_p", 0.5), ("response_format", {"type": "json_object"}),
        ):  # fmt: skip
            refused = http.post("/v1/completions", json={**body, field: value})
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, field)
        refused = http.post("/v1/completions", json={"prompt": "x", "beam_width": 3})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "beam_width")
        for n in (0, -1, 5):
            refused = http.post("/v1/completions", json={"prompt": "x", **search, "n": n})
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "n")


def test_many_asynchronous_clients(server: LiveServer) -> None:
    async def main() -> list[str]:
        async with server.async_openai() as client:
            answers = await asyncio.gather(
                *(client.completions.create(prompt=f"p{i % 4}", **FULL) for i in range(24))
            )
        return [answer.choices[0].text for answer in answers]

    texts = asyncio.run(main())
    assert texts == texts[:4] * 6


def test_errors_of_the_client_library(server: LiveServer) -> None:
    client = server.openai()
    with pytest.raises(openai.NotFoundError) as missing:
        client.completions.create(prompt="x", model="gpt-9")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as bad:
        client.completions.create(prompt="x", model="tiny", top_p=3)
    assert bad.value.param == "top_p"
