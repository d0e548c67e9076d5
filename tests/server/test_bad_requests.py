"""Whatever a client sends, the answer is a 4xx with a reason, never a 500."""

from __future__ import annotations

import contextlib
import json
import socket
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rooftile.server.body import MAX_DEPTH, parse_json, validate
from rooftile.server.errors import ApiError
from rooftile.server.protocol.chat import ChatRequest
from tests.server.live import LiveServer

JSON = {"Content-Type": "application/json"}
PATHS = ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize")


def post(server: LiveServer, path: str, content: bytes | str, **headers: str) -> Any:
    with server.http() as http:
        return http.post(path, content=content, headers={**JSON, **headers})


@pytest.mark.parametrize(
    "content",
    [
        "", "{", "nothing", "[]", '"text"', "3", "null", "true",
        '{"prompt": NaN}', '{"prompt": "x", "temperature": Infinity}',
        '{"prompt": "x", "temperature": -Infinity}', '{"prompt": "x", "temperature": 1e999}',
        '{"prompt": "x", "max_tokens": ' + "9" * 5000 + "}",
        '{"prompt": "x", "max_tokens": ' + "9" * 100 + "}",
        '{"prompt": ' + "[" * 100_000 + "]" * 100_000 + "}",
        '{"prompt": "x", "unknown": ' + '{"a":' * 5000 + "1" + "}" * 5000 + "}",
        '{"prompt": "x", "unknown": ' + "[" * MAX_DEPTH + "]" * MAX_DEPTH + "}",
        '{"prompt": "\\ud800"}', '{"prompt": "x", "stop": "\\udfff"}',
        '{"prompt": "x", "\\ud800": 1}', '{"prompt": "x", "model": "\\ud800"}',
        '{"prompt": "a\\u0000b"}', '{"prompt": "a\0b"}', '{"prompt": ["a", "b\\u0000"]}',
        b'{"prompt": "\xff\xfe"}', '{"prompt": "x"}'.encode("utf-16"),
        b'\xef\xbb\xbf{"prompt": "x"}',
    ],
    ids=lambda content: repr(content[:40]),
)  # fmt: skip
@pytest.mark.parametrize("path", PATHS[:1])
def test_bodies_that_are_no_good_json(server: LiveServer, path: str, content: Any) -> None:
    response = post(server, path, content)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert 0 < len(error["message"]) < 500


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": 3}, "prompt"),
        ({"prompt": {}}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": ["a", ""]}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [[1], 2]}, "prompt"),
        ({"prompt": [True, False]}, "prompt"),
        ({"prompt": [1.0]}, "prompt"),
        ({"prompt": [260]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [2**80]}, "prompt"),
        ({"prompt": "long " * 100}, "prompt"),
        ({"prompt": [1] * 160}, "prompt"),
        ({"prompt": ["x"] * 2000}, "prompt"),
        ({"n": 0}, "n"),
        ({"n": True}, "n"),
        ({"n": 1.0}, "n"),
        ({"n": "2"}, "n"),
        ({"n": 10**6}, "n"),
        ({"n": 300}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 2**63}, "max_tokens"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": 10**400}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"frequency_penalty": -3}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"seed": 2**63}, "seed"),
        ({"seed": 1.5}, "seed"),
        ({"logit_bias": {"999": 1}}, "logit_bias"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 101}}, "logit_bias"),
        ({"logit_bias": {"1": "a"}}, "logit_bias.1"),
        ({"logit_bias": {str(i): 1 for i in range(2000)}}, "logit_bias"),
        ({"logit_bias": [1]}, "logit_bias"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"stop": "x" * 300}, "stop"),
        ({"stop": 3}, "stop"),
        ({"stop_token_ids": [999]}, "stop_token_ids"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"min_tokens": 9, "max_tokens": 3}, "min_tokens"),
        ({"logprobs": -1}, "logprobs"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"best_of": 3}, "best_of"),
        ({"suffix": "end"}, "suffix"),
        ({"stream": "yes"}, "stream"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"echo": 1}, "echo"),
        ({"user": 5}, "user"),
        ({"cache_salt": 5}, "cache_salt"),
        ({"model": 5}, "model"),
    ],
)  # fmt: skip
def test_refusals_name_the_field(server: LiveServer, change: dict[str, Any], param: str) -> None:
    with server.http() as http:
        content = json.dumps({"prompt": "x", **change})
        response = http.post("/v1/completions", content=content, headers=JSON)
    error = response.json()["error"]
    assert response.status_code == 400, error
    assert error["param"] == param, error
    assert len(error["message"]) < 500


def test_content_type_is_required(server: LiveServer) -> None:
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data"):
        response = post(server, PATHS[0], '{"prompt": "x"}', **{"Content-Type": kind})
        assert response.status_code == 400
        assert "application/json" in response.json()["error"]["message"]
    good = {"Content-Type": "application/json; charset=utf-8"}
    assert post(server, PATHS[0], '{"prompt": "x", "max_tokens": 1}', **good).status_code == 200


