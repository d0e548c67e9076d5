"""The asynchronous face of the engine: many clients on one event loop, the engine beside it."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator, Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rooftile.engine.build import build_engine
from rooftile.engine.config import EngineConfig
from rooftile.engine.frontend import Frontend
from rooftile.engine.loop import EngineThread, FromEngine
from rooftile.engine.messages import AddRequest, AskStats, EngineDied, Finish, Shutdown
from rooftile.engine.outputs import EngineStats, RequestOutput
from rooftile.engine.params import Params, SamplingParams
from rooftile.engine.process import EngineProcess, EngineReady

logger = logging.getLogger(__name__)


class EngineDeadError(RuntimeError):
    """The engine's loop ended on an error; the message holds its traceback."""


@dataclass(frozen=True)
class _Open:
    """An unfinished request. key: its name to the engine, never used again, so that late news of an
    aborted request cannot reach a new one with the same request_id.
    """

    key: str
    output: RequestOutput
    changed: asyncio.Event


class AsyncLLM:
    """A model with its engine on a thread or in a process of its own, spoken with by messages only.

    Same arguments and errors as `LLM`. engine: "thread", or "process" for a child process, which
    shares no interpreter with the event loop. Use it from one event loop; `shutdown()` when done, or
    use it as an async context manager.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        engine: str = "thread",
        on_progress: Callable[[str, float], None] | None = None,
        **options: Any,
    ) -> None:
        if engine not in ("thread", "process"):
            raise ValueError(f"engine is {engine!r}; it is 'thread' or 'process'")
        self.config = EngineConfig.build(model, **options)
        self._keys = map(str, itertools.count())
        self._open: dict[str, _Open] = {}  # by request_id
        self._stats_waiters: list[asyncio.Future[EngineStats]] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._death: str | None = None
        self._engine: EngineThread | EngineProcess
        if engine == "process":
            self._engine = EngineProcess(self.config, self._post, on_progress)
            ready = self._engine.ready
        else:
            loaded, core = build_engine(self.config, on_progress)
            self._engine = EngineThread(core, self._post)
            ready = EngineReady.of(loaded, core.limits)
        self.model_name = ready.model_name
        self.tokenizer = ready.tokenizer
        self.limits = ready.limits
        self.eos_token_ids = ready.eos_token_ids
        self.sampling_defaults: dict[str, Any] = dict(ready.sampling_defaults)
        self._frontend = Frontend(ready.tokenizer, ready.limits)

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.shutdown()

    async def generate(
        self,
        prompt: str | Sequence[int],
        params: Params | None = None,
        *,
        request_id: str | None = None,
        cache_salt: Hashable = None,
    ) -> AsyncIterator[RequestOutput]:
        """Yield the same, growing RequestOutput whenever it changed, until it is finished.

        With BeamSearchParams it searches; the n_best results come at once, at the end. Leaving
        the iteration early, or cancelling its task, aborts the request.
        """
        output = self.add_request(prompt, params, request_id=request_id, cache_salt=cache_salt)
        async for news in self.follow(output):
            yield news

    def add_request(
        self,
        prompt: str | Sequence[int],
        params: Params | None = None,
        *,
        request_id: str | None = None,
        cache_salt: Hashable = None,
    ) -> RequestOutput:
        """Queue a request; its output grows by itself, `follow` waits for news of it.

        Requests share cached prefixes only under an equal cache_salt.

        Raises:
            ValueError: a prompt or parameter that cannot run or, with engine="process", cannot be
                sent there; an id in use; a cache_salt that cannot be hashed.
            EngineDeadError: the engine has ended.
        """
        self._be_told_here()
        text, prompt_ids = self._frontend.encode(prompt)
        params = SamplingParams(**self.sampling_defaults) if params is None else params
        params = self._frontend.prepare(prompt_ids, params)
        try:
            hash(cache_salt)
        except TypeError:
            raise ValueError(
                f"cache_salt is {cache_salt!r:.80}; give something hashable, such as a string"
            ) from None
        if request_id is None:
            request_id = next(key for key in self._keys if key not in self._open)
        elif not isinstance(request_id, str):
            raise ValueError(f"request_id is {request_id!r:.80}; it must be a string")
        if request_id in self._open:
            raise ValueError(f"request id {request_id!r} is in use; choose another")
        key = next(self._keys)
        # It arrives before the engine, which may begin at once, hears of it.
        output = self._frontend.open(key, text, prompt_ids, params)
        output.request_id = request_id
        try:
            self._engine.send(AddRequest(key, prompt_ids, params, cache_salt))
        except BaseException:
            self._frontend.abort(key)
            raise
        self._open[request_id] = _Open(key, output, asyncio.Event())
        return output

    async def follow(self, output: RequestOutput) -> AsyncIterator[RequestOutput]:
        """Yield `output` whenever it changed. Leaving early aborts the request."""
        request = self._open.get(output.request_id)
        if request is None or request.output is not output:  # it is finished already
            yield output
            return
        finished = False  # when last shown: it may go on to its end while the caller is busy
        try:
            while not finished:
                await request.changed.wait()
                request.changed.clear()
                finished = output.finished
                if not finished:
                    self._require_alive()
                yield output
        finally:
            if self._open.get(output.request_id) is request:
                self.abort(output.request_id)

    def abort(self, request_id: str) -> None:
        """End a request now; what is unfinished gets finish_reason "abort". Idempotent."""
        request = self._open.pop(request_id, None)
        if request is None:
            return
        self._frontend.abort(request.key)
        self._engine.send(Finish(request.key))
        request.changed.set()

    def abort_all(self) -> None:
        """End every open request now."""
        for request_id in list(self._open):
            self.abort(request_id)

    async def stats(self) -> EngineStats:
        waiter: asyncio.Future[EngineStats] = self._be_told_here().create_future()
        self._stats_waiters.append(waiter)
        self._engine.send(AskStats())
        return await waiter

    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], **template_options: Any
    ) -> list[int]:
        """The token ids of a conversation, ready for the model's answer."""
        return self._frontend.render_chat(messages, **template_options)

    def shutdown(self) -> None:
        """Abort every request and end the engine. Idempotent."""
        # First, so that nothing is asked of it any more that nobody would answer.
        self._death = self._death or "the engine was shut down"
        self.abort_all()
        self._engine.send(Shutdown())
        self._engine.join()
        self._hand_over(EngineDied(self._death))  # an engine that was killed owes answers

    @property
    def is_alive(self) -> bool:
        return self._death is None

    def _require_alive(self) -> None:
        if self._death is not None:
            raise EngineDeadError(self._death)

    def _be_told_here(self) -> asyncio.AbstractEventLoop:
        """The running loop, which hears of the engine's end from now on.

        Raises:
            EngineDeadError: it has ended.
        """
        # In this order, as `_post` notes an end before it looks for the loop: one sees the other.
        self._loop = asyncio.get_running_loop()
        self._require_alive()
        return self._loop

    def _post(self, news: FromEngine) -> None:
        """On the engine's thread: note an end, hand the news to the event loop."""
        if isinstance(news, EngineDied):
            logger.error("the engine has ended: %s", news.error)
            self._death = self._death or news.error  # also where no loop has asked for anything yet
        self._hand_over(news)

    def _hand_over(self, news: FromEngine) -> None:
        """On any thread; the event loop may be gone by now."""
        if self._loop is None or self._loop.is_closed():
            return
        try:
            self._loop.call_soon_threadsafe(self._receive, news)
        except RuntimeError:  # the loop closed since
            return

    def _receive(self, news: FromEngine) -> None:
        match news:
            case EngineDied(error):
                self._death = self._death or error
                for request in self._open.values():
                    request.changed.set()
                for waiter in self._stats_waiters:
                    if not waiter.done():
                        waiter.set_exception(EngineDeadError(error))
                self._stats_waiters.clear()
            case EngineStats():
                if not self._stats_waiters:  # they heard of the engine's end first
                    return
                waiter = self._stats_waiters.pop(0)
                if not waiter.done():  # its task may have been cancelled
                    waiter.set_result(news)
            case _:
                for delta in news:
                    output, stopped = self._frontend.apply(delta)
                    if stopped:
                        self._engine.send(Finish(delta.request_id, delta.index))
                    if output is not None:
                        self._open[output.request_id].changed.set()
                        if output.finished:
                            del self._open[output.request_id]
