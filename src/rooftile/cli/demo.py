"""`rooftile demo`: a few prompts through the engine, and what its memory did meanwhile."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rooftile.cli import loading
from rooftile.cli.conversation import Message, stream_text
from rooftile.cli.options import EngineOptions

if TYPE_CHECKING:
    from rich.console import Console

    from rooftile.engine.llm import LLM
    from rooftile.engine.outputs import EngineStats, RequestOutput

SYSTEM = (
    "You are a patient teacher who explains the world to curious children. Answer every question "
    "in one or two short and simple sentences. Use plain words that a child of eight knows, and "
    "explain a hard word when you cannot avoid it. Be friendly and be honest: when you do not know "
    "something, say that you do not know it. Never make up names, numbers or stories. Do not "
    "repeat the question, do not use lists or headings, and do not add advice that nobody asked "
    "for. If a question could be understood in two ways, choose the simpler one and answer that. "
    "End your answer when the question is answered."
)
QUESTIONS = (
    "What is the capital of France?",
    "Who painted the Mona Lisa?",
    "What is the largest planet in the solar system?",
    "Why do birds sing?",
)
STORY = "Write the first sentence of a story about a lighthouse."
SAMPLES = 4
SEED = 2
ANSWER_TOKENS = 40


def demo() -> None:
    """Answer a few prompts with the demo model and show what the engine did."""
    from rich.console import Console
    from rich.rule import Rule

    from rooftile.bench.host import host
    from rooftile.engine.params import SamplingParams

    console = Console(highlight=False)
    options = EngineOptions(model="demo")
    started = time.perf_counter()
    llm = loading.load_llm(options, SEED)
    machine = host()
    console.print(
        f"[bold]Rooftile[/] runs {llm.model_name} on {machine.processor}, {machine.cores} cores; "
        f"loaded in {time.perf_counter() - started:.1f} s.\n"
        "It is a very small model: quick, and not always right."
    )

    console.print()
    console.print(Rule(f"{len(QUESTIONS)} questions with one long system prompt", align="left"))
    console.print(f"[dim]{SYSTEM}[/]")
    peak = Peak(llm)
    answers = []
    for question in QUESTIONS:
        console.print(f"\n[bold cyan]{question}[/]")
        messages = [
            Message(role="system", content=SYSTEM),
            Message(role="user", content=question),
        ]
        params = SamplingParams(temperature=0.0, max_tokens=ANSWER_TOKENS)
        stream = llm.stream(llm.render_chat(messages), params)
        answers.append(stream_text(peak.watch(stream), sys.stdout))
        console.print(f"[dim]{_timing(answers[-1])}[/]")

    console.print()
    console.print(Rule(f"One prompt, {SAMPLES} answers drawn at random at once", align="left"))
    console.print(f"[bold cyan]{STORY}[/]")
    params = SamplingParams(
        n=SAMPLES, temperature=0.8, top_p=0.95, seed=SEED, max_tokens=ANSWER_TOKENS
    )
    story = llm.render_chat([Message(role="user", content=STORY)])
    *_, samples = peak.watch(llm.stream(story, params))
    for answer in samples.outputs:
        cut = " …" if answer.finish_reason == "length" else ""
        console.print(f"{answer.index + 1}. {answer.text.strip()}{cut}", markup=False)
    console.print(f"[dim]{_timing(samples)}[/]")

    _print_table(console, answers, samples, llm.stats(), peak.pages, options.page_size)


@dataclass
class Peak:
    """The most KV pages that were in use at once."""

    llm: LLM
    pages: int = 0

    def watch(self, stream: Iterator[RequestOutput]) -> Iterator[RequestOutput]:
        for output in stream:
            self.pages = max(self.pages, self.llm.stats().kv.in_use)
            yield output


def _tokens(output: RequestOutput) -> int:
    return sum(len(answer.token_ids) for answer in output.outputs)


def _rate(*outputs: RequestOutput) -> float:
    """Tokens per second after the first one of each answer."""
    tokens, seconds = 0, 0.0
    for output in outputs:
        metrics = output.metrics
        assert metrics.finished is not None
        assert metrics.first_token is not None
        tokens += _tokens(output) - len(output.outputs)
        seconds += metrics.finished - metrics.first_token
    return tokens / max(seconds, 1e-9)


def _first(output: RequestOutput) -> float:
    seconds = output.metrics.time_to_first_token
    assert seconds is not None
    return seconds


def _timing(output: RequestOutput) -> str:
    cut = " (the limit)" if output.outputs[0].finish_reason == "length" else ""
    return (
        f"{_tokens(output)} tokens{cut}, first after {_first(output) * 1000:.0f} ms; "
        f"{output.num_cached_tokens} of {len(output.prompt_token_ids)} prompt tokens reused (1)"
    )


def _print_table(
    console: Console,
    answers: list[RequestOutput],
    samples: RequestOutput,
    stats: EngineStats,
    peak: int,
    page_size: int,
) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    later = sum(map(_first, answers[1:])) / len(answers[1:])
    kv = stats.kv
    table = Table(box=SIMPLE_HEAD)
    table.add_column("What the engine did")
    table.add_column("", justify="right")
    for name, value in (
        ("tokens per second after the first, one answer at a time", f"{_rate(*answers):.0f}"),
        (f"tokens per second after the first, {SAMPLES} answers at once", f"{_rate(samples):.0f}"),
        ("time to first token, first question", f"{_first(answers[0]) * 1000:.0f} ms"),
        ("time to first token, later questions on average (1)", f"{later * 1000:.0f} ms"),
        ("pages shared by prefix, all questions together (1)", f"{kv.pages_shared_by_prefix}"),
        ("pages in use, most at once (2)", f"{peak} of {kv.total}"),
        ("pages in use now", f"{kv.in_use}"),
        ("pages kept for prompts that begin alike (2)", f"{kv.cached}"),
        ("pages copied on write (3)", f"{kv.pages_copied}"),
    ):
        table.add_row(name, value)
    console.print(table)
    console.print(
        f"(1) The model remembers a text as keys and values (KV), kept in pages of {page_size} tokens. "
        "The questions begin with the same system prompt: its full pages were computed once, and "
        "the later questions took them over and started sooner.\n"
        "(2) A page is taken when it is needed, out of as many as part of the free memory holds. "
        "Full pages of finished texts are kept until their room is needed.\n"
        f"(3) The {SAMPLES} answers shared the pages of their prompt. When they began to write into "
        "its last, partly filled page, all but one of them copied it first.\n"
        "Next: .venv/bin/rooftile chat -m demo",
        style="dim",
        markup=False,
    )
