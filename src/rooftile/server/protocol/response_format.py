"""`response_format`: text, some JSON object, or JSON of a schema."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from rooftile.server.protocol.base import ClientModel

FORMATS = ("text", "json_object", "json_schema")


class TextFormat(ClientModel):
    type: Literal["text"]


class JsonObjectFormat(ClientModel):
    type: Literal["json_object"]


class JsonSchema(ClientModel):
    name: str | None = None
    description: str | None = None
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    strict: bool | None = None


class JsonSchemaFormat(ClientModel):
    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat = Annotated[
    TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")
]
