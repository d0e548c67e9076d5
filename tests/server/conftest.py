from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from rooftile.engine.async_llm import AsyncLLM
from tests.engine.conftest import write_model

if find_spec("uvicorn"):
    from tests.server.live import LiveServer
else:  # without the extra `server`, as on a machine that is lent for its GPU
    collect_ignore_glob = ["test_*"]

OPTIONS = {"dtype": "float32", "random_weights": True, "num_pages": 256, "page_size": 4}


@pytest.fixture(scope="session")
def tiny_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def make_engine(tiny_path: Path) -> Callable[..., AsyncLLM]:
    def make(**options: Any) -> AsyncLLM:
        return AsyncLLM(str(tiny_path), **{**OPTIONS, **options})

    return make


@pytest.fixture
def make_server(make_engine: Callable[..., AsyncLLM]) -> Iterator[Callable[..., LiveServer]]:
    """Servers of a test's own: `make_server(kind="thread", num_pages=8, config={...})`."""
    servers: list[LiveServer] = []

    def make(
        kind: str = "thread", config: dict[str, Any] | None = None, **options: Any
    ) -> LiveServer:
        servers.append(LiveServer(lambda: make_engine(engine=kind, **options), **(config or {})))
        return servers[-1]

    yield make
    for server in servers:
        if server.thread.is_alive():
            server.end()


@pytest.fixture(scope="session", params=["thread", "process"])
def shared_server(
    request: pytest.FixtureRequest, make_engine: Callable[..., AsyncLLM]
) -> Iterator[LiveServer]:
    server = LiveServer(lambda: make_engine(engine=request.param))
    yield server
    server.end()
    assert server.error is None


@pytest.fixture
def server(shared_server: LiveServer) -> Iterator[LiveServer]:
    """The shared server, once for each kind of engine; afterwards it must be idle."""
    yield shared_server
    shared_server.assert_idle()
