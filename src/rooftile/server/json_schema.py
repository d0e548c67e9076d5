"""Which JSON schemas are accepted: a schema that would be followed in part only is refused.

The grammar's compiler ignores what it does not know, and some of what it knows where it stands beside
something else. An answer that merely looks as if it followed the schema is worse than a 400.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from rooftile.server.errors import ApiError, bad_request
from rooftile.server.json_pattern import Unfollowed, check_pattern
from rooftile.server.schema_values import SchemaValues, declared_types, listed_values

# A schema is a program for the compiler; these keep what it makes small.
MAX_BYTES = 32 * 1024
MAX_REPEATS = 1000
MAX_IN_PATTERNS = 1000  # characters that all of them stand for
MAX_MULTIPLES = 5000  # the sum of all multipleOf: each is a state for every remainder
MAX_INTEGER = 2**63  # the compiler knows no larger ones
# Properties x how many of them there may be: the grammar has a rule for each pair.
MAX_COUNTED = 3000
COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
# Followed nowhere, with the values that say nothing.
IGNORED: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(
        (
            "not", "if", "then", "else", "contains", "minContains", "maxContains",
            "dependentRequired", "dependentSchemas", "dependencies", "uniqueItems",
            "additionalItems", "$dynamicRef", "$recursiveRef",
        ),
        (None, False),
    ),
    **dict.fromkeys(("unevaluatedProperties", "unevaluatedItems"), (None, True)),
}  # fmt: skip
# Each is all that its schema says of values, but for a type that agrees with it.
WHOLE = ("$ref", "const", "enum", "anyOf", "oneOf", "allOf")
RANGE = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"})
# Of each type, what is followed together: one of these sets.
FOLLOWED: dict[str, tuple[frozenset[str], ...]] = {
    "null": (),
    "boolean": (),
    "integer": (RANGE, frozenset({"multipleOf"})),
    "number": (RANGE,),
    "string": (
        frozenset({"minLength", "maxLength"}), frozenset({"pattern"}), frozenset({"format"}),
    ),
    "array": (frozenset({"items", "prefixItems", "minItems", "maxItems"}),),
    "object": (
        frozenset({
            "properties", "required", "additionalProperties", "minProperties", "maxProperties",
        }),
        frozenset({"patternProperties"}),
        frozenset({"propertyNames"}),
    ),
}  # fmt: skip
OF_TYPES = {name: frozenset[str]().union(*sets) for name, sets in FOLLOWED.items()}
OF_TYPES["number"] |= {"multipleOf"}
ASSERTIONS = frozenset(WHOLE).union(*OF_TYPES.values())
# Without a type, these are taken for schemas of objects and of arrays.
IMPLIED = {"properties": "object", "items": "array", "prefixItems": "array"}
PLAIN = re.compile(r"[ !#-.0-\[\]-~]*")  # a name that JSON has as it is
# Where schemas stand within a schema: as values of these, in lists of these, as these themselves.
BY_NAME = ("properties", "patternProperties", "$defs", "definitions")
LISTED = ("anyOf", "oneOf", "allOf", "prefixItems")
SINGLE = ("items", "additionalProperties", "propertyNames")


def checked_schema(schema: dict[str, Any]) -> str:
    """The schema as JSON text, or one that allows less where its own could not be followed: beside names
    that are not plain ASCII there are no additional properties, which the compiler would let be called
    the same.

    Raises:
        ApiError: 400 for what cannot be followed, or is too large.
    """
    text = json.dumps(schema)
    if len(text) > MAX_BYTES:
        raise _refused(f"the schema has {len(text)} bytes; at most {MAX_BYTES} are accepted")
    schema = json.loads(text)  # its own, to change
    values = SchemaValues(schema)
    level: list[Any] = [schema]
    seen: set[int] = set()
    characters = multiples = 0
    while level:
        item = level.pop()
        if isinstance(item, dict) and id(item) not in seen:
            seen.add(id(item))
            _check(item)
            characters += _check_patterns(item)
            if characters > MAX_IN_PATTERNS:
                raise _refused(
                    f"the schema's patterns stand for more than {MAX_IN_PATTERNS} characters; use "
                    f"maxLength where you can"
                )
            multiple = item.get("multipleOf", 0)
            multiples += multiple if isinstance(multiple, int) else 0
            if multiples > MAX_MULTIPLES:
                raise _refused(f"the schema's multipleOf are more than {MAX_MULTIPLES} in all")
            _check_together(item, values)
            level += [*_within(item), values.target(item)]
            properties = item.get("properties")
            if isinstance(properties, dict) and not all(map(PLAIN.fullmatch, properties)):
                item["additionalProperties"] = False
    return json.dumps(schema)


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
    """Refuse what is not followed wherever it stands."""
    for name, nothing in IGNORED.items():
        if name in schema and not any(schema[name] is value for value in nothing):
            raise _refused(f"the schema has {name}, which is not supported")
    for name in COUNTS:
        count = schema.get(name)
        if isinstance(count, int | float) and count > MAX_REPEATS:
            raise _refused(f"the schema's {name} is {count:.6g}; at most {MAX_REPEATS} is accepted")
    if isinstance(schema.get("multipleOf"), float):
        raise _refused("the schema's multipleOf is no whole number, which is not supported")
    multiple = schema.get("multipleOf", 1)
    if isinstance(multiple, int) and multiple > MAX_REPEATS:
        raise _refused(f"the schema's multipleOf is {multiple}; at most {MAX_REPEATS} is accepted")
    reference = schema.get("$ref")
    if isinstance(reference, str) and not (reference == "#" or reference.startswith("#/")):
        raise _refused(
            f"the schema's $ref is {reference[:40]!r}; only # and paths within the document, as "
            f"#/$defs/name, are followed"
        )
    if isinstance(schema.get("allOf"), list) and len(schema["allOf"]) > 1:
        raise _refused("the schema has an allOf of several schemas, which is not supported")
    for name in ("anyOf", "oneOf", "allOf", "enum"):
        if schema.get(name) == []:
            raise _refused(f"the schema has an empty {name}, which nothing follows")
    for value in listed_values(schema) or ():
        _check_integers(value)
    _check_properties(schema)


def _check_patterns(schema: dict[str, Any]) -> int:
    """How many characters they stand for."""
    by_name = schema.get("patternProperties")
    characters = 0
    for pattern in (schema.get("pattern"), *(by_name if isinstance(by_name, dict) else ())):
        if not isinstance(pattern, str):
            continue
        try:
            characters += check_pattern(pattern)
        except Unfollowed as error:
            raise _refused(f"the schema's pattern {pattern[:40]!r} {error}") from None
    return characters


def _check_integers(value: Any) -> None:
    if type(value) is int and not -MAX_INTEGER <= value < MAX_INTEGER:
        raise _refused(f"the schema has the value {str(value)[:30]}; integers have 64 bits")
    if isinstance(value, list | dict):
        for entry in value.values() if isinstance(value, dict) else value:
            _check_integers(entry)


def _check_properties(schema: dict[str, Any]) -> None:
    required, properties = schema.get("required"), schema.get("properties", {})
    if not isinstance(properties, dict):
        return  # the compiler says what is wrong with it
    if not isinstance(required, list):
        required = []
    for name in required:
        if isinstance(name, str) and name not in properties:
            raise _refused(f"the schema requires {name[:40]!r}, which is not in its properties")
    for name in ("minProperties", "maxProperties"):
        count = schema.get(name)
        if isinstance(count, int | float) and count * len(properties) > MAX_COUNTED:
            raise _refused(
                f"the schema's {name} is {count:.6g} of {len(properties)} properties; their product "
                f"may be {MAX_COUNTED} at most"
            )
    least, sure = schema.get("minProperties"), max(1, len(required))
    if schema.get("additionalProperties") is False or not isinstance(least, int | float):
        return
    if least > sure:  # names may come twice then, and count once
        raise _refused(
            f"the schema's minProperties is {least:.6g}; more than {sure} needs "
            f"additionalProperties: false, or more of them required"
        )


def _check_together(schema: dict[str, Any], values: SchemaValues) -> None:
    """Refuse keywords of which only some would be followed."""
    present = schema.keys() & ASSERTIONS
    for name in WHOLE:
        if name not in present:
            continue
        if len(present) > 1:
            raise _refused(f"the schema has {min(present - {name})} beside {name}: put it inside")
        if "type" in schema and not values.types(schema) <= declared_types(schema):
            raise _refused(f"the schema has a type beside {name} that allows less: put it inside")
        if name == "oneOf" and not values.are_disjoint(schema["oneOf"]):
            raise _refused("the schema has a oneOf whose members may overlap: use anyOf")
        return
    types = declared_types(schema)
    if "type" not in schema:
        types = frozenset(IMPLIED[name] for name in IMPLIED.keys() & present)
        stray = present.difference(*(OF_TYPES[name] for name in types))
        if stray:
            raise _refused(f"the schema has {min(stray)} without a type: give one")
    for name in types:
        asked = present & OF_TYPES[name]
        if asked and not any(asked <= followed for followed in FOLLOWED[name]):
            listed = " and ".join(sorted(asked))
            raise _refused(f"the schema has {listed} for type {name}, which is not supported")


def _refused(message: str) -> ApiError:
    return bad_request(message, "response_format")
