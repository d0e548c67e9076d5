"""`rooftile chat`: a conversation in the terminal, or over a pipe."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated

import typer

from rooftile.cli import loading
from rooftile.cli.conversation import (
    Message,
    ctrl_c_interrupts,
    ctrl_c_raises,
    has_template,
    stream_text,
)
from rooftile.cli.errors import print_error
from rooftile.cli.options import AnswerOptions, EngineOptions, with_options, with_recommended

if TYPE_CHECKING:
    from rooftile.engine.llm import LLM
    from rooftile.engine.params import SamplingParams

HELP = """\
/system TEXT  set the system message and start afresh (/system alone shows it)
/reset        forget the conversation, keep the system message
/help         this list
/exit         leave (so does ctrl-D)
ctrl-C        stop the answer; what was said so far stays in the conversation"""


@with_options(sampling=AnswerOptions, engine=EngineOptions)
def chat(
    engine: EngineOptions,
    sampling: AnswerOptions,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
) -> None:
    """Talk with a model. /help lists the commands; ctrl-C stops an answer; ctrl-D leaves.

    Over a pipe, each line of standard input is one message.
    """
    params = sampling.sampling_params()
    llm = loading.load_llm(engine, sampling.seed)
    params = with_recommended(params, sampling.left_to_model, llm.sampling_defaults)
    conversation = Conversation(llm, params, system)
    if not has_template(llm):
        raise ValueError(
            f"{engine.model} has no chat template; `rooftile generate --raw` continues text"
        )
    interactive = sys.stdin.isatty()
    if interactive:
        print(f"{engine.model} is ready. /help lists the commands, ctrl-D leaves.")
    # At a terminal, ctrl-C between an answer and the prompt, or twice, must not end the conversation.
    with ctrl_c_interrupts() if interactive else contextlib.nullcontext():
        for line in _lines(interactive):
            if line.startswith("/"):
                if not conversation.command(line):
                    break
            elif line:
                conversation.say(line)


@dataclass
class Conversation:
    llm: LLM
    params: SamplingParams
    system: str | None = None
    turns: list[Message] = field(default_factory=list)

    def messages(self) -> list[Message]:
        before = [] if self.system is None else [Message(role="system", content=self.system)]
        return [*before, *self.turns]

    def say(self, text: str) -> None:
        """Stream the answer to `text`; both join the conversation. A refused message does not."""
        self.turns.append(Message(role="user", content=text))
        try:
            prompt = self.llm.render_chat(self.messages())
            with ctrl_c_interrupts() as interrupt:
                output = stream_text(self.llm.stream(prompt, self.params), sys.stdout, interrupt)
        except ValueError as error:
            self.turns.pop()
            print_error(f"{error} (/reset starts afresh)")
            return
        (answer,) = output.outputs
        if answer.error:
            self.turns.pop()
            print_error(answer.error)
            return
        self.turns.append(Message(role="assistant", content=answer.text))
        if interrupt.pressed:
            _note("stopped")
        elif answer.finish_reason == "length":
            _note("cut at the length limit: see --max-tokens")

    def command(self, line: str) -> bool:
        """Carry out a line that begins with "/"; whether the conversation goes on."""
        name, _, rest = line.partition(" ")
        rest = rest.strip()
        if name == "/exit":
            return False
        if name == "/help":
            print(HELP)
        elif name == "/reset":
            self.turns.clear()
            _note("the conversation is empty")
        elif name == "/system" and rest:
            self.system = rest
            self.turns.clear()
            _note("system message set; the conversation is empty")
        elif name == "/system":
            print(self.system or "(no system message)")
        else:
            _note(f"{name} is no command; /help lists them")
        return True


def _note(text: str) -> None:
    # On standard error, so that a pipe carries the answers only.
    print(f"[{text}]", file=sys.stderr, flush=True)


def _lines(interactive: bool) -> Iterator[str]:
    if not interactive:
        yield from (line.strip() for line in sys.stdin)
        return
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (gives input() line editing and a history)
    while True:
        try:
            with ctrl_c_raises():
                line = input("> ")
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print()
            _note("ctrl-D or /exit leaves")
        else:
            yield line.strip()
