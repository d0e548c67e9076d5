"""Grammars take their time, and only their own requests wait for them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from rooftile.engine.bad_words import BadWords
from rooftile.engine.grammar import ANY_OBJECT, GrammarCompiler, GrammarProcessor, JsonSpec
from rooftile.engine.grammar_queue import GrammarQueue
from rooftile.engine.messages import AddRequest, AskStats, Finish, ToEngine
from rooftile.engine.params import SamplingParams


class Engine:
    def __init__(self) -> None:
        self.got: list[ToEngine] = []
        self.changed = threading.Condition()

    def send(self, message: ToEngine) -> None:
        with self.changed:
            self.got.append(message)
            self.changed.notify_all()

    def wait_for(self, count: int) -> list[ToEngine]:
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.got) >= count, 30)
            return list(self.got)


class SlowCompiler(GrammarCompiler):
    """Compiles when it is told to; a schema of "bad" cannot be."""

    def __init__(self) -> None:
        super().__init__(None, 260, frozenset())  # type: ignore[arg-type]
        self.begun, self.go = threading.Semaphore(0), threading.Semaphore(0)

    def _compile(self, spec: JsonSpec) -> Any:
        self.begun.release()
        assert self.go.acquire(timeout=30)
        if spec.schema == "bad":
            raise ValueError("bad")
        return spec


def asks(name: str, processor: Callable[..., Any] | None = None) -> AddRequest:
    return AddRequest(name, [1], SamplingParams(logits_processor=processor))


def test_others_pass_a_request_whose_grammar_is_compiled() -> None:
    engine, compiler = Engine(), SlowCompiler()
    requests = GrammarQueue(engine, compiler)
    slow, ended = GrammarProcessor(ANY_OBJECT), GrammarProcessor(JsonSpec("other"))
    first, second = asks("first", BadWords((), slow)), asks("second", ended)
    bad, last = asks("bad", GrammarProcessor(JsonSpec("bad"))), asks("last", slow)
    for message in (first, second, bad, last):
        requests.send(message)
    assert compiler.begun.acquire(timeout=30)
    others = [asks("plain"), AskStats(), Finish("elsewhere"), asks("banned", BadWords(()))]
    for other in others:
        requests.send(other)
    assert engine.wait_for(4) == others
    requests.send(Finish("second"))  # never begins, so it need not be ended
    for _ in range(2):
        compiler.go.release()
    # The bad one fails by itself, later; the last one's grammar is known by then.
    assert engine.wait_for(7)[4:] == [first, bad, last]
    requests.send(Finish("first"))
    assert engine.wait_for(8)[7:] == [Finish("first")]


def test_a_grammar_that_is_known_waits_for_no_other() -> None:
    compiler = SlowCompiler()
    compiler.go.release()
    compiler.compile(ANY_OBJECT)
    assert compiler.begun.acquire(timeout=30)
    slow = threading.Thread(target=compiler.compile, args=(JsonSpec("slow"),))
    slow.start()
    assert compiler.begun.acquire(timeout=30)
    assert compiler.keeps(ANY_OBJECT)
    compiler.compile(ANY_OBJECT)
    assert not compiler.keeps(JsonSpec("slow"))
    compiler.go.release()
    slow.join(30)
    assert compiler.keeps(JsonSpec("slow"))
