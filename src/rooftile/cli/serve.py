"""`rooftile serve`: the OpenAI API over a model, and a chat page."""

from __future__ import annotations

import logging
import math
import os
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rooftile.cli.options import EngineOptions, sampling_text, with_options

if TYPE_CHECKING:
    from rooftile.engine.async_llm import AsyncLLM
    from rooftile.server.run import Server

SERVER = "Server"
LOG_LEVELS = ("debug", "info", "warning", "error")


def _server(*names: str, help: str, **settings: Any) -> Any:
    return typer.Option(*names, help=help, rich_help_panel=SERVER, **settings)


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """Where the server listens, who may use it, and what it refuses."""

    host: Annotated[str, _server(help="Address to listen on; 0.0.0.0 for all.")] = "127.0.0.1"
    port: Annotated[int, _server(help="Port to listen on; 0 takes a free one.")] = 8000
    api_key: Annotated[
        list[str] | None,
        _server(
            envvar="ROOFTILE_API_KEY",
            show_default=False,
            help="Key that clients must send; repeatable. None: everybody may.",
        ),
    ] = None
    served_model_name: Annotated[
        list[str] | None,
        _server(
            metavar="NAME",
            show_default="MODEL",
            help="What clients call the model; repeatable, the first is used in answers.",
        ),
    ] = None
    engine: Annotated[
        str,
        _server(
            help="Where the engine runs: thread, process, or auto (a thread on a CPU, else a process)."
        ),
    ] = "auto"
    max_queue: Annotated[
        int, _server(help="Sequences that may wait to run before 429 is answered.")
    ] = 1024
    max_body_mb: Annotated[
        float, _server(help="Longest request body in MB; more is answered with 413.")
    ] = 8.0
    max_logprobs: Annotated[
        int, _server(help="Most likely tokens that a request may ask for with each token.")
    ] = 20
    drain_seconds: Annotated[
        float, _server(help="On SIGTERM or ctrl-C, how long open requests may go on.")
    ] = 10.0
    log_level: Annotated[str, _server(help="debug, info, warning or error.")] = "info"
    log_prompts: Annotated[
        bool, _server("--log-prompts", help="Write prompts to the log, which else has none.")
    ] = False


@with_options(options=EngineOptions, server=ServerOptions)
def serve(options: EngineOptions, server: ServerOptions) -> None:
    """Serve a model over the OpenAI API, with a chat page at /. Ctrl-C ends it."""
    if server.log_level not in LOG_LEVELS:
        raise typer.BadParameter(
            f"is {server.log_level!r}; choose one of {', '.join(LOG_LEVELS)}",
            param_hint="--log-level",
        )
    if not math.isfinite(server.max_body_mb):
        raise typer.BadParameter(
            f"is {server.max_body_mb}; it must be a finite number", param_hint="--max-body-mb"
        )
    logging.basicConfig(
        stream=sys.stderr,
        level=logging.WARNING,
        format="%(asctime)s %(levelname)s %(message)s",
    )
    logging.getLogger("rooftile").setLevel(server.log_level.upper())
    # What it says is printed once the server is ready, also of an engine in a process of its own.
    logging.getLogger("rooftile.engine.build").setLevel(logging.WARNING)
    from rooftile.bench.presets import resolve_model
    from rooftile.server.address import address_of, bind
    from rooftile.server.config import ServerConfig

    config = ServerConfig(
        model_names=tuple(server.served_model_name or ()),
        api_keys=tuple(server.api_key or ()),
        engine=server.engine,
        max_queue=server.max_queue,
        max_body_bytes=int(server.max_body_mb * 1e6),
        max_logprobs=server.max_logprobs,
        drain_seconds=server.drain_seconds,
        log_prompts=server.log_prompts,
    )
    model = resolve_model(options.model, options.random_weights)
    # Before anything slow: a port that is taken shows at once, and clients that come early wait.
    listener = bind(server.host, server.port)
    address = address_of(listener)
    print(f"loading {options.model} …", file=sys.stderr, flush=True)
    try:
        from rooftile.server.run import run
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == "rooftile":
            raise
        raise ModuleNotFoundError(
            f"{error.name} is missing: the server needs pip install 'rooftile[server]'"
        ) from None

    def load() -> AsyncLLM:
        from rooftile.engine.async_llm import AsyncLLM
        from rooftile.engine.config import EngineConfig

        settings = {**options.settings(), "model": model}
        engine = server.engine
        if engine == "auto":
            # The loop of an engine on a GPU works ahead of it all the time, so it gets its own process.
            on_gpu = EngineConfig.build(**settings).device_type == "cuda"
            engine = "process" if on_gpu else "thread"
        return AsyncLLM(engine=engine, **settings)

    def on_ready(running: Server) -> None:
        llm = running.service.llm
        print(f"KV memory holds {llm.limits.kv_tokens} tokens", file=sys.stderr, flush=True)
        if llm.sampling_defaults:
            said = sampling_text(llm.sampling_defaults)
            print(f"sampling by default: {said}", file=sys.stderr, flush=True)
        print(f"{options.model} is ready at {address} (ctrl-C ends)", flush=True)

    import asyncio

    asyncio.run(run(listener, config, load, options.model, on_ready))
    # Threads that still load a model or encode a long text cannot be stopped, and Python would wait
    # for them.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
