"""Typed reading of a checkpoint's configuration, with errors that name the field."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

_MISSING = object()
LARGEST = 2**31 - 1  # of any size
MOST_PARTS = 10_000


class Fields:
    """A configuration; `where` (a path) and `prefix` (of every field's name) are for messages."""

    def __init__(self, values: Mapping[str, Any], where: str, prefix: str = "") -> None:
        self.values = values
        self.where = where
        self.prefix = prefix

    def error(self, name: str, problem: str) -> ValueError:
        return ValueError(f"{self.where}: {self.prefix}{name} {problem}")

    def located(self, error: ValueError) -> ValueError:
        """The same error, with the file it comes from."""
        text = str(error)
        return error if text.startswith(self.where) else ValueError(f"{self.where}: {text}")

    def filled(self, defaults: Mapping[str, Any]) -> Fields:
        """With these values for fields that are absent; one that is null stays null."""
        prefixed = {self.prefix + name: value for name, value in defaults.items()}
        return Fields({**prefixed, **self.values}, self.where, self.prefix)

    def get(self, name: str, default: Any = None) -> Any:
        """The value, or `default` where the field is absent or null."""
        value = self.values.get(self.prefix + name)
        return default if value is None else value

    def has(self, name: str) -> bool:
        """Whether the field is present, be it null."""
        return self.prefix + name in self.values

    def integer(
        self, name: str, default: Any = _MISSING, *, least: int = 1, most: int = LARGEST
    ) -> int:
        value = self._required(name, default)
        # GGUF, whose fields have a prefix, may give a number per layer.
        if (
            self.prefix
            and isinstance(value, list)
            and value
            and value.count(value[0]) == len(value)
        ):
            value = value[0]
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise self.error(name, f"is {value!r:.200}; expected one integer of at least {least}")
        if value > most:
            raise self.error(name, f"is {value!r:.200}; expected at most {most}")
        return value

    def count(self, name: str, default: Any = _MISSING) -> int:
        """A number of parts that are built one by one: layers, experts."""
        return self.integer(name, default, most=MOST_PARTS)

    def number(self, name: str, default: Any = _MISSING) -> float:
        value = self._required(name, default)
        if (
            isinstance(value, bool)
            or not isinstance(value, (int, float))
            or not 0 < value <= sys.float_info.max
        ):
            raise self.error(
                name, f"is {value!r:.200}; expected a positive number that a float holds"
            )
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        value = self.get(name, default)
        if not isinstance(value, bool):
            raise self.error(name, f"is {value!r}; expected true or false")
        return value

    def names(self, name: str) -> list[str]:
        value = self.get(name, [])
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.error(name, f"is {value!r:.200}; expected a list of names")
        return value

    def table(self, name: str) -> dict[str, Any]:
        value = self.get(name, {})
        if not isinstance(value, dict):
            raise self.error(name, f"is {value!r:.200}; expected an object")
        return value

    def refuse(self, **allowed: tuple[Any, ...]) -> None:
        """Raise where a feature that nothing here implements is switched on.

        allowed: field -> the values, besides absent and null, that leave it off.
        """
        for name, harmless in allowed.items():
            value = self.get(name)
            if value is not None and value not in harmless:
                raise self.error(
                    name,
                    f"is {value!r}, which is not supported for this model; only models without it are",
                )

    def _required(self, name: str, default: Any) -> Any:
        value = self.get(name)
        if value is not None:
            return value
        if default is _MISSING:
            raise self.error(name, "is missing; it is needed to build the model")
        return default
