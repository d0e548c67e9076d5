"""JSON on demand: the answer is valid JSON of the schema, whatever the model would rather say."""

from __future__ import annotations

import datetime
import json
import pickle
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from typing import Any, Literal

import pydantic
import pytest
import torch

from rooftile.engine import grammar
from rooftile.engine.beginnings import common_length
from rooftile.engine.grammar import (
    ANY_OBJECT,
    GrammarCompiler,
    GrammarProcessor,
    JsonSpec,
    bind_grammars,
)
from rooftile.engine.llm import LLM
from rooftile.models.tokenizer import Tokenizer
from rooftile.server.errors import ApiError
from rooftile.server.json_schema import checked_schema
from tests.server.live import LiveServer

pytest.importorskip("xgrammar", reason="xgrammar is not installed")

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "kind": {"enum": ["cat", "dog"]},
    },
    "required": ["name", "age", "kind"],
    "additionalProperties": False,
}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "who?"}], "max_tokens": 120}


def check_person(text: str) -> None:
    person = json.loads(text)
    assert set(person) == {"name", "age", "kind"}
    assert isinstance(person["name"], str)
    assert 0 <= person["age"] <= 99
    assert person["kind"] in ("cat", "dog")


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_every_sample_follows_the_schema(server: LiveServer, path: str) -> None:
    chat = path == "/v1/chat/completions"
    body = {"response_format": SCHEMA, "n": 6, "seed": 1, "temperature": 1.5, "max_tokens": 120}
    body |= CHAT if chat else {"prompt": "who?"}
    with server.http() as http:
        response = http.post(path, json=body)
    assert response.status_code == 200, response.text
    choices = response.json()["choices"]
    texts = [choice["message"]["content"] if chat else choice["text"] for choice in choices]
    finished = [t for t, c in zip(texts, choices, strict=True) if c["finish_reason"] == "stop"]
    assert len(finished) >= 4
    assert len(set(finished)) > 1
    for text in finished:
        check_person(text)


def test_a_stream_with_a_grammar(server: LiveServer) -> None:
    client = server.openai()
    stream = client.chat.completions.create(
        model="tiny", stream=True, seed=1, response_format=SCHEMA, **CHAT
    )
    chunks = list(stream)
    assert chunks[-1].choices[0].finish_reason == "stop"
    check_person("".join(chunk.choices[0].delta.content or "" for chunk in chunks))


def test_any_object(server: LiveServer) -> None:
    body = {"response_format": {"type": "json_object"}, "n": 4, "seed": 3, "logit_bias": {}}
    with server.http() as http:
        choices = http.post("/v1/chat/completions", json={**CHAT, **body}).json()["choices"]
    for choice in choices:
        text = choice["message"]["content"]
        assert text.startswith("{")
        if choice["finish_reason"] == "stop":
            assert isinstance(json.loads(text), dict)


def test_text_is_no_grammar(server: LiveServer) -> None:
    with server.http() as http:
        body = {**CHAT, "temperature": 0, "max_tokens": 5}
        plain = http.post("/v1/chat/completions", json=body).json()
        text = http.post(
            "/v1/chat/completions", json={**body, "response_format": {"type": "text"}}
        ).json()
    assert plain["choices"] == text["choices"]


@pytest.mark.parametrize(
    "schema",
    [
        {"type": 5},
        {"type": "no such type"},
        {"$ref": "#/$defs/nowhere"},
        {"$ref": "http://example.com/schema.json"},
        {"type": "object", "properties": []},
        {"type": "string", "pattern": "("},
        {"type": "string", "pattern": "a" * 500},
        {"type": "string", "maxLength": 10**9},
        {"type": "array", "items": {"type": "string"}, "minItems": 10**6},
        {"enum": ["x" * 40_000]},
        {"not": {"type": "string"}},
        {"if": {"type": "string"}, "then": {"minLength": 2}},
        {"type": "array", "uniqueItems": True},
        {"type": "array", "items": {"allOf": [{"type": "integer"}, {"minimum": 5}]}},
        {"$defs": {"a": {"type": "integer"}}, "$ref": "#/$defs/a", "maximum": 3},
        {"type": "object", "required": ["nowhere"]},
        {"anyOf": [{"type": "integer"}], "minimum": 3},
        {"anyOf": [{"$ref": "#"}]},  # nothing follows it
        {
            "type": "object",
            "properties": {f"p{i}": {"type": "null"} for i in range(300)},
            "additionalProperties": False,
            "minProperties": 150,
        },
    ],
    ids=lambda schema: json.dumps(schema)[:40],
)
def test_a_bad_schema_is_a_400(server: LiveServer, schema: dict[str, Any]) -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
    with server.http() as http:
        response = http.post("/v1/chat/completions", json={**CHAT, "response_format": wanted})
        assert response.status_code == 400, response.text
        assert response.json()["error"]["param"] == "response_format"
        assert http.get("/health").status_code == 200


