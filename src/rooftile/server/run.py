"""Running the server: one port, bound once, and an end that keeps its promises."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import signal
import socket
import threading
from collections.abc import Callable, Iterator

import uvicorn

from rooftile.engine.async_llm import AsyncLLM
from rooftile.server.address import BACKLOG
from rooftile.server.app import create_app
from rooftile.server.config import ServerConfig
from rooftile.server.service import Service

logger = logging.getLogger("rooftile.server")

# Longer than the clients' own: a server that closes first loses requests that are on their way.
KEEP_ALIVE_SECONDS = 75
LAST_SECONDS = 5.0  # after drain_seconds, for clients that do not read what they are told


class Server(uvicorn.Server):
    """Ends in order: it stops accepting, lets open requests finish for a while, then ends them."""

    def __init__(self, service: Service) -> None:
        self.service = service
        settings = uvicorn.Config(
            create_app(service),
            lifespan="off",
            ws="none",
            log_config=None,
            access_log=False,
            server_header=False,
            backlog=BACKLOG,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=int(service.config.drain_seconds + LAST_SECONDS),
        )
        super().__init__(settings)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Uvicorn would raise the signal again when done, and so not exit with 0."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {
            number: signal.signal(number, lambda number, _: self.end(number))
            for number in (signal.SIGINT, signal.SIGTERM)
        }
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def end(self, number: int | None = None) -> None:
        """Begin to end; the second time, end open requests at once."""
        if number is not None:
            logger.info("%s: shutting down", signal.Signals(number).name)
        loop = self._loop
        loop.call_soon_threadsafe(self._end)

    def _end(self) -> None:
        service = self.service
        if service.draining:
            service.end_open_requests()
        else:
            service.draining = True
            asyncio.get_running_loop().call_later(
                service.config.drain_seconds, service.end_open_requests
            )
        self.should_exit = True

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().serve(sockets)


async def run(
    listener: socket.socket,
    config: ServerConfig,
    load: Callable[[], AsyncLLM],
    asked_for: str,
    on_ready: Callable[[Server], None] = lambda server: None,
) -> None:
    """Serve until a signal comes. It listens from the beginning, and answers 503 until it is ready.

    Raises:
        whatever loading the model raises.
    """
    _raise_file_limit()
    service = Service(config, load, asked_for)
    server = Server(service)

    async def watch() -> None:
        await service.loaded.wait()
        if service.load_error is None:
            on_ready(server)
        else:
            server.should_exit = True

    service.start()
    watching = asyncio.create_task(watch())
    try:
        await server.serve([listener])
    finally:
        watching.cancel()
        await service.close()
    if service.load_error is not None:
        raise service.load_error


def _raise_file_limit() -> None:
    """Each connection is a file; the soft limit is often 1024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
