"""The engine behind the server: loading, ready, dead or draining, and who may use it."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import threading
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from rooftile.engine.async_llm import AsyncLLM
from rooftile.engine.grammar import GrammarCompiler, GrammarProcessor
from rooftile.server.config import ServerConfig
from rooftile.server.errors import ApiError, bad_request, queue_full, unavailable
from rooftile.server.metrics import Metrics
from rooftile.server.tokens import TokenTexts

logger = logging.getLogger("rooftile.server")

Result = TypeVar("Result")
TEXT_THREADS = 2  # so that one huge prompt does not hold up the others' short ones
MOST_COMPILING = 32  # new grammars that are waited for


class Service:
    """One model. Everything but `load` belongs to the event loop."""

    def __init__(self, config: ServerConfig, load: Callable[[], AsyncLLM], asked_for: str) -> None:
        """load: makes the engine; called on a thread of its own. asked_for: the model's name."""
        self.config = config
        self.model_names = config.model_names or (asked_for,)
        self.created = int(time.time())
        self.metrics = Metrics(self.model_names[0])
        self.loaded = asyncio.Event()  # or failed to
        self.load_error: BaseException | None = None
        self.draining = False
        self.ended = False  # what was open; what had not begun must not begin any more
        self.texts = TokenTexts(None)
        self.grammars: GrammarCompiler | None = None
        self._load = load
        self._llm: AsyncLLM | None = None
        self._handing_over = threading.Lock()
        self._loaded_llm: AsyncLLM | None = None  # before the event loop has heard of it
        self._closed = False
        self._open_sequences = 0
        self._compiling = 0
        self._pool = ThreadPoolExecutor(TEXT_THREADS, thread_name_prefix="rooftile-text")
        # Some grammars take seconds, in which texts must not wait for a thread.
        self._grammar_pool = ThreadPoolExecutor(1, thread_name_prefix="rooftile-grammar")

    # ------------------------------------------------------------------ the engine's life

    def start(self) -> None:
        """Begin to load the model. Not in a pool: its threads are waited for when Python exits."""
        loop = asyncio.get_running_loop()

        def run() -> None:
            result: AsyncLLM | BaseException
            try:
                result = self._load()
            except BaseException as error:
                result = error
            if isinstance(result, AsyncLLM) and not self._hand_over(result):
                result.shutdown()
                return
            with contextlib.suppress(RuntimeError):  # the event loop has ended meanwhile
                loop.call_soon_threadsafe(self._finish_loading, result)

        threading.Thread(target=run, name="rooftile-load", daemon=True).start()

    def _hand_over(self, llm: AsyncLLM) -> bool:
        """On the loading thread: whether `close` will see to the engine's end."""
        with self._handing_over:
            self._loaded_llm = llm
            return not self._closed

    def _finish_loading(self, result: AsyncLLM | BaseException) -> None:
        if isinstance(result, AsyncLLM):
            self._llm = result
            if result.tokenizer is not None:
                self.texts = TokenTexts(result.tokenizer)
                self.grammars = GrammarCompiler(
                    result.tokenizer, result.limits.vocab_size, result.eos_token_ids
                )
        else:
            self.load_error = result
        self.loaded.set()

    @property
    def llm(self) -> AsyncLLM:
        """Raises: ApiError 503 unless requests can be answered now."""
        if self.draining:
            raise unavailable("the server is shutting down", "shutting_down")
        if self._llm is None:
            raise unavailable("the model is loading", "loading", retry_seconds=1)
        if not self._llm.is_alive:
            raise unavailable("the engine has ended; see the server's log", "engine_dead")
        return self._llm

    def end_open_requests(self) -> None:
        self.ended = True
        if self._llm is not None:
            self._llm.abort_all()

    async def close(self) -> None:
        """End the engine. Its current step may take a moment, so it is not waited for on the loop."""
        with self._handing_over:
            self._closed = True
            llm = self._loaded_llm
        if llm is not None:
            llm.abort_all()
            await asyncio.get_running_loop().run_in_executor(None, llm.shutdown)
        for pool in (self._pool, self._grammar_pool):
            pool.shutdown(wait=False, cancel_futures=True)

    # ------------------------------------------------------------------ for the endpoints

    def check_model(self, name: str | None) -> str:
        """The model's name in the answer.

        Raises:
            ApiError: 404 for another model, 503 when not ready.
        """
        self.llm  # noqa: B018  (raises)
        if name is None or name in self.model_names:
            return name or self.model_names[0]
        raise ApiError(
            404,
            f"there is no model {ascii(name)[:100]}; this server has {self.model_names[0]}",
            param="model",
            code="model_not_found",
        )

    def reserve(self, prompts: int, n: int) -> Callable[[], None]:
        """Take room for n sequences of each prompt; call the result, once, to give it back.

        Raises:
            ApiError: 429 when the queue is full, 400 for what would never fit.
        """
        room = self.llm.limits.max_num_seqs + self.config.max_queue
        sequences = prompts * n
        if sequences > room:
            raise bad_request(
                f"the request has {prompts} prompts with n {n}; at most {room} sequences are "
                f"accepted",
                "n" if n > prompts else "prompt",
            )
        if self._open_sequences + sequences > room:
            raise queue_full("the server's queue is full; try again later")
        self._open_sequences += sequences
        return functools.partial(self._give_back, sequences)

    def _give_back(self, sequences: int) -> None:
        self._open_sequences -= sequences

    async def bind_grammar(self, processor: GrammarProcessor, compiler: GrammarCompiler) -> None:
        """Compile its grammar, behind others that are new; one that is known is there at once.

        Raises:
            ApiError: 429 when too many wait. What `GrammarCompiler.compile` raises.
        """
        if compiler.keeps(processor.spec):
            processor.bind(compiler)
            return
        if self._compiling >= MOST_COMPILING:
            raise queue_full("too many new schemas wait to be compiled; try again later")
        self._compiling += 1
        try:
            loop = asyncio.get_running_loop()
            await loop.run_in_executor(self._grammar_pool, processor.bind, compiler)
        finally:
            self._compiling -= 1

    def off_loop(self, work: Callable[..., Result], *args: Any) -> Awaitable[Result]:
        """Encode, decode or render on a thread, so that nobody's stream waits for it."""
        return asyncio.get_running_loop().run_in_executor(self._pool, work, *args)