# Each is compiled without an error, and followed in part only.
HALF_FOLLOWED: list[dict[str, Any]] = [
    {"type": "number", "multipleOf": 2},
    {"type": "integer", "multipleOf": 2.5},
    {"type": "integer", "multipleOf": 2, "minimum": 3},
    {"type": "string", "pattern": "^a*$", "maxLength": 2},
    {"type": "string", "format": "date", "minLength": 30},
    {"type": "string", "pattern": "^.$", "format": "uuid"},
    {"minimum": 2},
    {"enum": ["a", 3], "type": "integer"},
    {"const": [1], "type": "string"},
    {"enum": [1, 2, 3], "minimum": 2},
    {"type": "integer", "anyOf": [{"type": "integer"}, {"type": "string"}]},
    {"oneOf": [{"type": "integer"}, {"type": "number", "minimum": 3}]},
    {"oneOf": [{"properties": {"a": {"type": "integer"}}}, {"type": "string"}]},
    {"type": "object", "unevaluatedProperties": False},
    {"type": "object", "minProperties": 2},  # two names may be the same
    {"type": "object", "properties": {"a": {}}, "propertyNames": {"pattern": "b"}},
    {"type": "object", "properties": {"a": {}}, "patternProperties": {"^b": {"type": "null"}}},
    {"type": "array", "items": {"$ref": "#/examples/0"}, "examples": [{"minimum": 2}]},
    {"$defs": {"a": {"$anchor": "q", "type": "null"}}, "$ref": "#q"},
    {"type": "integer", "multipleOf": 1025},
    {"anyOf": [{"type": "integer", "multipleOf": number} for number in range(990, 1000)]},
    {"anyOf": []},
    {"oneOf": []},
    {"enum": [{"a": [10**20]}]},
    {"type": "object", "patternProperties": {'"': {"type": "null"}}},
    {"type": "object", "patternProperties": {"a" * 500: {"type": "null"}}},
    {"type": "object", "propertyNames": {"pattern": "(?!a)b"}},
    *(
        {"type": "string", "pattern": pattern}
        for pattern in (
            *('^"$', "\\\\", '["]', r"\n", r"[\n]", r"\x22", r"[\u0022\u005c]", "[^]", r"^\0$"),
            *("(?=a)b?", "(?!a).", "(?<!a)b", "a^b", "a$b", "x(^a)", "(a$)b", "^(^a)*b$"),
            *("é.", "é[^a]", r"é\s", "[ -~]é", r"\A", "a{2}{2}", "[a]$?", r"\ud800", r"[^\s\S]"),
        )
    ),
]


@pytest.mark.parametrize("schema", HALF_FOLLOWED, ids=lambda schema: json.dumps(schema)[:50])
def test_what_would_be_followed_in_part_is_refused(schema: dict[str, Any]) -> None:
    for within in (
        schema,
        {"type": "array", "items": schema} if "examples" not in schema else schema,
    ):
        with pytest.raises(ApiError) as refused:
            checked_schema(within)
        assert refused.value.status == 400


@pytest.mark.parametrize(
    "patterns",
    [
        *(
            [pattern]
            for pattern in ("^(.{1,20}){1,20}$", "(.?){100}", r"(\w+\s?){1,100}", "(a{9}){200}")
        ),
        [f"^.{{1,{count}}}$" for count in range(50, 70)],
        [f"^([a-z]{{1,9}}[0-9]?){{1,{count}}}$" for count in range(3, 7)] * 2,
    ],
    ids=str,
)
def test_patterns_that_take_minutes_to_compile_are_refused(patterns: list[str]) -> None:
    properties = {f"p{at}": {"type": "string", "pattern": p} for at, p in enumerate(patterns)}
    with pytest.raises(ApiError, match="pattern"):
        checked_schema({"type": "object", "properties": properties})


@pytest.mark.parametrize(
    "pattern",
    [
        r"^([0-9a-fA-F]{1,4}:){7}[0-9a-fA-F]{1,4}$", r"^(\d{1,3}\.){3}\d{1,3}$", "^.{1,1000}$",
        r"^([a-z0-9]{1,20}\.){1,3}com$", r"^\S+@\S+\.\w{2,}$", "^(a|bc)*$", r"(^$)|(^\d+$)",
        r"^\d{4}-\d{2}-\d{2}T\d{2}:\d{2}:\d{2}(\.\d+)?(Z|[+-]\d{2}:\d{2})$",
    ],
)  # fmt: skip
def test_patterns_of_every_day_are_accepted(pattern: str) -> None:
    checked_schema({"type": "object", "properties": {"a": {"type": "string", "pattern": pattern}}})


