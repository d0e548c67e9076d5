"""/v1/chat/completions, /tokenize and /detokenize."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from tests.server.live import LiveServer

HELLO = [{"role": "user", "content": "hello"}]
SHORT: dict[str, Any] = {"model": "tiny", "temperature": 0, "max_tokens": 6}


def rendered(server: LiveServer, **body: Any) -> str:
    """The prompt that the server makes of a chat, by its own account."""
    with server.http() as http:
        response = http.post("/tokenize", json={"messages": HELLO, **body})
        assert response.status_code == 200, response.text
        tokens = response.json()["tokens"]
        return http.post("/detokenize", json={"tokens": tokens}).json()["prompt"]


def test_a_chat(server: LiveServer) -> None:
    answer = server.openai().chat.completions.create(messages=HELLO, **SHORT)  # type: ignore[call-overload]
    assert answer.object == "chat.completion"
    (choice,) = answer.choices
    assert choice.message.role == "assistant"
    assert choice.message.tool_calls is None
    prompt = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    with server.http() as http:
        body = {**SHORT, "prompt": prompt, "add_special_tokens": False}
        same = http.post("/v1/completions", json=body).json()
    assert choice.message.content == same["choices"][0]["text"]
    assert answer.usage.prompt_tokens == same["usage"]["prompt_tokens"]


def test_a_stream_begins_with_the_role_and_ends_with_a_reason(server: LiveServer) -> None:
    client = server.openai()
    params: dict[str, Any] = {
        "model": "tiny", "messages": HELLO, "n": 3, "seed": 5, "max_tokens": 10,
        "extra_body": {"ignore_eos": True},
    }  # fmt: skip
    whole = client.chat.completions.create(**params)
    stream = client.chat.completions.create(
        **params, stream=True, stream_options={"include_usage": True}
    )
    *chunks, last = stream
    texts = ["", "", ""]
    reasons: list[list[str | None]] = [[], [], []]
    for chunk in chunks:
        (choice,) = chunk.choices
        first = not reasons[choice.index]
        assert choice.delta.role == ("assistant" if first else None)
        texts[choice.index] += choice.delta.content or ""
        reasons[choice.index].append(choice.finish_reason)
    assert texts == [choice.message.content for choice in whole.choices]
    for of_choice in reasons:
        assert of_choice[-1] == "length"
        assert set(of_choice[:-1]) <= {None}
    assert (last.choices, last.usage) == ([], whole.usage.model_copy(update={
        "prompt_tokens_details": last.usage.prompt_tokens_details
    }))  # fmt: skip


def test_roles_parts_and_names(server: LiveServer) -> None:
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": "c"},
        {"role": "user", "content": "d", "name": "eve"},
    ]
    assert rendered(server, messages=messages) == (
        "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\na\nb<|im_end|>\n"
        "<|im_start|>assistant\nc<|im_end|>\n<|im_start|>user\nd<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_template_options(server: LiveServer) -> None:
    assert rendered(server, add_generation_prompt=False) == "<|im_start|>user\nhello<|im_end|>\n"
    messages = [*HELLO, {"role": "assistant", "content": "I was  "}]
    assert rendered(server, messages=messages, continue_final_message=True).endswith(
        "<|im_start|>assistant\nI was  "
    )
    assert rendered(server, chat_template_kwargs={"unknown": [1]}) == rendered(server)


def test_max_completion_tokens(server: LiveServer) -> None:
    with server.http() as http:
        body: dict[str, Any] = {"messages": HELLO, "ignore_eos": True}
        answer = http.post("/v1/chat/completions", json={**body, "max_completion_tokens": 3})
        assert answer.json()["usage"]["completion_tokens"] == 3
        unlimited = http.post("/v1/chat/completions", json=body).json()
        total = unlimited["usage"]["total_tokens"]
        assert (total, unlimited["choices"][0]["finish_reason"]) == (160, "length")


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "tool", "content": "x", "tool_call_id": "1"}]}, "messages[0]"),
        (
            {"messages": [{"role": "assistant", "content": "x", "tool_calls": [{"id": "1"}]}]},
            "messages[0]",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages[0].content[0]",
        ),
        ({"messages": [{"role": "user", "content": "long " * 200}]}, "messages"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"reasoning_effort": "high"}, "reasoning_effort"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": 1}, "logprobs"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens"),
        ({"continue_final_message": True}, "continue_final_message"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"chat_template": "{{ x }}"}, "chat_template"),
        ({"guided_json": {}}, "guided_json"),
        ({"grammar": 'root ::= "a"'}, "grammar"),
        ({"repeat_penalty": 1.1}, "repeat_penalty"),
        ({"mirostat": 2}, "mirostat"),
        ({"options": {"num_predict": 3}}, "options"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
    ],
)  # fmt: skip
def test_refusals_name_the_field(server: LiveServer, change: dict[str, Any], param: str) -> None:
    with server.http() as http:
        response = http.post("/v1/chat/completions", json={"messages": HELLO, **change})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param), error
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("change", "ours"),
    [
        ({"n_predict": 3}, "max_tokens"),
        ({"repeat_penalty": 1.1}, "repetition_penalty"),
        ({"json_schema": {"type": "object"}}, "response_format"),
        ({"structured_outputs": {"json": {}}}, "response_format"),
    ],
)
def test_names_of_other_servers_are_told_ours(
    server: LiveServer, change: dict[str, Any], ours: str
) -> None:
    for path, asked in (
        ("chat/completions", {"messages": HELLO}),
        ("completions", {"prompt": "x"}),
    ):
        with server.http() as http:
            error = http.post(f"/v1/{path}", json={**asked, **change}).json()["error"]
        assert error["message"].endswith(f"; use {ours}"), error


def test_what_means_nothing_is_accepted(server: LiveServer) -> None:
    harmless: dict[str, Any] = {
        "tools": [], "tool_choice": "none", "modalities": ["text"], "store": False,
        "service_tier": "auto", "parallel_tool_calls": True, "user": "me", "audio": None,
        "grammar": "", "n_predict": -1, "repeat_penalty": 1.0, "mirostat": 0, "typical_p": 1.0,
    }  # fmt: skip
    with server.http() as http:
        body = {"messages": HELLO, "max_tokens": 1, **harmless}
        assert http.post("/v1/chat/completions", json=body).status_code == 200


def test_an_unknown_field_is_logged_and_ignored(
    server: LiveServer, caplog: pytest.LogCaptureFixture
) -> None:
    with server.http() as http:
        body = {"messages": HELLO, "max_tokens": 1, "frobnicate\n": 3}
        assert http.post("/v1/chat/completions", json=body).status_code == 200
        body |= {f"field{number}": None for number in range(500)}
        assert http.post("/v1/chat/completions", json=body).status_code == 200
    assert "unknown fields ignored: 'frobnicate\\n'" in caplog.text
    assert "and 491 more" in caplog.text
    assert all(len(record.getMessage()) < 1000 for record in caplog.records)


def test_tokenize(server: LiveServer) -> None:
    with server.http() as http:
        answer = http.post("/tokenize", json={"prompt": "häh", "return_token_strs": True}).json()
        assert answer["count"] == len(answer["tokens"]) == 4
        assert answer["max_model_len"] == 160
        assert answer["token_strs"] == ["h", "bytes:\\xc3", "bytes:\\xa4", "h"]
        back = http.post("/detokenize", json={"tokens": answer["tokens"]}).json()
        assert back == {"prompt": "häh"}
        assert http.post("/tokenize", json={"prompt": ""}).json()["tokens"] == []
        assert http.post("/tokenize", json={"prompt": "long " * 900}).json()["count"] == 4500
        for bad in ({}, {"prompt": "x", "messages": HELLO}, {"prompt": 3}):
            assert http.post("/tokenize", json=bad).status_code == 400
        for tokens in ([260], [-1], [True], "x", [2**70]):
            refused = http.post("/detokenize", json={"tokens": tokens})
            assert refused.status_code == 400


def test_long_lists_of_tokens_do_not_hold_up_the_event_loop(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts, threads = server.server.service.texts, set()
    text_of = texts.text_of

    def watched(token: int) -> str:
        threads.add(threading.current_thread())
        return text_of(token)

    monkeypatch.setattr(texts, "text_of", watched)
    with server.http() as http:
        http.post("/tokenize", json={"prompt": "x" * 10, "return_token_strs": True})
        body = {"prompt": "x" * 10, "echo": True, "logprobs": 2, "max_tokens": 2}
        http.post("/v1/completions", json=body)
        http.post("/v1/chat/completions", json={"messages": HELLO, **SHORT, "logprobs": True})
    assert threads
    assert server.thread not in threads


def test_models(server: LiveServer) -> None:
    client = server.openai()
    (model,) = client.models.list().data
    assert (model.id, model.object, model.owned_by) == ("tiny", "model", "rooftile")
    assert client.models.retrieve("tiny").id == "tiny"
    with server.http() as http:
        assert http.get("/v1/models/other/model").json()["error"]["code"] == "model_not_found"
        assert http.get("/version").json()["version"]
        for ask, path in ((http.get, "/nowhere"), (http.post, "/v1/embeddings")):
            error = ask(path).json()["error"]
            method = ask.__name__.upper()
            assert error["code"] == "not_found"
            assert error["message"].startswith(f"there is no {method} {path} here; /openapi.json")
        wrong = http.put("/v1/chat/completions")
        assert wrong.status_code == 405
        assert wrong.json()["error"]["message"].startswith("there is no PUT /v1/chat/completions")
        assert http.get("/v1/completions").status_code == 405
