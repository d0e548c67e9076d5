"""`rooftile chat`: turns, commands, and ctrl-C, over a pipe and in a terminal."""

from __future__ import annotations

import contextlib
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from rooftile.cli import chat
from rooftile.cli.main import app
from tests.cli.fakes import FakeLLM

Run = Callable[..., Any]


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def test_turns_over_a_pipe(llm: FakeLLM, rooftile: Run) -> None:
    result = rooftile("chat", "-m", "x", "--system", "kind", input="one\n\ntwo\n")
    assert result.exit_code == 0
    assert result.stdout == "re: one\nre: two\n"
    system = {"role": "system", "content": "kind"}
    assert llm.conversations[-1] == [system, user("one"), assistant("re: one"), user("two")]


def test_what_the_model_recommends_is_the_default(llm: FakeLLM, rooftile: Run) -> None:
    llm.sampling_defaults = {"temperature": 0.3, "min_p": 0.1}
    rooftile("chat", "-m", "x", "--min-p", "0", input="one\n")
    assert (llm.params[0].temperature, llm.params[0].min_p) == (0.3, 0.0)


def test_reset_and_system_start_afresh(llm: FakeLLM, rooftile: Run) -> None:
    result = rooftile(
        "chat", "-m", "x", input="one\n/reset\ntwo\n/system be brief\nthree\n/system\n/exit\nfour\n"
    )
    assert llm.conversations == [
        [user("one")],
        [user("two")],
        [{"role": "system", "content": "be brief"}, user("three")],
    ]
    assert result.stdout.endswith("be brief\n")


def test_help_and_unknown_commands_do_not_reach_the_model(llm: FakeLLM, rooftile: Run) -> None:
    result = rooftile("chat", "-m", "x", input="/help\n/nonsense\n")
    assert "/reset" in result.stdout
    assert "/nonsense is no command" in result.stderr
    assert llm.conversations == []


def test_ctrl_c_stops_the_answer_and_keeps_what_was_said(llm: FakeLLM, rooftile: Run) -> None:
    llm.interrupt_at = 2
    result = rooftile("chat", "-m", "x", input="a b c d\nmore\n")
    assert result.exit_code == 0
    assert result.stdout == "re: a b\nre: more\n"
    assert "stopped" in result.stderr
    assert llm.aborted == 1
    assert llm.conversations[-1] == [user("a b c d"), assistant("re: a b"), user("more")]


def test_a_refused_or_failed_message_leaves_the_conversation(llm: FakeLLM, rooftile: Run) -> None:
    llm.refuse = "the prompt has 9 tokens"
    result = rooftile("chat", "-m", "x", input="too long\nfail\nshort\n")
    assert result.exit_code == 0
    assert "error: the prompt has 9 tokens (/reset starts afresh)" in result.stderr
    assert "error: it broke" in result.stderr
    assert llm.conversations[-1] == [user("short")]


def test_a_model_without_a_template_is_refused(llm: FakeLLM, rooftile: Run) -> None:
    llm.tokenizer.has_chat_template = False
    result = rooftile("chat", "-m", "some/base", input="hi\n")
    assert result.exit_code == 1
    assert "some/base has no chat template" in result.stderr


def test_ctrl_c_between_an_answer_and_the_prompt_ends_nothing(
    llm: FakeLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    typed, before = iter(["one", "/nonsense", "two"]), signal.getsignal(signal.SIGINT)

    def read(prompt: str) -> str:
        for line in typed:
            return line
        raise EOFError

    monkeypatch.setattr("builtins.input", read)
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: True))
    # While it says that /nonsense is no command.
    monkeypatch.setattr(chat, "_note", lambda _: os.kill(os.getpid(), signal.SIGINT))
    app(["chat", "-m", "x"], standalone_mode=False)
    assert llm.conversations[-1] == [user("one"), assistant("re: one"), user("two")]
    assert signal.getsignal(signal.SIGINT) == before


SLOW = """
import time
from tests.cli.fakes import FakeLLM
from rooftile.cli import loading, main

class Slow(FakeLLM):
    def _words(self, prompt):
        words = self._output(prompt, 1)
        for n in range(1, 100_000):
            words.outputs[0].text = "w " * n
            yield words
            time.sleep(0.01)

loading.load_llm = lambda *_: Slow()
main.app(["chat", "-m", "x"])
"""


def test_ctrl_c_and_ctrl_d_in_a_terminal() -> None:
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", SLOW], stdin=theirs, stdout=theirs, stderr=theirs,
        start_new_session=True, preexec_fn=lambda: _take_terminal(),
    )  # fmt: skip
    os.close(theirs)
    try:
        _read_until(ours, b"> ")
        os.write(ours, b"hello\n")
        _read_until(ours, b"w w w ")
        os.write(ours, b"\x03")
        _read_until(ours, b"[stopped]")
        _read_until(ours, b"> ")
        # At the prompt: a hint, not the end.
        _press_until(lambda seconds: _read_until(ours, b"leaves]", seconds), ours, b"\x03")
        os.write(ours, b"again\n")
        _read_until(ours, b"w w w ")
        os.write(ours, b"\x03")
        _read_until(ours, b"[stopped]")
        _read_until(ours, b"> ")
        _press_until(lambda seconds: process.wait(timeout=seconds), ours, b"\x04")
        assert process.returncode == 0
    finally:
        process.kill()
        process.wait()
        os.close(ours)


def _take_terminal() -> None:
    import fcntl
    import termios

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    # A shell starts what it runs in the background with ctrl-C ignored, and children inherit that.
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _press_until(done: Callable[[float], object], terminal: int, key: bytes) -> None:
    """Press a key, and again where it was lost, until done(seconds to wait) does not raise.

    Python's input() shows its prompt a moment before it waits for keys and signals; what is pressed
    in between may be noticed with the next key only, which a person hardly ever meets.
    """
    for seconds in (1, 2, 4, 8, 16, 32):
        os.write(terminal, key)
        with contextlib.suppress(AssertionError, subprocess.TimeoutExpired):
            done(seconds)
            return
    done(60)


def _read_until(terminal: int, wanted: bytes, seconds: float = 120) -> None:
    seen = b""
    deadline = time.monotonic() + seconds
    while wanted not in seen:
        ready, _, _ = select.select([terminal], [], [], max(0, deadline - time.monotonic()))
        assert ready, f"no {wanted!r} within {seconds} s; the screen shows {seen[-400:]!r}"
        seen += os.read(terminal, 1)
