"""The input of a long run: a JSON object per line, each a request with a digest of its own."""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rooftile.engine.request_body import ENDPOINTS, RequestBody, parse_openai, parse_request

if TYPE_CHECKING:
    from rooftile.engine.params import Params

DIGEST_BYTES = 8


@dataclass(frozen=True)
class Line:
    """A line that is not blank. number: from 1; index: from 0, blank lines not counted."""

    number: int
    index: int
    raw: bytes
    digest: str

    def read(self) -> dict[str, Any]:
        """Raises: ValueError for a line that is no JSON object."""
        try:
            value = json.loads(self.raw.decode("utf-8-sig" if self.number == 1 else "utf-8"))
        except RecursionError:
            raise ValueError("the JSON is nested too deeply") from None
        except ValueError as error:  # UnicodeDecodeError and JSONDecodeError are ones
            raise ValueError(f"not valid JSON: {error}") from None
        if not isinstance(value, dict):
            raise ValueError('a line must be a JSON object, such as {"prompt": "..."}')
        return value


@dataclass
class Scan:
    """What the first pass over the input finds out."""

    digests: array[int] = field(default_factory=lambda: array("Q"))  # by line; 0: blank
    num_requests: int = 0
    openai: bool = False  # whether there is a line in the format of an OpenAI batch


class InputFile:
    """JSON lines, read as often as needed and never held as a whole.

    settings: whatever else decides the answers; it enters the digests.
    """

    def __init__(self, path: Path, settings: str) -> None:
        self.path = path
        self._key = blake2b(settings.encode("utf-8", "surrogatepass"), digest_size=32).digest()

    def __iter__(self) -> Iterator[Line]:
        index = 0
        with self.path.open("rb") as file:
            for number, raw in enumerate(file, start=1):
                raw = raw.strip()
                if raw:
                    digest = blake2b(raw, digest_size=DIGEST_BYTES, key=self._key).hexdigest()
                    yield Line(number, index, raw, digest)
                    index += 1

    def scan(self) -> Scan:
        """One pass, a few bytes of memory a line.

        Raises:
            ValueError: two lines have the same id.
        """
        found, ids = Scan(), array("Q")
        for line in self:
            found.digests.extend([0] * (line.number - 1 - len(found.digests)))
            found.digests.append(int(line.digest, 16))
            found.num_requests += 1
            try:
                value = line.read()
            except ValueError:
                continue
            found.openai |= is_openai(value)
            name = _id_text(value)
            if name is not None:
                ids.append(_hash(name))
        self._check_unique(ids)
        return found

    def _check_unique(self, ids: array[int]) -> None:
        import numpy as np

        ordered = np.sort(np.frombuffer(ids, dtype=np.uint64)) if ids else np.empty(0, np.uint64)
        twice = set(ordered[1:][ordered[1:] == ordered[:-1]].tolist())
        if not twice:
            return
        seen: dict[str, int] = {}
        for line in self:
            try:
                name = _id_text(line.read())
            except ValueError:
                continue
            if name is None or _hash(name) not in twice:
                continue
            if name in seen:
                raise ValueError(
                    f"{self.path}: lines {seen[name]} and {line.number} have the same id {name}; "
                    f"give every line its own"
                )
            seen[name] = line.number


def is_openai(value: dict[str, Any]) -> bool:
    """Whether a line is in the format of an OpenAI batch."""
    return not value.keys().isdisjoint({"custom_id", "url", "body"})


def parse(value: dict[str, Any], defaults: Params) -> RequestBody:
    """Raises: ValueError for what is missing, unknown or out of range."""
    if not is_openai(value):
        if not isinstance(value.get("id"), str | int | None) or isinstance(value.get("id"), bool):
            raise ValueError("id must be a string or a whole number")
        return parse_request({k: v for k, v in value.items() if k != "id"}, defaults)
    unknown = value.keys() - {"custom_id", "method", "url", "body"}
    if unknown:
        raise ValueError(f"there is no field {json.dumps(min(unknown))} beside custom_id")
    if not isinstance(value.get("custom_id"), str):
        raise ValueError("custom_id is missing, or no string")
    if value.get("method", "POST") != "POST":
        raise ValueError("method must be POST")
    chats = ENDPOINTS.get(value["url"]) if isinstance(value.get("url"), str) else None
    if chats is None:
        raise ValueError(f"url must be one of {', '.join(ENDPOINTS)}")
    return parse_openai(value.get("body"), chats, defaults)


def _id_text(value: dict[str, Any]) -> str | None:
    name = value.get("custom_id" if is_openai(value) else "id")
    return json.dumps(name) if isinstance(name, str | int) else None


def _hash(name: str) -> int:
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "little")
