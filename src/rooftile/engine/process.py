"""The engine in a child process: the same messages as `EngineThread`, over a pipe.

The child ends when its parent does (its end of the pipe closes), and a child that dies is an
`EngineDied` to the parent. Signals are the parent's business: ctrl-C reaches both processes, and the
child must go on while the parent lets open requests finish.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import pickle
import queue
import signal
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

from rooftile.engine.config import EngineConfig
from rooftile.engine.grammar import GrammarCompiler
from rooftile.engine.grammar_queue import GrammarQueue
from rooftile.engine.limits import Limits
from rooftile.engine.loop import EngineThread, FromEngine
from rooftile.engine.messages import AddRequest, EngineDied, Refuse, Shutdown, ToEngine
from rooftile.models.tokenizer import Tokenizer

if TYPE_CHECKING:
    from rooftile.models.loader import LoadedModel

KILL_AFTER = 10.0  # seconds that a child may take to end by itself


@dataclass(frozen=True)
class Sealed:
    """A message as bytes, so that where the child cannot read them (they name a function that it
    does not have), it still knows which request that is.
    """

    payload: bytes
    request_id: str = ""
    num_outputs: int = 0
    is_last: bool = False

    def open(self) -> ToEngine:
        try:
            message: ToEngine = pickle.loads(self.payload)
        except Exception as error:
            what = f"the engine's process cannot read the request: {type(error).__name__}: {error}"
            return Refuse(self.request_id, self.num_outputs, what)
        return message


@dataclass(frozen=True)
class LoadProgress:
    phase: str
    share: float


@dataclass(frozen=True)
class EngineReady:
    """What the parent needs to know of the model in the child."""

    model_name: str
    tokenizer: Tokenizer | None
    limits: Limits
    eos_token_ids: frozenset[int]
    sampling_defaults: Mapping[str, float]

    @classmethod
    def of(cls, model: LoadedModel, limits: Limits) -> EngineReady:
        return cls(
            model.name, model.tokenizer, limits, model.eos_token_ids, model.sampling_defaults
        )


@dataclass(frozen=True)
class LoadFailed:
    error: Exception


class EngineProcess:
    """Loads the model in a child process and runs it there.

    `post` is called on a thread of this class with the engine's answers.

    Raises:
        ValueError, ...: whatever loading the model raised in the child.
        RuntimeError: the child died while loading.
    """

    def __init__(
        self,
        config: EngineConfig,
        post: Callable[[FromEngine], None],
        on_progress: Callable[[str, float], None] | None = None,
    ) -> None:
        # A forked child would share locks and threads' states with torch in the parent.
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(
            target=_run_child, args=(config, theirs), name="rooftile-engine", daemon=True
        )
        self._post = post
        self._closing = False
        # It runs before multiprocessing's own, which sends a SIGTERM that is ignored, and waits.
        atexit.register(self._kill)
        try:
            self._process.start()
            theirs.close()
            self.ready = self._wait_until_loaded(on_progress)
        except BaseException:
            self._kill()
            raise
        # A full pipe must not block the sender, which is an event loop.
        self._outbox: queue.SimpleQueue[Sealed] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=target, name=f"rooftile-engine-{name}", daemon=True)
            for name, target in (("read", self._read), ("write", self._write))
        ]
        for thread in self._threads:
            thread.start()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def send(self, message: ToEngine) -> None:
        """Raises ValueError for a request that cannot be pickled."""
        try:
            payload = pickle.dumps(message)
        except Exception as error:
            raise ValueError(
                f"the request cannot be sent to the engine's process: {error}; a "
                f"logits_processor must be a function of a module there, or use engine='thread'"
            ) from None
        if isinstance(message, AddRequest):
            self._outbox.put(Sealed(payload, message.request_id, message.num_outputs))
        else:
            self._outbox.put(Sealed(payload, is_last=isinstance(message, Shutdown)))

    def join(self, timeout: float | None = None) -> None:
        """Wait for the child to end after `Shutdown`; a child that does not is killed."""
        self._process.join(KILL_AFTER if timeout is None else timeout)
        self._kill()

    def _kill(self) -> None:
        self._closing = True
        atexit.unregister(self._kill)
        if self._process.pid is None:  # never started
            return
        if self._process.is_alive():
            self._process.kill()
        self._process.join()

    def _wait_until_loaded(self, on_progress: Callable[[str, float], None] | None) -> EngineReady:
        while True:
            try:
                message = self._pipe.recv()
            except (EOFError, OSError):
                raise RuntimeError(
                    f"the engine's process ended while loading the model ({self._how_it_ended()})"
                ) from None
            match message:
                case LoadProgress(phase, share):
                    if on_progress is not None:
                        on_progress(phase, share)
                case LoadFailed(error):
                    raise error
                case EngineReady():
                    return message

    def _read(self) -> None:
        while True:
            try:
                news = self._pipe.recv()
            except (EOFError, OSError):
                if not self._closing:
                    self._post(EngineDied(f"the engine's process ended ({self._how_it_ended()})"))
                return
            self._post(news)
            if isinstance(news, EngineDied):
                return

    def _write(self) -> None:
        while True:
            sealed = self._outbox.get()
            if sealed.is_last:
                self._closing = True
            try:
                self._pipe.send(sealed)
            except OSError:  # the child is gone, which the reading thread tells
                return
            if sealed.is_last:
                return

    def _how_it_ended(self) -> str:
        self._process.join(KILL_AFTER)
        code = self._process.exitcode
        if code is None:
            return "it closed its pipe"
        return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def _run_child(config: EngineConfig, pipe: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    inbox: queue.SimpleQueue[ToEngine] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(pipe, inbox), daemon=True).start()
    loaded = _load(config, pipe)
    if loaded is None:
        return
    engine, compiler = loaded
    requests = GrammarQueue(engine, compiler)
    while True:
        message = inbox.get()
        requests.send(message)
        if isinstance(message, Shutdown):
            engine.join()
            return


def _receive(pipe: Connection, inbox: queue.SimpleQueue[ToEngine]) -> None:
    """Also while the model loads, so that the child never outlives its parent."""
    while True:
        try:
            inbox.put(pipe.recv().open())
        except (EOFError, OSError):
            os._exit(1)


def _load(
    config: EngineConfig, pipe: Connection
) -> tuple[EngineThread, GrammarCompiler | None] | None:
    from rooftile.engine.build import build_engine

    def on_progress(phase: str, share: float) -> None:
        pipe.send(LoadProgress(phase, share))

    def post(news: FromEngine) -> None:
        try:
            pipe.send(news)
        except OSError:
            os._exit(1)
        if isinstance(news, EngineDied):
            os._exit(1)

    try:
        loaded, core = build_engine(config, on_progress)
    except Exception as error:
        with contextlib.suppress(OSError):
            pipe.send(LoadFailed(_picklable(error)))
        return None
    pipe.send(EngineReady.of(loaded, core.limits))
    compiler = None
    if loaded.tokenizer is not None:
        compiler = GrammarCompiler(loaded.tokenizer, core.limits.vocab_size, loaded.eos_token_ids)
    return EngineThread(core, post), compiler


def _picklable(error: Exception) -> Exception:
    try:
        return error if type(pickle.loads(pickle.dumps(error))) is type(error) else _plain(error)
    except Exception:  # exceptions with unusual constructors come back in odd ways
        return _plain(error)


def _plain(error: Exception) -> Exception:
    return RuntimeError(f"{type(error).__name__}: {error}")
