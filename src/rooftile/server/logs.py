"""The access log and request ids. It holds paths and numbers, nothing that a client wrote in a body."""

from __future__ import annotations

import logging
import re
import time
import uuid

from starlette.types import ASGIApp, Message, Receive, Scope, Send

logger = logging.getLogger("rooftile.server")

PROBES = ("/health", "/metrics")  # asked every few seconds
GOOD_ID = re.compile(rb"[\w.:-]{1,128}", re.ASCII)


class AccessLog:
    """Gives each request an id (the client's own X-Request-Id, where it is short and plain) and logs
    how it ended."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = _request_id(scope)
        started = time.perf_counter()
        status, complete = 0, False

        async def watch(message: Message) -> None:
            nonlocal status, complete
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = [*message.get("headers", ()), (b"x-request-id", request_id)]
                message = {**message, "headers": headers}
            elif not message.get("more_body", False):
                complete = True
            await send(message)

        try:
            await self._app(scope, receive, watch)
        finally:
            logger.log(
                logging.DEBUG if scope["path"] in PROBES else logging.INFO,
                "%s %s %s %s %.0f ms",
                request_id.decode(),
                scope["method"],
                ascii(scope["path"])[1:-1][:200],
                status if complete else "client left",
                (time.perf_counter() - started) * 1000,
            )


def _request_id(scope: Scope) -> bytes:
    for name, value in scope["headers"]:
        if name == b"x-request-id" and GOOD_ID.fullmatch(value):
            return bytes(value)
    return uuid.uuid4().hex.encode()
