"""Whatever the order of loading and closing, no engine is left behind."""

from __future__ import annotations

import asyncio
import threading

import pytest

from rooftile.engine.async_llm import AsyncLLM
from rooftile.server.config import ServerConfig
from rooftile.server.service import Service


class Loaded(AsyncLLM):
    """An engine that only knows whether it was ended."""

    tokenizer = None

    def __init__(self) -> None:
        self.ended = threading.Event()

    def abort_all(self) -> None:
        pass

    def shutdown(self) -> None:
        self.ended.set()


@pytest.mark.parametrize("loaded", ["heard of", "not heard of", "later"])
def test_an_engine_that_was_loaded_is_ended(loaded: str) -> None:
    llm, go_on = Loaded(), threading.Event()
    threads: list[threading.Thread] = []
    is_loading = threading.Event()

    def load() -> AsyncLLM:
        threads.append(threading.current_thread())
        is_loading.set()
        assert go_on.wait(60)
        return llm

    async def main() -> None:
        service = Service(ServerConfig(), load, "m")
        service.start()
        assert is_loading.wait(60)
        if loaded == "later":
            await service.close()
        go_on.set()
        threads[0].join(60)  # this loop stands still meanwhile
        if loaded == "heard of":
            await service.loaded.wait()
        if loaded != "later":
            await service.close()
        assert llm.ended.wait(60)

    asyncio.run(main())


def test_a_server_that_ended_while_it_loaded_keeps_no_engine() -> None:
    llm, go_on = Loaded(), threading.Event()

    def load() -> AsyncLLM:
        assert go_on.wait(60)
        return llm

    async def main() -> None:
        service = Service(ServerConfig(), load, "m")
        service.start()
        await service.close()

    asyncio.run(main())
    go_on.set()
    assert llm.ended.wait(60)
