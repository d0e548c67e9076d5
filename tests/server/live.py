"""A real server on a real port, in a thread of the test's process."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import httpx

from rooftile.engine.async_llm import AsyncLLM
from rooftile.engine.outputs import EngineStats, RequestOutput
from rooftile.engine.params import SamplingParams
from rooftile.engine.token_bytes import BYTE_OF
from rooftile.server.address import address_of, bind
from rooftile.server.config import ServerConfig
from rooftile.server.run import Server, run
from tests.support.gate import Gate, shut_gate, wait_until

# Bytes of random weights are seldom characters; with this, each token is text.
ONLY_X = {"logit_bias": {str(sorted(BYTE_OF).index("x")): 100}}

if TYPE_CHECKING:
    from openai import AsyncOpenAI, OpenAI


class LiveServer:
    def __init__(self, load: Callable[[], AsyncLLM], *, wait: bool = True, **config: Any) -> None:
        listener = bind("127.0.0.1", 0)
        self.url = address_of(listener)
        self.error: BaseException | None = None
        self._server: Server | None = None
        self._ready = threading.Event()

        def main() -> None:
            try:
                asyncio.run(run(listener, ServerConfig(**config), load, "tiny", self._on_ready))
            except BaseException as error:
                self.error = error

        self.thread = threading.Thread(target=main, daemon=True)
        self.thread.start()
        if wait:
            self.wait_until_ready()

    def _on_ready(self, server: Server) -> None:
        self._server = server
        self._ready.set()

    def wait_until_ready(self) -> None:
        assert self._ready.wait(120)

    @property
    def server(self) -> Server:
        assert self._server is not None
        return self._server

    @property
    def llm(self) -> AsyncLLM:
        return self.server.service.llm

    def http(self, **options: Any) -> httpx.Client:
        return httpx.Client(base_url=self.url, **{"timeout": 60, **options})

    def openai(self, **options: Any) -> OpenAI:
        from openai import OpenAI

        defaults = {"base_url": f"{self.url}/v1", "api_key": "none", "max_retries": 0}
        return OpenAI(**{**defaults, **options})

    def async_openai(self, **options: Any) -> AsyncOpenAI:
        from openai import AsyncOpenAI

        defaults = {"base_url": f"{self.url}/v1", "api_key": "none", "max_retries": 0}
        return AsyncOpenAI(**{**defaults, **options})

    @contextmanager
    def standing_still(self, after: int = 2) -> Iterator[Gate]:
        """The engine stops in the middle of a step when a request that came within has `after`
        tokens, and does and hears nothing until the gate is opened, at the end at the latest.
        """
        llm = self.llm
        add = llm.add_request

        def add_held(prompt: Any, params: SamplingParams, **options: Any) -> RequestOutput:
            return add(prompt, replace(params, logits_processor=gate), **options)

        with shut_gate(after) as gate:
            llm.add_request = add_held  # type: ignore[method-assign, assignment]
            try:
                yield gate
            finally:
                llm.add_request = add  # type: ignore[method-assign]

    @property
    def open_sequences(self) -> int:
        """Of requests that the server has accepted and not ended."""
        return self.server.service._open_sequences

    def wait_until_begun(self, prompts: int) -> None:
        """Until so many prompts are with the engine, and it has begun to answer one of them."""

        def begun() -> bool:
            outputs = [request.output for request in list(self.llm._open.values())]
            return len(outputs) == prompts and any(o.metrics.first_token for o in outputs)

        wait_until(begun)

    def stats(self) -> EngineStats:
        future = asyncio.run_coroutine_threadsafe(self.llm.stats(), self.server._loop)
        return future.result(60)

    def assert_idle(self, seconds: float = 60) -> None:
        """Nothing is left of what the clients asked: no request, no page, no reserved place."""
        deadline = time.monotonic() + seconds
        while True:
            stats = self.stats()
            left = (
                stats.num_running,
                stats.num_waiting,
                stats.kv.in_use,
                self.server.service._open_sequences,
                len(self.llm._open),
                len(self.llm._frontend._open),
            )
            if left == (0, 0, 0, 0, 0, 0):
                return
            assert time.monotonic() < deadline, f"running, waiting, pages, places, ...: {left}"
            time.sleep(0.02)

    def end(self) -> None:
        self.server.end()
        self.thread.join(60)
        assert not self.thread.is_alive()
