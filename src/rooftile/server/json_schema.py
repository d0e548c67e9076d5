"""Which JSON schemas are accepted: a schema that would be followed in part only is refused.

The grammar's compiler ignores what it does not know. An answer that merely looks as if it followed
the schema is worse than a 400.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from rooftile.server.errors import ApiError, bad_request

# A schema is a program for the compiler; these keep what it makes small.
MAX_BYTES = 32 * 1024
MAX_REPEATS = 1000
MAX_PATTERN_CHARACTERS = 200
COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
IGNORED = (
    "not", "if", "then", "else", "contains", "minContains", "maxContains", "dependentRequired",
    "dependentSchemas", "dependencies", "uniqueItems", "$dynamicRef", "$recursiveRef",
)  # fmt: skip
ANNOTATIONS = frozenset(
    {
        "$schema", "$id", "$comment", "$defs", "definitions", "title", "description", "default",
        "examples", "deprecated", "readOnly", "writeOnly",
    }
)  # fmt: skip
# Where schemas stand within a schema: as values of these, in lists of these, as these themselves.
BY_NAME = ("properties", "patternProperties", "$defs", "definitions")
LISTED = ("anyOf", "oneOf", "allOf", "prefixItems")
SINGLE = ("items", "additionalProperties", "unevaluatedProperties", "unevaluatedItems",
          "propertyNames")  # fmt: skip


def checked_schema(schema: dict[str, Any]) -> str:
    """The schema as JSON text.

    Raises:
        ApiError: 400 for what cannot be followed, or is too large.
    """
    text = json.dumps(schema)
    if len(text) > MAX_BYTES:
        raise _refused(f"the schema has {len(text)} bytes; at most {MAX_BYTES} are accepted")
    level: list[Any] = [schema]
    while level:
        item = level.pop()
        if isinstance(item, dict):
            _check(item)
            level += _within(item)
    return text


def _within(schema: dict[str, Any]) -> Iterator[Any]:
    for name in BY_NAME:
        if isinstance(schema.get(name), dict):
            yield from schema[name].values()
    for name in LISTED:
        if isinstance(schema.get(name), list):
            yield from schema[name]
    for name in SINGLE:
        yield schema.get(name)


def _check(schema: dict[str, Any]) -> None:
    for name in IGNORED:
        if schema.get(name) not in (None, False):
            raise _refused(f"the schema has {name}, which is not supported")
    for name in COUNTS:
        count = schema.get(name)
        if isinstance(count, int | float) and count > MAX_REPEATS:
            raise _refused(f"the schema's {name} is {count:.6g}; at most {MAX_REPEATS} is accepted")
    pattern = schema.get("pattern")
    if isinstance(pattern, str) and len(pattern) > MAX_PATTERN_CHARACTERS:
        raise _refused(
            f"a pattern of the schema has {len(pattern)} characters; at most "
            f"{MAX_PATTERN_CHARACTERS} are accepted"
        )
    reference = schema.get("$ref")
    if isinstance(reference, str) and not reference.startswith("#"):
        raise _refused("the schema has a $ref to another document; only its own are followed")
    if isinstance(schema.get("allOf"), list) and len(schema["allOf"]) > 1:
        raise _refused("the schema has an allOf of several schemas, which is not supported")
    for name in ("$ref", "anyOf", "oneOf", "allOf"):
        beside = schema.keys() - ANNOTATIONS - {name, "type"}
        if name in schema and beside:
            raise _refused(f"the schema has {sorted(beside)[0]} beside {name}: put it inside")
    required, properties = schema.get("required"), schema.get("properties", {})
    if isinstance(required, list) and isinstance(properties, dict):
        for name in required:
            if isinstance(name, str) and name not in properties:
                raise _refused(f"the schema requires {name[:40]!r}, which is not in its properties")


def _refused(message: str) -> ApiError:
    return bad_request(message, "response_format")