@pytest.mark.parametrize("name", ["é", "a/b", 'q"', "back\\slash", "line\n"])
def test_no_other_property_is_called_as_one_that_is_named(
    compiler: GrammarCompiler, tokenizer: Tokenizer, name: str
) -> None:
    inner = {"type": "object", "properties": {name: {"type": "null"}}}
    make = compiler.compile(JsonSpec(checked_schema({"type": "array", "items": inner})))
    key = json.dumps(name, ensure_ascii=False)
    for value, follows in ("null", True), ("5", False):
        grammar = make()
        try:
            for token in tokenizer.encode(f"[{{{key}: {value}}}]"):
                grammar.advance(token)
            accepted = True
        except ValueError:
            accepted = False
        assert accepted == follows
    assert "additionalProperties" not in inner


def test_what_libraries_make_of_types_is_accepted() -> None:
    class Cat(pydantic.BaseModel):
        kind: Literal["cat"]
        lives: int = pydantic.Field(ge=0, lt=10)

    class Dog(pydantic.BaseModel):
        kind: Literal["dog"]
        friends: list[Dog | Cat] = []
        tags: dict[str, int] = pydantic.Field(min_length=1)
        place: tuple[float, float] | None = None
        name: str | None = pydantic.Field(None, max_length=9)

    class Owner(pydantic.BaseModel):
        pet: Cat | Dog = pydantic.Field(discriminator="kind")
        born: datetime.date
        phone: str = pydantic.Field(pattern="^[0-9]+$")
        more: Any = None

    Dog.model_rebuild(_types_namespace={"Dog": Dog, "Cat": Cat})
    schema = Owner.model_json_schema()
    assert json.loads(checked_schema(schema)) == schema


def test_schemas_that_refer_to_each_other_in_many_ways_are_looked_at_once() -> None:
    def doubling(make: Callable[[dict[str, str]], dict[str, Any]]) -> dict[str, Any]:
        members = {f"t{i}": make({"$ref": f"#/$defs/t{i + 1}"}) for i in range(200)}
        return {
            "oneOf": [{"$ref": "#/$defs/t0"}] * 2,
            "$defs": {**members, "t200": {"type": "null"}},
        }

    for make in (
        lambda next: {"oneOf": [next, next]},
        lambda next: {"type": "object", "properties": {"a": next, "b": next}, "required": ["a", "b"]},
    ):  # fmt: skip
        with pytest.raises(ApiError, match="may overlap"):
            checked_schema(doubling(make))


@pytest.mark.parametrize(
    ("wanted", "place"),
    [
        ({}, ""),
        ({"type": "json_schema"}, ".json_schema"),
        ({"type": "json_schema", "json_schema": {}}, ".json_schema.schema"),
        ({"type": "json_schema", "json_schema": {"schema": "text"}}, ".json_schema.schema"),
        ("json_object", ""),
        ({"type": None}, ""),
    ],
)
def test_a_bad_format_is_a_400(server: LiveServer, wanted: Any, place: str) -> None:
    with server.http() as http:
        response = http.post("/v1/chat/completions", json={**CHAT, "response_format": wanted})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == f"response_format{place}"


def test_what_does_not_go_together(server: LiveServer) -> None:
    for field, value in (("ignore_eos", True), ("min_tokens", 3), ("use_beam_search", True)):
        with server.http() as http:
            body = {**CHAT, "response_format": {"type": "json_object"}, field: value}
            assert http.post("/v1/chat/completions", json=body).status_code == 400


# ---------------------------------------------------------------------- the processor itself


@pytest.fixture(scope="module")
def tokenizer(tiny_path: Any) -> Tokenizer:
    llm = LLM(str(tiny_path), dtype="float32", random_weights=True, num_pages=8)
    assert llm.tokenizer is not None
    return llm.tokenizer


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(tokenizer, 260, frozenset({257}))


def allowed(processor: GrammarProcessor, output_ids: list[int]) -> set[int]:
    logits = processor(output_ids, torch.zeros(260))
    return set(logits.isfinite().nonzero().flatten().tolist())


