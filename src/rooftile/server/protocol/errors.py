"""The shape of every error."""

from __future__ import annotations

from rooftile.server.protocol.base import ServerModel


class ErrorDetail(ServerModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(ServerModel):
    error: ErrorDetail
