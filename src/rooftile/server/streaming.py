"""Answers that end when their client leaves: one JSON body, or server-sent events."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

from pydantic import BaseModel
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from rooftile.server.errors import as_api_error

DONE = b"data: [DONE]\n\n"
EVENT_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # proxies must pass events on at once
]

Work = Callable[[], Awaitable[BaseModel | AsyncIterator[BaseModel]]]


class Answer(Response):
    """Sends what `work` returns: a model as JSON, an iterator of models as a stream of events.

    `work` runs only as long as its client is there: a client that leaves cancels it. Errors before
    the first byte become the usual error answers, later ones an event of the stream.
    """

    def __init__(self, work: Work) -> None:
        self._work = work
        self.background = None
        self.status_code = 200

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        work = asyncio.create_task(self._run(send))
        leaving = asyncio.create_task(_disconnected(receive))
        try:
            await asyncio.wait({work, leaving}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (leaving, work):
                task.cancel()  # does nothing to a task that is done
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.wait({task})
        if not work.cancelled():
            work.result()

    async def _run(self, send: Send) -> None:
        result = await self._work()
        if isinstance(result, BaseModel):
            await _send_json(result, send)
            return
        start = {"type": "http.response.start", "status": 200, "headers": EVENT_HEADERS}
        started = False
        try:
            async for event in result:
                if not started:
                    started = True
                    await send(start)
                await send(_chunk(b"data: " + _json(event) + b"\n\n"))
        except Exception as error:
            if not started:
                raise
            problem = JSONResponse(as_api_error(error).body).body
            await send(_chunk(b"data: " + bytes(problem) + b"\n\n"))
        finally:
            await result.aclose()  # type: ignore[attr-defined]  # it is a generator
        await send({"type": "http.response.body", "body": DONE, "more_body": False})


def _json(model: BaseModel) -> bytes:
    return model.model_dump_json(exclude_unset=True).encode()


def _chunk(data: bytes) -> dict[str, object]:
    return {"type": "http.response.body", "body": data, "more_body": True}


async def _send_json(model: BaseModel, send: Send) -> None:
    body = _json(model)
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
    ]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
