"""Bodies of requests: what each field becomes, what is left to the defaults, what is refused."""

from __future__ import annotations

import contextlib
import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rooftile.engine.params import BeamSearchParams, SamplingParams
from rooftile.engine.request_body import RequestBody, parse_openai, parse_request

DEFAULTS = SamplingParams(temperature=0.3, max_tokens=20, stop="END", seed=5)
BEAMS = BeamSearchParams(width=6, max_tokens=9, length_penalty=0.5, n_best=2)
USER = [{"role": "user", "content": "hi"}]


def test_what_a_line_leaves_out_comes_from_the_defaults() -> None:
    assert parse_request({"prompt": "p", "top_p": None}, DEFAULTS) == RequestBody(DEFAULTS, ("p",))
    body = parse_request(
        {"prompt": [1, 2], "temperature": 0, "logit_bias": {"7": -1}, "stop": ["a", "b"], "n": 2},
        DEFAULTS,
    )
    assert body.prompts == ([1, 2],)
    assert body.params == SamplingParams(
        temperature=0, max_tokens=20, seed=5, logit_bias={7: -1}, stop=["a", "b"], n=2
    )
    body = parse_request({"messages": USER, "width": 7, "early_stopping": "never"}, BEAMS)
    assert body.is_chat
    assert body.params == BeamSearchParams(
        width=7, max_tokens=9, length_penalty=0.5, n_best=2, early_stopping="never"
    )


def test_a_chat_body() -> None:
    body = parse_openai(
        {
            "model": "m", "user": "me", "metadata": {"a": "b"}, "stream": False, "tools": [],
            "messages": [
                {"role": "developer", "content": "be kind"},
                {"role": "user", "content": [{"type": "text", "text": t} for t in "ab"], "name": "x"},
                {"role": "assistant", "content": "yes", "tool_calls": None, "refusal": None},
            ],
            "max_completion_tokens": 3, "logprobs": True, "top_logprobs": 2, "top_k": -1,
            "logit_bias": {"4": 5}, "response_format": {"type": "text"}, "presence_penalty": 1,
            "chat_template_kwargs": {"thinking": False}, "add_generation_prompt": False,
        },
        True,
        DEFAULTS,
    )  # fmt: skip
    assert body.model == "m"
    assert body.messages == (
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": "a\nb", "name": "x"},
        {"role": "assistant", "content": "yes"},
    )
    assert body.template_options == {"thinking": False, "add_generation_prompt": False}
    assert body.params == SamplingParams(
        temperature=0.3, max_tokens=3, stop="END", seed=5, logprobs=2, logit_bias={4: 5},
        presence_penalty=1,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("a", ("a",)),
        (["a", "b"], ("a", "b")),
        ([1, 2], ([1, 2],)),
        ([[1], [2, 3]], ([1], [2, 3])),
    ],
)
def test_prompts_of_completions(prompt: Any, prompts: Any) -> None:
    body = parse_openai({"prompt": prompt, "logprobs": 0, "best_of": 1}, False, DEFAULTS)
    assert body.prompts == prompts
    assert body.params.logprobs == 0  # type: ignore[union-attr]


