"""Request bodies: read up to a limit, parsed more strictly than `json` does, checked by a model."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import math
import re
from typing import Any, TypeVar

from fastapi import Request
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails
from starlette.requests import ClientDisconnect

from rooftile.engine.request_body import OTHER_NAMES
from rooftile.server.errors import ApiError, bad_request
from rooftile.server.protocol.base import ClientModel
from rooftile.server.protocol.response_format import FORMATS
from rooftile.server.service import Service

logger = logging.getLogger("rooftile.server")

MAX_DEPTH = 64
MAX_BRACKETS = 200_000  # millions of small arrays take seconds, in which no other thread runs
MOST_NAMED = 10  # unknown fields of a request in the log
LARGE = 64 * 1024  # bytes of a body that takes more than a moment to look through
# Only text that escapes something as \uD8.. or \u0000 can hold a lone surrogate or NUL.
SUSPECT_ESCAPE = re.compile(r"\\u(?:[dD][89a-fA-F]|0000)")
# Pydantic names the member of a union that it tried, as in response_format; clients know only the field.
UNION_MEMBER = re.compile(r"^(str|bool|int|constrained-str)$|[\[(]")
OTHER_TYPE = ("_type", "literal_error")  # ends of the problems of a value of another type
INPUT = "Input should be "
CLOSE = {"Connection": "close"}  # the rest of the body is not read

Model = TypeVar("Model", bound=ClientModel)


async def read_model(request: Request, model: type[Model], service: Service) -> Model:
    """The request's body as `model`.

    Raises:
        ApiError: 413 over the limit; 400 for everything else that is wrong with it.
    """
    _check_content_type(request)
    config = service.config
    try:
        raw = await asyncio.wait_for(_read(request, config.max_body_bytes), config.body_seconds)
    except asyncio.TimeoutError:
        raise ApiError(
            408, f"the body did not arrive within {config.body_seconds:g} s", headers=CLOSE
        ) from None
    except ClientDisconnect:  # nobody will read it, but it is no fault of the server
        raise bad_request("the client left before its body was complete") from None
    if len(raw) > LARGE:
        return await service.off_loop(lambda: validate(parse_json(raw), model))
    return validate(parse_json(raw), model)


def _check_content_type(request: Request) -> None:
    # Also keeps web pages of other origins from posting here: their browser would have to ask first.
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise bad_request("the body must be JSON, with the header `Content-Type: application/json`")


async def _read(request: Request, limit: int) -> bytes:
    too_large = ApiError(
        413, f"the body is over the limit of {limit} bytes", code="body_too_large", headers=CLOSE
    )
    announced = request.headers.get("content-length", "")
    if announced.isascii() and announced.isdigit() and int(announced[:20]) > limit:
        raise too_large
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > limit:
            raise too_large
        parts.append(part)
    return b"".join(parts)


def parse_json(raw: bytes) -> Any:
    """JSON as the standard has it: no NaN, no infinities, UTF-8, whole characters, no NUL."""
    try:
        text = raw.decode("utf-8")
        brackets = text.count("[") + text.count("{")
        if brackets > MAX_BRACKETS:
            raise ValueError(f"{brackets} opening brackets; at most {MAX_BRACKETS} are accepted")
        value = json.loads(text, parse_constant=_refuse_constant, parse_float=_finite)
    except RecursionError:
        raise bad_request(f"the JSON is nested deeper than {MAX_DEPTH} levels") from None
    except ValueError as error:  # UnicodeDecodeError and JSONDecodeError are ones
        reason = str(error).partition("; use sys.")[0]  # Python's advice is not for clients
        raise bad_request(f"the body is no JSON that can be read: {_short(reason)}") from None
    if brackets > MAX_DEPTH or SUSPECT_ESCAPE.search(text):
        _check_tree(value)
    return value


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


def _finite(number: str) -> float:
    value = float(number)
    if not math.isfinite(value):
        raise ValueError(f"{number[:20]} is beyond the range of numbers")
    return value


def _check_tree(value: Any) -> None:
    level = [value]
    for _ in range(MAX_DEPTH):
        deeper: list[Any] = []
        for item in level:
            if isinstance(item, str):
                _check_text(item)
            elif isinstance(item, dict):
                deeper += item.keys()
                deeper += item.values()
            elif isinstance(item, list):
                deeper += (entry for entry in item if not isinstance(entry, int))
        level = deeper
        if not level:
            return
    raise bad_request(f"the JSON is nested deeper than {MAX_DEPTH} levels")


def _check_text(text: str) -> None:
    if "\0" in text:
        raise bad_request("the text has a NUL character (\\u0000), which no prompt needs")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise bad_request(
            f"the text is not valid Unicode: half a surrogate pair at position {error.start}"
        ) from None


def validate(value: Any, model: type[Model]) -> Model:
    """`value` as `model`; a field that it does not know is logged, one that cannot be is refused."""
    if not isinstance(value, dict):
        raise bad_request(f"the body is a JSON {_json_type(value)}; it must be an object")
    try:
        parsed = model.model_validate(value)
    except ValidationError as error:
        raise _first_problem(error) from None
    unknown = []
    for name, extra in (parsed.model_extra or {}).items():
        accepted = model.unsupported.get(name)
        if accepted is None:
            unknown.append(ascii(name)[:80])
        elif extra is not None and extra not in accepted:
            known = OTHER_NAMES.get(name)
            remedy = "leave it out" if known is None else f"use {known}"
            raise bad_request(f"{name} is not supported by this server; {remedy}", name)
    if unknown:
        more = f" and {len(unknown) - MOST_NAMED} more" if len(unknown) > MOST_NAMED else ""
        names = ", ".join(unknown[:MOST_NAMED])
        logger.warning("%s: unknown fields ignored: %s%s", model.__name__, names, more)
    return parsed


def _first_problem(error: ValidationError) -> ApiError:
    problems = error.errors(include_url=False, include_context=False, include_input=False)
    nearest = _nearest(problems)
    path, loc = "", nearest[0]["loc"]
    for before, part in zip((None, *loc), loc, strict=False):
        if isinstance(part, str) and UNION_MEMBER.search(part):
            continue
        if before == "response_format" and part in FORMATS:
            continue
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else str(part)
    said = dict.fromkeys(_message(problem) for problem in nearest)
    message = f" or {INPUT}".join(said).replace(f" or {INPUT}{INPUT}", " or ")
    path = path[:100]  # it may hold a key that the client chose
    return bad_request(_short(f"{path}: {message}" if path else message), path or None)


def _nearest(problems: list[ErrorDetails]) -> list[ErrorDetails]:
    """What is wrong with the first bad field. Of a union's members each that was tried has a problem:
    those count that agree with the value's type, or else those that came furthest."""

    def field(problem: ErrorDetails) -> tuple[int | str, ...]:
        names = itertools.takewhile(
            lambda part: isinstance(part, int) or not UNION_MEMBER.search(part), problem["loc"]
        )
        return tuple(names)

    def rank(problem: ErrorDetails) -> tuple[bool, int]:
        return not problem["type"].endswith(OTHER_TYPE), len(problem["loc"])

    tried = [problem for problem in problems if field(problem) == field(problems[0])]
    best = max(map(rank, tried))
    return [problem for problem in tried if rank(problem) == best]


def _message(problem: ErrorDetails) -> str:
    if problem["type"] in ("model_type", "dict_type"):  # a class of ours is nothing to clients
        return f"{INPUT}an object"
    return problem["msg"].removeprefix("Value error, ")


def _short(text: str) -> str:
    return text if len(text) <= 300 else f"{text[:300]}…"


def _json_type(value: Any) -> str:
    names = {str: "string", list: "array", bool: "boolean", type(None): "null"}
    return names.get(type(value), "number")


def schema_of(model: type[BaseModel]) -> dict[str, Any]:
    """What `openapi_extra` needs to describe a body that FastAPI does not read itself."""
    reference = {"$ref": f"#/components/schemas/{model.__name__}"}
    return {
        "requestBody": {"required": True, "content": {"application/json": {"schema": reference}}}
    }
