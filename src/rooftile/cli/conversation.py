"""Messages, and a stream of outputs as text on the screen that ctrl-C can end."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TextIO, TypedDict

if TYPE_CHECKING:
    from rooftile.engine.llm import LLM, Prompt
    from rooftile.engine.outputs import RequestOutput
    from rooftile.engine.request_body import RequestBody


class Message(TypedDict):
    role: str
    content: str


def has_template(llm: LLM) -> bool:
    return llm.tokenizer is not None and llm.tokenizer.has_chat_template


def prompts_of(llm: LLM, body: RequestBody, chat: bool, system: str | None) -> list[Prompt]:
    """What the engine gets for a request: a conversation, and with `chat` each text, by the template.

    system: a message before those that do not begin with one.
    """
    if body.is_chat:
        return [_rendered(llm, list(body.messages), body.template_options, system)]
    return [
        _rendered(llm, [{"role": "user", "content": prompt}], {}, system)
        if chat and isinstance(prompt, str)
        else prompt
        for prompt in body.prompts
    ]


def _rendered(
    llm: LLM, messages: list[dict[str, str]], options: dict[str, Any], system: str | None
) -> list[int]:
    if system is not None and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": system}, *messages]
    return llm.render_chat(messages, **options)


class Interrupt:
    """Whether ctrl-C was pressed since the answer began."""

    pressed = False


@contextmanager
def ctrl_c_interrupts() -> Iterator[Interrupt]:
    """Within, ctrl-C only sets a flag: an exception could leave the engine in the middle of a step."""
    interrupt = Interrupt()

    def press(*_: object) -> None:
        interrupt.pressed = True

    before = signal.signal(signal.SIGINT, press)
    try:
        yield interrupt
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def ctrl_c_raises() -> Iterator[None]:
    """Within `ctrl_c_interrupts`, the usual KeyboardInterrupt again, for what waits without an end."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def stream_text(
    outputs: Iterable[RequestOutput], file: TextIO, interrupt: Interrupt | None = None
) -> RequestOutput:
    """Write one answer as it comes, and a line end. Returns its last state.

    An interrupt ends the answer early: the request is aborted and what it said so far stays.
    """
    written = 0
    last = None
    stream = iter(outputs)
    try:
        for last in stream:
            text = last.outputs[0].text
            if len(text) > written:
                file.write(text[written:])
                file.flush()
                written = len(text)
            if interrupt is not None and interrupt.pressed:
                break
    finally:
        if hasattr(stream, "close"):  # a generator aborts its request when closed
            stream.close()
    file.write("\n")
    file.flush()
    if last is None:
        raise RuntimeError("the engine ended a stream without any output")
    return last