def test_samples_in_any_order_see_the_same_masks(
    compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    """One processor serves samples that part, in turns; a fresh one for each text is the reference."""
    spec = JsonSpec(json.dumps(PERSON))
    shared = GrammarProcessor(spec)
    shared.bind(compiler)
    texts = ['{"name": "a", "age": 1', '{"name": "b", "age": 22', '{ "name":"abc']
    outputs = [tokenizer.encode(text) for text in texts]
    for step in range(0, max(map(len, outputs)), 3):
        for output in outputs:
            alone = GrammarProcessor(spec)
            alone.bind(compiler)
            prefix = output[:step]
            assert allowed(shared, prefix) == allowed(alone, prefix)
    # Back to an earlier place, as beams and preemption do it.
    assert allowed(shared, outputs[0][:5]) == allowed(shared, outputs[1][:5])


def test_many_texts_that_part_late_are_not_compared_with_each_other(
    compiler: GrammarCompiler, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared: list[int] = []

    def counted(one: Sequence[int], other: Sequence[int]) -> int:
        compared.append(len(one))
        return common_length(one, other)

    monkeypatch.setattr(grammar, "common_length", counted)
    processor = GrammarProcessor(ANY_OBJECT)
    processor.bind(compiler)
    texts = [tokenizer.encode(f'{{"{"x" * 300}{number:02}') for number in range(40)]
    for number in range(6):
        if number == 3:  # by now each has its own
            compared.clear()
        for text in texts:
            text += tokenizer.encode("yz"[number % 2])
            allowed(processor, text)
    assert len(compared) <= 3 * len(texts)


def test_the_end_may_come_only_when_the_json_is_whole(
    compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    processor = GrammarProcessor(ANY_OBJECT)
    processor.bind(compiler)
    assert 257 not in allowed(processor, tokenizer.encode("{"))
    whole = tokenizer.encode("{}")
    assert 257 in allowed(processor, whole)
    assert allowed(processor, [*whole, 257]) == {257}
    assert not {256, 258, 259} & allowed(processor, tokenizer.encode('{"'))  # special, no token
    with pytest.raises(ValueError, match="does not follow the grammar"):
        processor(tokenizer.encode("no"), torch.zeros(260))


def test_strings_have_no_raw_control_characters(
    compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    for more in ({}, {"maxLength": 5}, {"minLength": 1}, {"pattern": "[^a]*"}):
        processor = GrammarProcessor(JsonSpec(json.dumps({"type": "string", **more})))
        processor.bind(compiler)
        controls = {tokenizer.encode(chr(code))[0] for code in range(32)}
        assert len(controls) == 32
        assert not controls & allowed(processor, tokenizer.encode('"b'))


def test_a_property_may_be_called_like_a_keyword() -> None:
    schema = {"type": "object", "properties": {"not": {"type": "string"}, "if": {"type": "null"}}}
    assert json.loads(checked_schema(schema)) == schema


def test_a_processor_travels_as_its_specification(compiler: GrammarCompiler) -> None:
    processor = GrammarProcessor(JsonSpec(json.dumps(PERSON), strict=True))
    processor.bind(compiler)
    assert len(pickle.dumps(processor)) < 1000
    copy = pickle.loads(pickle.dumps(processor))
    assert copy.spec == processor.spec
    with pytest.raises(RuntimeError, match="not compiled"):
        copy([], torch.zeros(260))
    bind_grammars(copy, compiler)
    assert allowed(copy, []) == allowed(processor, [])
    with pytest.raises(ValueError, match="needs a tokenizer"):
        bind_grammars(copy, None)


def test_without_xgrammar_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tokenizer: Tokenizer
) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "xgrammar", None)
    with pytest.raises(NotImplementedError, match="pip install 'rooftile\\[grammar\\]'"):
        GrammarCompiler(tokenizer, 260, frozenset({257})).compile(ANY_OBJECT)


def test_schemas_that_take_long_hold_up_nobody_else(
    make_server: Callable[..., LiveServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = make_server()
    grammars = server.server.service.grammars
    assert grammars is not None
    go = threading.Event()
    compile_now = grammars._compile

    def compile_later(spec: JsonSpec) -> Any:
        assert go.wait(60)
        return compile_now(spec)

    def ask(maximum: int) -> int:
        schema = {"type": "integer", "minimum": 0, "maximum": maximum}
        wanted = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
        with server.http() as http:
            body = {**CHAT, "max_tokens": 5, "response_format": wanted}
            return http.post("/v1/chat/completions", json=body).status_code

    assert ask(9) == 200
    monkeypatch.setattr(grammars, "_compile", compile_later)
    monkeypatch.setattr("rooftile.server.service.MOST_COMPILING", 3)
    with ThreadPoolExecutor(4) as clients:
        slow = [clients.submit(ask, 10 + number) for number in range(4)]
        (full,) = wait(slow, return_when=FIRST_COMPLETED, timeout=60).done
        assert full.result() == 429  # one more than may wait
        with server.http() as http:
            texts = http.post("/v1/chat/completions", json={**CHAT, "max_tokens": 2})
        assert texts.status_code == 200
        assert ask(9) == 200  # its grammar is known
        go.set()
        assert sorted(future.result(60) for future in slow) == [200, 200, 200, 429]
    server.assert_idle()