@pytest.mark.parametrize("path", PATHS)
def test_the_body_limit(server: LiveServer, path: str) -> None:
    limit = server.server.service.config.max_body_bytes
    content = b'{"prompt": "' + b"x" * limit + b'"}'
    assert post(server, path, content).status_code == 413

    def parts() -> Any:  # chunked: no length is announced
        yield b'{"prompt": "'
        for _ in range(limit // 2**16 + 2):
            yield b"x" * 2**16
        yield b'"}'

    with server.http() as http:
        response = http.post(path, content=parts(), headers=JSON)
    assert response.status_code == 413
    assert response.json()["error"]["code"] == "body_too_large"


def test_the_largest_bodies_do_no_harm(server: LiveServer) -> None:
    """Just below the limit, in the forms that take the most work."""
    limit = server.server.service.config.max_body_bytes
    for content in (
        b'{"prompt": "' + b"x" * (limit - 100) + b'"}',
        b'{"prompt": [' + b"1," * (limit // 2 - 100) + b"1]}",
        b'{"prompt": [' + b"[1]," * (limit // 4 - 100) + b"[1]]}",
        b'{"prompt": "x", "unknown": "' + b"\\u0000" * (limit // 6 - 100) + b'"}',
    ):
        assert len(content) <= limit
        response = post(server, PATHS[0], content)
        assert response.status_code == 400, response.text
        assert len(response.text) < 1000


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"GARBAGE\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999999999999\r\n\r\n",
        b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nX-Request-Id: " + b"\xff" * 300 + b"\r\n\r\n",
        b"GET /%00%ff/..%2f HTTP/1.1\r\nHost: x\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    ],
    ids=lambda raw: repr(raw[:50]),
)
def test_raw_bytes(server: LiveServer, request_bytes: bytes) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=20) as connection:
        connection.sendall(request_bytes)
        connection.shutdown(socket.SHUT_WR)
        answer = connection.recv(65536)
    assert not answer or b" 500 " not in answer.split(b"\r\n")[0]
    with server.http() as http:
        assert http.get("/health").status_code == 200


def test_ids_of_clients_never_collide(server: LiveServer) -> None:
    body = '{"prompt": "x", "max_tokens": 30, "ignore_eos": true}'
    answers = [post(server, PATHS[0], body, **{"X-Request-Id": "same"}) for _ in range(2)]
    assert [answer.headers["x-request-id"] for answer in answers] == ["same", "same"]
    assert answers[0].json()["id"] != answers[1].json()["id"]
    odd = post(server, PATHS[0], body, **{"X-Request-Id": "a b\tc"})
    assert odd.headers["x-request-id"] != "a b\tc"


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)
FIELDS = st.sampled_from(
    [
        "prompt",
        "messages",
        "model",
        "n",
        "stream",
        "stream_options",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "logit_bias",
        "seed",
        "max_tokens",
        "min_tokens",
        "stop",
        "stop_token_ids",
        "logprobs",
        "top_logprobs",
        "echo",
        "response_format",
        "tools",
        "bad_words",
        "cache_salt",
        "tokens",
        "add_special_tokens",
        "chat_template_kwargs",
        "use_beam_search",
        "beam_width",
        "continue_final_message",
        "best_of",
        "user",
    ]
)


@settings(max_examples=60)
@given(
    path=st.sampled_from(PATHS),
    body=st.dictionaries(FIELDS, VALUES, max_size=4),
    good=st.sampled_from(
        [
            {},
            {"prompt": "abc"},
            {"messages": [{"role": "user", "content": "abc"}]},
            {"tokens": [1, 2]},
        ]
    ),
)
def test_any_json(shared_server: LiveServer, path: str, body: Any, good: Any) -> None:
    content = json.dumps({"max_tokens": 2, **good, **body})
    response = post(shared_server, path, content)
    assert response.status_code in (200, 400, 404), (content, response.text)
    if response.status_code != 200:
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}


@given(
    st.binary(max_size=60) | st.text(max_size=60).map(lambda s: s.encode(errors="surrogatepass"))
)
def test_any_bytes_parse_or_are_refused(raw: bytes) -> None:
    with contextlib.suppress(ApiError):
        json.dumps(parse_json(raw), allow_nan=False, ensure_ascii=False).encode()


@given(VALUES)
def test_json_comes_through_unchanged(value: Any) -> None:
    try:
        raw = json.dumps(value, allow_nan=False)
        json.dumps(value, ensure_ascii=False).encode()
    except ValueError:
        return
    if "\\u0000" not in raw:
        assert parse_json(raw.encode()) == value


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"stop": [""]}, "stop[0]", "at least 1 character"),
        ({"stop": ["a"] * 17}, "stop", "at most 16 items"),
        ({"stop": [None]}, "stop[0]", "a valid string"),
        ({"stop": 5}, "stop", "a valid string or a valid list"),
        ({"early_stopping": "soon"}, "early_stopping", "a valid boolean or 'never'"),
        ({"messages": [{"role": "user", "content": ["a"]}]}, "messages[0].content[0]", "an object"),
        ({"messages": ["a"]}, "messages[0]", "an object"),
        ({"n": "x", "stop": [""]}, "n", "a valid integer"),
    ],
    ids=str,
)
def test_a_field_of_several_types_is_told_what_is_wrong_with_the_type_it_has(
    fields: dict[str, Any], param: str, message: str
) -> None:
    body = {"messages": [{"role": "user", "content": "a"}], **fields}
    with pytest.raises(ApiError) as refused:
        validate(body, ChatRequest)
    error = refused.value.body["error"]
    assert error["param"] == param
    assert error["message"].startswith(f"{param}: ")
    assert message in error["message"]
