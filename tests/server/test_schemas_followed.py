"""Schemas that are accepted are followed: whatever text their grammar allows is of the schema."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, given, settings

from rooftile.engine.grammar import GrammarCompiler, GrammarProcessor, JsonSpec
from rooftile.engine.token_bytes import TokenBytes
from rooftile.models.tokenizer import Tokenizer, tokenizer_from_directory
from rooftile.server.errors import ApiError
from rooftile.server.json_schema import checked_schema

pytest.importorskip("xgrammar", reason="xgrammar is not installed")
jsonschema_rs = pytest.importorskip("jsonschema_rs", reason="jsonschema_rs is not installed")

END = 257
NUMBERS = st.sampled_from([-3, 0, 1, 5, 100, 2.5, -0.5])
COUNTS = st.integers(0, 3)
NAMES = st.sampled_from(["a", "b", "é", 'q"'])
VALUES = st.sampled_from([1, "a", None, True, 2.5, 'b"', {"a": 1}, [1, 2], "é\n", -0.0, ""])
ATOMS = st.sampled_from(
    [
        *(
            "a",
            "b",
            r"\d",
            r"\w",
            r"\s",
            r"\S",
            r"\D",
            ".",
            "^",
            "$",
            "|",
            "(",
            ")",
            "(?:",
            "*",
            "?",
        ),
        *("+", "{1,2}", "[ab]", "[^a]", '[a"]', '["]', '"', r"\\", r"\n", r"[\n]", "[ -~]", "é"),
        *("[é-ü]", r"\x22", r"\u00e9", "[^é]", "-", r"[\s\S]", r"\.", "/", "(?=", r"\A"),
    ]
)
PATTERNS = st.sampled_from(
    ["^a+$", "b", "^[a-c]{2,3}$", "x|yy", "^(ab)*$", "^$", "\\."]
) | st.lists(ATOMS, min_size=1, max_size=6).map("".join)
TYPES = st.sampled_from(["integer", "number", "string", "object", "array", "boolean", "null"])


def some(**fields: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({}, optional=fields)


def of_type(name: str, **fields: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return some(**fields).map(lambda given: {"type": name, **given})


RANGE = dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), NUMBERS) | {
    "multipleOf": st.sampled_from([2, 7, 0.5])
}
LEAVES = st.one_of(
    of_type("integer", **RANGE),
    of_type("number", **RANGE),
    of_type("string", minLength=COUNTS, maxLength=st.integers(3, 5), pattern=PATTERNS),
    of_type("string", format=st.sampled_from(["date", "uuid"]), maxLength=COUNTS),
    st.lists(VALUES, min_size=1, max_size=3).map(lambda values: {"enum": values}),
    st.tuples(VALUES, TYPES).map(lambda pair: {"const": pair[0], "type": pair[1]}),
    some(minLength=COUNTS, minimum=NUMBERS, type=st.lists(TYPES, min_size=1, max_size=2)),
    st.sampled_from([{"$ref": "#/$defs/t"}, {}]),
)


def containers(schemas: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    members = st.lists(schemas, min_size=1, max_size=3)
    objects = st.dictionaries(NAMES, schemas, max_size=3).flatmap(
        lambda properties: of_type(
            "object",
            properties=st.just(properties),
            required=st.sets(st.sampled_from(sorted(properties))).map(sorted)
            if properties
            else st.just([]),
            additionalProperties=st.one_of(st.just(False), schemas),
            minProperties=COUNTS,
            maxProperties=st.integers(2, 4),
            propertyNames=st.just({"pattern": "^[a-c]+$"}),
        )
    )
    return st.one_of(
        objects,
        of_type("array", items=schemas, prefixItems=members, minItems=COUNTS, maxItems=COUNTS),
        some(properties=st.dictionaries(NAMES, schemas, max_size=2), items=schemas),
        st.tuples(st.sampled_from(["anyOf", "oneOf", "allOf"]), members).map(
            lambda pair: {pair[0]: pair[1]}
        ),
    )


SCHEMAS = st.recursive(LEAVES, containers, max_leaves=5).map(
    lambda schema: {**schema, "$defs": {"t": {"type": "integer", "minimum": 3}}}
)


@pytest.fixture(scope="module")
def tokenizer(tiny_path: Path) -> Tokenizer:
    tokenizer = tokenizer_from_directory(tiny_path)
    assert tokenizer is not None
    return tokenizer


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(tokenizer, 260, frozenset({END}))


@given(schema=SCHEMAS, strict=st.booleans(), seed=st.integers(0, 2**32))
@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
def test_every_text_that_ends_is_of_the_schema(
    compiler: GrammarCompiler, tokenizer: Tokenizer, schema: dict[str, Any], strict: bool, seed: int
) -> None:
    try:
        processor = GrammarProcessor(JsonSpec(checked_schema(schema), strict))
        processor.bind(compiler)
    except (ApiError, ValueError):
        return  # refused, as the user is told
    text = walk(processor, TokenBytes(tokenizer), random.Random(seed))
    if text is not None:
        assert jsonschema_rs.is_valid(schema, json.loads(text)), text


def walk(processor: GrammarProcessor, spelled: TokenBytes, draw: random.Random) -> bytes | None:
    """A text that the grammar allows, by ASCII tokens where it can be; None if it does not end."""
    ids: list[int] = []
    for _ in range(120):
        allowed = processor(ids, torch.zeros(260)).isfinite().nonzero().flatten().tolist()
        if END in allowed and (len(allowed) == 1 or draw.random() < 0.5):
            return b"".join(spelled[token] for token in ids)
        others = [token for token in allowed if token != END]
        closing = [token for token in others if spelled[token] in (b'"', b"}", b"]")]
        plain = [
            token for token in others if spelled[token][0] in b'{}[]",:0123456789-.eabcxytfnul'
        ]
        ids.append(draw.choice((len(ids) > 25 and closing) or plain or others))
    return None
