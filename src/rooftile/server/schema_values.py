"""What values a JSON schema may have: of which types, and whether two schemas have one in common."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

TYPE_NAMES = {
    type(None): "null", bool: "boolean", int: "integer", float: "number", str: "string",
    list: "array", dict: "object",
}  # fmt: skip
ALL_TYPES = frozenset(TYPE_NAMES.values())


class SchemaValues:
    """Follows references within one document. Each question about a place is answered once, so that
    schemas that refer to each other in many ways take no longer than they are large."""

    def __init__(self, document: dict[str, Any]) -> None:
        self._document = document
        self._types: dict[int, frozenset[str]] = {}
        self._differing: dict[tuple[int, int], bool] = {}

    def target(self, schema: Any) -> Any:
        """What its $ref points to; itself without one, None where it leads nowhere."""
        if not isinstance(schema, dict) or not isinstance(schema.get("$ref"), str):
            return schema
        place: Any = self._document
        for part in schema["$ref"].removeprefix("#").split("/")[1:]:
            part = part.replace("~1", "/").replace("~0", "~")
            if isinstance(place, list) and part.isdecimal() and len(part) < 6:
                place = place[int(part)] if int(part) < len(place) else None
            else:
                place = place.get(part) if isinstance(place, dict) else None
        return place

    def types(self, schema: Any) -> frozenset[str]:
        """The types that its values may have, at most."""
        if not isinstance(schema, dict):
            return ALL_TYPES
        known = self._types.get(id(schema))
        if known is None:
            self._types[id(schema)] = frozenset()  # what a circle adds to itself
            known = self._types[id(schema)] = self._find_types(schema)
        return known

    def _find_types(self, schema: dict[str, Any]) -> frozenset[str]:
        values = listed_values(schema)
        if values is not None:
            return frozenset(_type_of(value) for value in values)
        for name in ("anyOf", "oneOf", "allOf"):
            if isinstance(schema.get(name), list):
                return frozenset().union(*map(self.types, schema[name]))
        if "$ref" in schema:
            return self.types(self.target(schema))
        return declared_types(schema) or ALL_TYPES

    def are_disjoint(self, members: Any) -> bool:
        """Whether no value can be of two of these schemas: they differ by type, or by a value that
        both fix."""
        if not isinstance(members, list):
            return True  # whoever reads the schema says what is wrong with it
        return all(self._differ(*pair) for pair in itertools.combinations(members, 2))

    def _differ(self, one: Any, other: Any) -> bool:
        pair = id(one), id(other)
        known = self._differing.get(pair)
        if known is None:
            self._differing[pair] = False
            known = self._differing[pair] = self._find_difference(one, other)
        return known

    def _find_difference(self, one: Any, other: Any) -> bool:
        if not self.types(one) & self.types(other):
            return True
        one, other = self.target(one), self.target(other)
        if not isinstance(one, dict) or not isinstance(other, dict):
            return False
        first, second = listed_values(one), listed_values(other)
        if first is not None and second is not None:
            return not any(value in second for value in first)
        return any(
            self._differ(one["properties"][name], other["properties"][name])
            for name in _fixed_properties(one) & _fixed_properties(other)
        )


def declared_types(schema: dict[str, Any]) -> frozenset[str]:
    """What "type" says; an integer is a number, too."""
    declared = schema.get("type")
    names: Iterable[Any] = declared if isinstance(declared, list) else [declared]
    found = frozenset(name for name in names if isinstance(name, str)) & ALL_TYPES
    return found | {"integer"} if "number" in found else found


def listed_values(schema: dict[str, Any]) -> list[Any] | None:
    """All that it allows, where it lists them."""
    if "const" in schema:
        return [schema["const"]]
    return schema["enum"] if isinstance(schema.get("enum"), list) else None


def _fixed_properties(schema: dict[str, Any]) -> set[str]:
    """The properties that every value has, where the schema tells more of them."""
    required, properties = schema.get("required"), schema.get("properties")
    if not isinstance(required, list) or not isinstance(properties, dict):
        return set()
    return {name for name in required if isinstance(name, str) and name in properties}


def _type_of(value: Any) -> str:
    if isinstance(value, float) and value.is_integer():
        return "integer"
    return TYPE_NAMES[type(value)]
