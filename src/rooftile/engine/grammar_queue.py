"""Requests wait for their grammars on a thread of their own, and hold up no others meanwhile."""

from __future__ import annotations

import contextlib
import queue
import threading
from typing import Protocol

from rooftile.engine.grammar import GrammarCompiler, bind_grammars, has_grammar
from rooftile.engine.messages import AddRequest, Finish, ToEngine
from rooftile.engine.params import SamplingParams


class Receiver(Protocol):
    def send(self, message: ToEngine) -> None: ...


class GrammarQueue:
    """Passes messages on to an engine, those that begin a request only once its grammars are compiled.

    Compiling may take seconds. A request that is ended meanwhile never begins; one whose grammar
    cannot be compiled begins all the same, and fails by itself when the grammar is first called.
    """

    def __init__(self, engine: Receiver, compiler: GrammarCompiler | None) -> None:
        self._engine = engine
        self._compiler = compiler
        self._lock = threading.Lock()
        self._waiting: dict[str, AddRequest] = {}
        self._inbox: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="rooftile-grammars", daemon=True).start()

    def send(self, message: ToEngine) -> None:
        with self._lock:
            if _has_grammar(message):
                assert isinstance(message, AddRequest)
                self._waiting[message.request_id] = message
                self._inbox.put(message.request_id)
            elif not isinstance(message, Finish) or not self._waiting.pop(message.request_id, None):
                self._engine.send(message)

    def _run(self) -> None:
        while True:
            request_id = self._inbox.get()
            with self._lock:
                message = self._waiting.get(request_id)
            if message is None:
                continue
            assert isinstance(message.params, SamplingParams)
            with contextlib.suppress(ValueError, NotImplementedError):
                bind_grammars(message.params.logits_processor, self._compiler)
            with self._lock:
                if self._waiting.pop(request_id, None) is not None:
                    self._engine.send(message)


def _has_grammar(message: ToEngine) -> bool:
    if not isinstance(message, AddRequest) or not isinstance(message.params, SamplingParams):
        return False
    return has_grammar(message.params.logits_processor)
