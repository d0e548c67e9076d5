"""Errors in OpenAI's shape: {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from rooftile.engine.async_llm import EngineDeadError

logger = logging.getLogger("rooftile.server")


class ApiError(Exception):
    """An answer other than 200. It becomes a JSON body, or an event of a stream under way."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.body: dict[str, Any] = {
            "error": {"message": message, "type": kind, "param": param, "code": code}
        }
        self.headers = dict(headers or {})


def bad_request(message: str, param: str | None = None) -> ApiError:
    return ApiError(400, message, param=param)


def unavailable(message: str, code: str, retry_seconds: int | None = None) -> ApiError:
    headers = {} if retry_seconds is None else {"Retry-After": str(retry_seconds)}
    return ApiError(503, message, kind="service_unavailable", code=code, headers=headers)


def queue_full(message: str) -> ApiError:
    headers = {"Retry-After": "1"}
    return ApiError(429, message, kind="rate_limit_error", code="queue_full", headers=headers)


def failed(message: str) -> ApiError:
    return ApiError(500, message, kind="server_error", code="internal_error")


def as_api_error(error: Exception) -> ApiError:
    """Any exception as what a client may know of it."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, EngineDeadError):
        return unavailable("the engine has ended; see the server's log", "engine_dead")
    logger.error("a request failed", exc_info=error)
    return failed("the server failed on this request; see its log")


def install_handlers(app: FastAPI) -> None:
    async def handle(_: Request, error: Exception) -> JSONResponse:
        problem = as_api_error(error)
        return JSONResponse(problem.body, problem.status, problem.headers)

    async def handle_http(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code)
        message = str(error.detail)
        if code is not None:  # of the router: a path, or a method of it, that nobody serves
            path = ascii(request.url.path)[1:-1][:100]
            message = f"there is no {request.method} {path} here; /openapi.json lists what there is"
        problem = ApiError(error.status_code, message, code=code, headers=error.headers or {})
        return JSONResponse(problem.body, problem.status, problem.headers)

    app.add_exception_handler(HTTPException, handle_http)
    app.add_exception_handler(ApiError, handle)
    app.add_exception_handler(EngineDeadError, handle)
    app.add_exception_handler(Exception, handle)
