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
    "You are the guide of a small lighthouse museum. Answer in one or two short sentences and "
    "only with what you know. The lighthouse was built in 1872 by the stonemason Ada Brandt. It "
    "is 38 metres tall and has 203 steps. Its lamp could be seen from 40 kilometres away. The last "
    "keeper, Tom Hale, left in 1986, when the lamp became automatic. The museum opens at ten in "
    "the morning and closes at five in the afternoon. A ticket costs four euros, and children "
    "enter free. The cafe beside the tower is known for its apple cake."
)
QUESTIONS = (
    "Who built the lighthouse, and when?",
    "How many steps does the lighthouse have?",
    "When does the museum open?",
)
STORY = "Write the first sentence of a story about a lighthouse."
SAMPLES = 4
SEED = 7


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
        f"loaded in {time.perf_counter() - started:.1f} s"
    )

    console.print(Rule("three questions, one long system prompt", align="left"))
    peak = Peak(llm)
    answers = []
    for question in QUESTIONS:
        console.print(f"[bold cyan]{question}[/]")
        messages = [
            Message(role="system", content=SYSTEM),
            Message(role="user", content=question),
        ]
        params = SamplingParams(temperature=0.0, max_tokens=48)
        stream = llm.stream(llm.render_chat(messages), params)
        answers.append(stream_text(peak.watch(stream), sys.stdout))
        console.print(f"[dim]{_timing(answers[-1])}[/]")

    console.print(Rule(f"one prompt, {SAMPLES} sampled answers at once", align="left"))
    console.print(f"[bold cyan]{STORY}[/]")
    params = SamplingParams(n=SAMPLES, temperature=0.8, top_p=0.95, seed=SEED, max_tokens=40)
    story = llm.render_chat([Message(role="user", content=STORY)])
    *_, samples = peak.watch(llm.stream(story, params))
    for answer in samples.outputs:
        console.print(f"{answer.index + 1}. {answer.text.strip()}", markup=False)
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


def _rate(output: RequestOutput) -> float:
    """Tokens per second after the first one of each answer."""
    metrics = output.metrics
    assert metrics.finished is not None
    assert metrics.first_token is not None
    tokens = _tokens(output) - len(output.outputs)
    return tokens / max(metrics.finished - metrics.first_token, 1e-9)


def _first(output: RequestOutput) -> float:
    seconds = output.metrics.time_to_first_token
    assert seconds is not None
    return seconds


def _timing(output: RequestOutput) -> str:
    return (
        f"{_tokens(output)} tokens, {_rate(output):.0f} tokens/s, the first after "
        f"{_first(output) * 1000:.0f} ms; {output.num_cached_tokens} of "
        f"{len(output.prompt_token_ids)} prompt tokens were in the prefix cache"
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

    alone = sum(map(_rate, answers)) / len(answers)
    later = sum(map(_first, answers[1:])) / len(answers[1:])
    kv = stats.kv
    table = Table(box=SIMPLE_HEAD)
    table.add_column("what the engine did")
    table.add_column("", justify="right")
    for name, value in (
        ("tokens per second, one answer at a time", f"{alone:.0f}"),
        (f"tokens per second, {SAMPLES} answers at once", f"{_rate(samples):.0f}"),
        ("time to first token, first question", f"{_first(answers[0]) * 1000:.0f} ms"),
        ("time to first token, later questions (1)", f"{later * 1000:.0f} ms"),
        ("KV pages in use, most at once / in all (2)", f"{peak} / {kv.total}"),
        ("KV pages in use now / kept for later prompts", f"{kv.in_use} / {kv.cached}"),
        ("pages shared by prefix (1)", f"{kv.pages_shared_by_prefix}"),
        ("pages copied on write (3)", f"{kv.pages_copied}"),
    ):
        table.add_row(name, value)
    console.print(table)
    console.print(
        "(1) The questions begin with the same system prompt. Its keys and values were computed "
        "once; the later questions took the pages that hold them and started sooner.\n"
        f"(2) The model remembers a text as keys and values (KV), kept in pages of {page_size} "
        "tokens. A page is taken when it is needed and given back when nobody needs it.\n"
        f"(3) The {SAMPLES} sampled answers shared the pages of their prompt. Only its last, "
        "partly filled page was copied, when an answer began to write into it.",
        style="dim",
        markup=False,
    )
