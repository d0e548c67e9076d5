"""What all requests have in common: strict types, and which fields are known but not supported."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict


class ClientModel(BaseModel):
    """A request's body. Strict: no number for a string, no boolean for a number.

    unsupported: fields that other servers know -> the values that mean the same as leaving the
    field out. With another value the request is refused, since its answer would not be what was
    asked for. Fields that nobody knows are ignored, and logged.
    """

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)
    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {}


class ServerModel(BaseModel):
    """A part of an answer. Streams leave out the fields that they do not set."""

    model_config = ConfigDict(extra="forbid")
