"""A request as JSON: in Rooftile's own fields, or as a body of the OpenAI API.

Plain dictionaries in, checked values out; no tokens, no model. Fields that a body leaves out, or
sets to null, keep the value of `defaults`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

from rooftile.engine.params import BeamSearchParams, SamplingParams

if TYPE_CHECKING:
    from rooftile.engine.params import Params

ENDPOINTS = {"/v1/chat/completions": True, "/v1/completions": False}  # path -> whether it chats
ROLES = ("system", "developer", "user", "assistant")
RESERVED_VARIABLES = frozenset(  # what the chat template gets from elsewhere
    {"messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "self"}
)
SAMPLING_FIELDS = frozenset(f.name for f in fields(SamplingParams)) - {"logits_processor"}
BEAM_FIELDS = frozenset(f.name for f in fields(BeamSearchParams))

# Of the OpenAI API: fields that say nothing about the answer's text.
NOT_ABOUT_THE_ANSWER = frozenset(
    {"user", "metadata", "store", "service_tier", "prompt_cache_key", "safety_identifier"}
)
# Fields that are not supported, with the values that mean the same as leaving them out.
UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "echo": (False,),
    "function_call": ("none",),
    "functions": ([],),
    "modalities": (["text"],),
    "parallel_tool_calls": (True, False),
    "response_format": ({"type": "text"},),
    "stream": (False,),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
}
# What other servers call a field -> what it is called here.
OTHER_NAMES: Mapping[str, str] = {
    **dict.fromkeys(("max_length", "max_new_tokens", "n_predict", "num_predict"), "max_tokens"),
    "n_probs": "logprobs",
    "repeat_penalty": "repetition_penalty",
    **dict.fromkeys(
        ("ebnf", "format", "grammar", "guided_choice", "guided_grammar", "guided_json", "guided_regex",
         "json_schema", "regex", "structural_tag", "structured_outputs"),
        "response_format",
    ),
}  # fmt: skip
# What the OpenAI API, or servers of its kind, call fields of BeamSearchParams.
BEAM_NAMES = {"n": "n_best", "beam_width": "width"}


@dataclass(frozen=True)
class RequestBody:
    """What a request asks for: the continuation of prompts, or of one conversation."""

    params: Params
    prompts: tuple[str | list[int], ...] = ()
    messages: tuple[dict[str, str], ...] = ()
    template_options: dict[str, Any] = field(default_factory=dict)
    model: str | None = None  # that the body names

    @property
    def is_chat(self) -> bool:
        return bool(self.messages)


def parse_request(body: Mapping[str, Any], defaults: Params) -> RequestBody:
    """{"prompt": text or token ids} or {"messages": [...]}, and fields of the defaults' class.

    Raises:
        ValueError: a field that is missing, unknown or out of range, by its name.
    """
    given = {name: value for name, value in body.items() if value is not None}
    if ("prompt" in given) == ("messages" in given):
        raise ValueError('give either "prompt" or "messages"')
    own = SAMPLING_FIELDS if isinstance(defaults, SamplingParams) else BEAM_FIELDS
    changes = {name: v for name, v in given.items() if name not in ("prompt", "messages")}
    for name in changes:
        if name not in own:
            raise ValueError(_no_such_field(name, defaults))
    if "logit_bias" in changes:
        changes["logit_bias"] = token_biases(changes["logit_bias"])
    params = replace(defaults, **changes)
    if "messages" in given:
        return RequestBody(params, messages=_messages(given["messages"]))
    prompts = _prompts(given["prompt"])
    if len(prompts) != 1:
        raise ValueError(f"prompt holds {len(prompts)} prompts; give one a line")
    return RequestBody(params, prompts)


def parse_openai(body: Any, chats: bool, defaults: Params) -> RequestBody:
    """A body of /v1/chat/completions (`chats`) or /v1/completions.

    Raises:
        ValueError: a field that is missing, unknown, not supported or out of range, by its name.
    """
    if not isinstance(body, dict):
        raise ValueError(f"the body is {_shown(body)}; it must be a JSON object")
    given = {name: value for name, value in body.items() if value is not None}
    for name in NOT_ABOUT_THE_ANSWER:
        given.pop(name, None)
    for name, same in UNSUPPORTED.items():
        if name in given and given.pop(name) not in same:
            raise ValueError(f"{name} is not supported here; leave it out")
    model = given.pop("model", None)
    if model is not None and not isinstance(model, str):
        raise ValueError(f"model is {_shown(model)}; it must be a string")
    what = "messages" if chats else "prompt"
    if what not in given:
        raise ValueError(f"{what} is missing")
    content = given.pop(what)
    options = _template_options(given) if chats else {}
    best_of = given.pop("best_of", None) if not chats else None
    if best_of is not None and best_of != given.get("n", 1):
        raise ValueError(f"best_of is {_shown(best_of)}; only the value of n is supported")
    _openai_lengths(given, chats)
    if _searches(given, defaults):
        params: Params = _beam_params(given, defaults)
    else:
        params = _sampling_params(given, chats, defaults)
    if chats:
        return RequestBody(params, (), _messages(content), options, model)
    return RequestBody(params, _prompts(content), model=model)


def _openai_lengths(given: dict[str, Any], chats: bool) -> None:
    if not chats or "max_completion_tokens" not in given:
        return
    newer = given.pop("max_completion_tokens")
    if given.setdefault("max_tokens", newer) != newer:
        raise ValueError("max_tokens and max_completion_tokens differ; give one of them")


def _searches(given: dict[str, Any], defaults: Params) -> bool:
    asked = given.pop("use_beam_search", None)
    if asked not in (None, True, False):
        raise ValueError(f"use_beam_search is {_shown(asked)}; it must be true or false")
    return isinstance(defaults, BeamSearchParams) if asked is None else asked


def _beam_params(given: dict[str, Any], defaults: Params) -> BeamSearchParams:
    base = defaults
    if isinstance(base, SamplingParams):
        base = BeamSearchParams(
            max_tokens=base.max_tokens or BeamSearchParams.max_tokens,
            ignore_eos=base.ignore_eos,
            skip_special_tokens=base.skip_special_tokens,
        )
    changes = {}
    for name, value in given.items():
        own = BEAM_NAMES.get(name, name)
        if own not in BEAM_FIELDS or name in BEAM_NAMES.values():
            raise ValueError(_no_such_field(name, base))
        changes[own] = value
    if "width" not in changes and not isinstance(defaults, BeamSearchParams):
        n_best = changes.get("n_best", 1)
        changes["width"] = max(base.width, n_best) if type(n_best) is int else base.width
    return replace(base, **changes)


def _sampling_params(given: dict[str, Any], chats: bool, defaults: Params) -> SamplingParams:
    base = defaults
    if isinstance(base, BeamSearchParams):
        base = SamplingParams(
            max_tokens=base.max_tokens,
            ignore_eos=base.ignore_eos,
            skip_special_tokens=base.skip_special_tokens,
        )
    changes = dict(given)
    if chats:
        top = changes.pop("top_logprobs", None)
        wanted = changes.pop("logprobs", None)
        if wanted not in (None, True, False):
            raise ValueError(f"logprobs is {_shown(wanted)}; in a chat it is true or false")
        if top is not None and not wanted:
            raise ValueError("top_logprobs needs logprobs: true")
        if wanted is not None:
            changes["logprobs"] = (top or 0) if wanted else None
    if changes.get("top_k") == -1:  # other servers' way to say "all"
        changes["top_k"] = 0
    if "logit_bias" in changes:
        changes["logit_bias"] = token_biases(changes["logit_bias"])
    for name in changes:
        if name not in SAMPLING_FIELDS:
            raise ValueError(_no_such_field(name, base))
    return replace(base, **changes)


def _no_such_field(name: str, params: Params) -> str:
    if isinstance(params, BeamSearchParams) and name in SAMPLING_FIELDS:
        return f"{name} has no meaning in beam search; leave it out"
    if isinstance(params, SamplingParams) and name in (BEAM_FIELDS | BEAM_NAMES.keys()):
        return f"{name} belongs to beam search, which is not asked for"
    known = OTHER_NAMES.get(name)
    remedy = f"use {known}" if known in SAMPLING_FIELDS else "leave it out"
    return f"there is no field {_shown(name)} here; {remedy}"


def _template_options(given: dict[str, Any]) -> dict[str, Any]:
    options = given.pop("chat_template_kwargs", {})
    if not isinstance(options, dict):
        raise ValueError(f"chat_template_kwargs is {_shown(options)}; it must be an object")
    for name in options:
        if name in RESERVED_VARIABLES:
            raise ValueError(f"chat_template_kwargs may not set {name}")
    answer_next = given.pop("add_generation_prompt", True)
    if not isinstance(answer_next, bool):
        raise ValueError(f"add_generation_prompt is {_shown(answer_next)}; it is true or false")
    return options if answer_next else {**options, "add_generation_prompt": False}


def _messages(value: Any) -> tuple[dict[str, str], ...]:
    if not isinstance(value, list) or not value:
        raise ValueError(f"messages is {_shown(value)}; it must be a list with a message or more")
    return tuple(_message(entry, f"messages[{at}]") for at, entry in enumerate(value))


def _message(value: Any, where: str) -> dict[str, str]:
    if not isinstance(value, dict):
        raise ValueError(f"{where} is {_shown(value)}; it must be an object with role and content")
    role = value.get("role")
    if role not in ROLES:
        raise ValueError(f"{where}.role is {_shown(role)}; choose one of {', '.join(ROLES)}")
    for name, more in value.items():
        if name not in ("role", "content", "name") and more:
            raise ValueError(f"{where}.{name} is not supported here; leave it out")
    # developer: the newer name of the same role, which templates do not know.
    message = {
        "role": "system" if role == "developer" else role,
        "content": _text(value.get("content"), f"{where}.content"),
    }
    name = value.get("name")
    if name is not None:
        if not isinstance(name, str):
            raise ValueError(f"{where}.name is {_shown(name)}; it must be a string")
        message["name"] = name
    return message


def _text(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ValueError(f"{where} is {_shown(content)}; it must be a string or a list of parts")
    texts = []
    for at, part in enumerate(content):
        text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
        if not isinstance(text, str):
            raise ValueError(
                f'{where}[{at}] is {_shown(part)}; a part is {{"type": "text", "text": ...}}'
            )
        texts.append(text)
    return "\n".join(texts)


def _prompts(value: Any) -> tuple[str | list[int], ...]:
    """One entry a prompt: a text or token ids, or a list of either."""
    if isinstance(value, str):
        return (value,)
    if isinstance(value, list) and value:
        if all(type(entry) is int for entry in value):
            return (value,)
        if all(isinstance(entry, str) for entry in value):
            return tuple(value)
        if all(isinstance(e, list) and all(type(t) is int for t in e) for e in value):
            return tuple(value)
    raise ValueError(f"prompt is {_shown(value)}; it must be a text or a list of token ids")


def token_biases(value: Any) -> Any:
    """`logit_bias` of a body by token id; JSON has only strings as keys.

    Raises:
        ValueError: a key that is no token id, or no mapping.
    """
    if not isinstance(value, dict):
        raise ValueError(f"logit_bias is {_shown(value)}; it must map token ids to numbers")
    biases = {}
    for token, bias in value.items():
        if not (token.isascii() and token.isdigit() and len(token) < 10):
            raise ValueError(f"logit_bias has the key {_shown(token)}; keys are token ids")
        biases[int(token)] = bias
    return biases


def _shown(value: Any) -> str:
    text = "missing" if value is None else json.dumps(value)
    return text if len(text) <= 60 else f"{text[:60]}…"
