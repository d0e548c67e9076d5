"""The application: which path leads to what."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.openapi.utils import get_openapi
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from rooftile import __version__
from rooftile.engine.async_llm import EngineDeadError
from rooftile.engine.outputs import EngineStats
from rooftile.server.auth import KeyCheck
from rooftile.server.body import read_model, schema_of
from rooftile.server.chat import chat
from rooftile.server.completions import complete
from rooftile.server.errors import ApiError, install_handlers
from rooftile.server.logs import AccessLog
from rooftile.server.page import page_router
from rooftile.server.protocol.base import ClientModel
from rooftile.server.protocol.chat import ChatChunk, ChatCompletion, ChatRequest
from rooftile.server.protocol.completion import Completion, CompletionRequest
from rooftile.server.protocol.errors import ErrorBody
from rooftile.server.protocol.models import ModelCard, ModelList, Version
from rooftile.server.protocol.tokenization import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
)
from rooftile.server.service import Service
from rooftile.server.streaming import Answer
from rooftile.server.tokenization import detokenize, tokenize

Received = TypeVar("Received", bound=ClientModel)
Handle = Callable[[Service, Received], Awaitable[Any]]
REQUESTS = (ChatRequest, CompletionRequest, TokenizeRequest, DetokenizeRequest)
ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorBody} for status in (400, 401, 404, 408, 413, 429, 500, 503)
}
STATS_SECONDS = 5.0  # a step of a large batch may hold up the answer for a while


def create_app(service: Service) -> FastAPI:
    app = FastAPI(
        title="Rooftile",
        version=__version__,
        docs_url=None,  # its page would load scripts from elsewhere
        redoc_url=None,
    )
    install_handlers(app)
    app.include_router(page_router())
    app.include_router(_public_router(service))
    app.include_router(_keyed_router(service))
    app.add_middleware(AccessLog)
    app.openapi = lambda: _openapi(app)  # type: ignore[method-assign]
    return app


def _public_router(service: Service) -> APIRouter:
    """What load balancers and Prometheus read, without a key."""
    router = APIRouter()

    @router.get("/health", responses={503: ERRORS[503]})
    async def health() -> JSONResponse:
        """200 when requests can be answered."""
        _ = service.llm  # raises
        return JSONResponse({"status": "ok"})

    @router.get("/version", response_model=Version)
    async def show_version() -> Response:
        return JSONResponse({"version": __version__})

    @router.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        """For Prometheus."""
        text = service.metrics.render(await _stats(service))
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    return router


async def _stats(service: Service) -> EngineStats | None:
    try:
        return await asyncio.wait_for(service.llm.stats(), STATS_SECONDS)
    except (ApiError, EngineDeadError, asyncio.TimeoutError):
        return None


def _keyed_router(service: Service) -> APIRouter:
    router = APIRouter(dependencies=[Depends(KeyCheck(service.config.api_keys))], responses=ERRORS)

    def post(path: str, model: type[Received], handle: Handle[Received], **answers: Any) -> None:
        async def endpoint(request: Request) -> Response:
            _ = service.llm  # 503 before a body is read
            body = await read_model(request, model, service)
            return Answer(lambda: handle(service, body))

        endpoint.__name__ = handle.__name__
        endpoint.__doc__ = None
        router.add_api_route(
            path, endpoint, methods=["POST"], openapi_extra=schema_of(model), **answers
        )

    # No schema: OpenAPI 3.1 has none for a sequence of events, and tools read one as that of each event.
    stream: dict[str, Any] = {"content": {"text/event-stream": {}}}
    post(
        "/v1/completions",
        CompletionRequest,
        complete,
        response_model=Completion,
        responses={200: stream},
    )
    post(
        "/v1/chat/completions",
        ChatRequest,
        chat,
        response_model=ChatCompletion,
        responses={200: stream},
    )
    post("/tokenize", TokenizeRequest, tokenize, response_model=TokenizeResponse)
    post("/detokenize", DetokenizeRequest, detokenize, response_model=DetokenizeResponse)

    @router.get("/v1/models", response_model=ModelList)
    async def models() -> Response:
        cards = [_card(service, name) for name in service.model_names]
        return _json(ModelList(object="list", data=cards))

    @router.get("/v1/models/{name:path}", response_model=ModelCard)
    async def model(name: str) -> Response:
        return _json(_card(service, service.check_model(name)))

    return router


def _card(service: Service, name: str) -> ModelCard:
    return ModelCard(
        id=name,
        object="model",
        created=service.created,
        owned_by="rooftile",
        root=service.llm.model_name,
        max_model_len=service.llm.limits.max_model_len,
        sampling_defaults=service.llm.sampling_defaults,
    )


def _json(model: BaseModel) -> Response:
    return Response(model.model_dump_json(), media_type="application/json")


def _openapi(app: FastAPI) -> dict[str, Any]:
    """FastAPI's description, with the bodies that it does not read itself."""
    if app.openapi_schema is None:
        schema = get_openapi(title=app.title, version=app.version, routes=app.routes)
        _, bodies = models_json_schema(
            [(model, "validation") for model in REQUESTS] + [(ChatChunk, "serialization")],
            ref_template="#/components/schemas/{model}",
        )
        components = schema.setdefault("components", {}).setdefault("schemas", {})
        components.update(bodies["$defs"])
        app.openapi_schema = schema
    return app.openapi_schema
