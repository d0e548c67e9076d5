"""The engine's loop in a thread of its own: messages in, messages out, nothing shared."""

from __future__ import annotations

import queue
import threading
import traceback
from collections.abc import Callable

from rooftile.engine.core import EngineCore, SequenceDelta
from rooftile.engine.messages import (
    AddRequest,
    AskStats,
    EngineDied,
    Finish,
    Refuse,
    Shutdown,
    ToEngine,
)
from rooftile.engine.outputs import EngineStats

FromEngine = list[SequenceDelta] | EngineStats | EngineDied


class EngineThread:
    """Runs a core until told to shut down. `post` is called on the engine's thread with the answers."""

    def __init__(self, core: EngineCore, post: Callable[[FromEngine], None]) -> None:
        self._core = core
        self._post = post
        self._inbox: queue.SimpleQueue[ToEngine] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="rooftile-engine", daemon=True)
        self._thread.start()

    def send(self, message: ToEngine) -> None:
        self._inbox.put(message)

    def join(self, timeout: float | None = None) -> None:
        self._thread.join(timeout)

    def _run(self) -> None:
        try:
            while self._handle_messages():
                deltas = self._core.step()
                if deltas:
                    self._post(deltas)
        except BaseException:  # whatever it was, nobody may wait for an answer any more
            self._post(EngineDied(traceback.format_exc()))

    def _handle_messages(self) -> bool:
        """Handle all that wait, or wait for one when there is nothing to run; False to shut down."""
        while True:
            try:
                message = self._inbox.get(block=not self._core.has_unfinished)
            except queue.Empty:
                return True
            match message:
                case AddRequest():
                    self._add(message)
                case Refuse():
                    self._refuse(message)
                case Finish(request_id, index):
                    self._core.finish(request_id, index)
                case AskStats():
                    self._post(self._core.stats())
                case Shutdown():
                    return False

    def _add(self, message: AddRequest) -> None:
        try:
            self._core.add_request(
                message.request_id, message.prompt_ids, message.params, message.cache_salt
            )
        except ValueError as error:  # the sender checks too; this keeps a bad message harmless
            self._refuse(Refuse(message.request_id, message.num_outputs, str(error)))

    def _refuse(self, message: Refuse) -> None:
        self._post(
            [
                SequenceDelta(message.request_id, index, finish_reason="error", error=message.error)
                for index in range(message.num_outputs)
            ]
        )