def test_beam_search_in_a_body() -> None:
    asked = {"prompt": "p", "use_beam_search": True, "n": 5, "length_penalty": 2.0}
    body = parse_openai(asked, False, DEFAULTS)
    assert body.params == BeamSearchParams(width=5, n_best=5, length_penalty=2.0, max_tokens=20)
    body = parse_openai({"prompt": "p", "beam_width": 3, "max_tokens": 4}, False, BEAMS)
    assert body.params == BeamSearchParams(width=3, n_best=2, length_penalty=0.5, max_tokens=4)
    body = parse_openai({"prompt": "p", "use_beam_search": False}, False, BEAMS)
    assert body.params == SamplingParams(max_tokens=9)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({}, 'give either "prompt" or "messages"'),
        ({"prompt": "a", "messages": USER}, 'give either "prompt" or "messages"'),
        ({"prompt": 3}, "prompt is 3"),
        ({"prompt": ["a", "b"]}, "prompt holds 2 prompts"),
        ({"prompt": "a", "temprature": 0}, 'there is no field "temprature"'),
        ({"prompt": "a", "logits_processor": "x"}, "there is no field"),
        ({"prompt": "a", "width": 3}, "width belongs to beam search"),
        ({"prompt": "a", "temperature": -1}, "temperature is -1"),
        ({"prompt": "a", "logit_bias": {"x": 1}}, 'logit_bias has the key "x"'),
        ({"prompt": "a", "logit_bias": [1]}, "logit_bias is [1]"),
        ({"messages": []}, "messages is []"),
        ({"messages": [3]}, "messages[0] is 3"),
        ({"messages": [{"role": "cat", "content": "x"}]}, 'messages[0].role is "cat"'),
        ({"messages": [{"role": "user"}]}, "messages[0].content is missing"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "content[0] is"),
        ({"messages": [*USER, {"role": "assistant", "content": "", "tool_calls": [1]}]},
         "messages[1].tool_calls is not supported"),
        ({"messages": [{"role": "user", "content": "x", "name": 1}]}, "messages[0].name is 1"),
    ],
)  # fmt: skip
def test_lines_that_are_refused(body: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        parse_request(body, DEFAULTS)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"stream": True}, "stream is not supported"),
        ({"tools": [{}]}, "tools is not supported"),
        ({"response_format": {"type": "json_object"}}, "response_format is not supported"),
        ({"frobnicate": 1}, 'there is no field "frobnicate"'),
        ({"model": 3}, "model is 3"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "differ"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"top_logprobs": 3}, "top_logprobs needs logprobs"),
        ({"logprobs": 3}, "logprobs is 3"),
        ({"beam_width": 3}, "beam_width belongs to beam search"),
        ({"use_beam_search": "x"}, 'use_beam_search is "x"'),
        ({"use_beam_search": True, "temperature": 0.5}, "temperature has no meaning in beam"),
        ({"use_beam_search": True, "width": 3}, 'there is no field "width"'),
        ({"use_beam_search": True, "n": "2"}, "n_best is '2'"),
        ({"chat_template_kwargs": {"messages": 1}}, "may not set messages"),
        ({"chat_template_kwargs": 1}, "chat_template_kwargs is 1"),
        ({"add_generation_prompt": 1}, "add_generation_prompt is 1"),
    ],
)
def test_chat_bodies_that_are_refused(more: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        parse_openai({"messages": USER, **more}, True, DEFAULTS)


def test_other_refusals() -> None:
    for body, chats, said in (
        ([1], True, "the body is [1]"),
        ({"prompt": "x"}, True, "messages is missing"),
        ({"messages": USER}, False, "prompt is missing"),
        ({"prompt": "x", "best_of": 3, "n": 2}, False, "best_of is 3"),
        ({"prompt": "x", "echo": True}, False, "echo is not supported"),
        ({"prompt": []}, False, "prompt is []"),
    ):
        with pytest.raises(ValueError, match=re.escape(said)):
            parse_openai(body, chats, DEFAULTS)


NAMES = [
    "prompt", "messages", "n", "temperature", "stop", "logit_bias", "logprobs", "top_logprobs",
    "max_tokens", "max_completion_tokens", "use_beam_search", "beam_width", "early_stopping",
    "chat_template_kwargs", "best_of", "tools", "model", "top_k", "bad_words", "stop_token_ids",
]  # fmt: skip
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=6,
)


@given(st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=6), st.booleans(), st.booleans())
def test_any_json_is_either_understood_or_a_value_error(
    body: dict[str, Any], chats: bool, beams: bool
) -> None:
    body = json.loads(json.dumps(body))
    defaults = BEAMS if beams else DEFAULTS
    for parse in (
        lambda: parse_openai(body, chats, defaults),
        lambda: parse_request(body, defaults),
    ):
        with contextlib.suppress(ValueError):
            parsed = parse()
            assert bool(parsed.prompts) != parsed.is_chat
