"""Load for a server: requests that arrive at random or as soon as others end, and their times."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from rooftile.bench.serve_client import RequestFailed, Target

COMMON = (
    "time year people way day man thing woman life child world school state family student group "
    "country problem hand part place case week company system program question work government "
    "number night point home water room mother area money story fact month lot right study book "
    "eye job word business issue side kind head house service friend father power hour game line "
    "end member law car city community name president team minute idea kid body information back "
    "parent face others level office door health person art war history party result change "
    "morning reason research girl guy moment air teacher force education"
)
WORDS = COMMON.split()


@dataclass(frozen=True)
class Load:
    """num_requests requests; either `concurrency` at any time, or Poisson arrivals, `rate` a second.

    input_len: words of a prompt, or tokens where vocab_size is given: then prompts are token ids
    below it, which not every server takes. output_len: most new tokens. ignore_eos: ask for all of
    them, with a field that not every server knows.
    """

    num_requests: int
    input_len: int
    output_len: int
    concurrency: int | None = None
    rate: float | None = None
    chat: bool = False
    vocab_size: int | None = None
    ignore_eos: bool = True
    temperature: float = 0.0
    seed: int = 0
    timeout: float = 600.0

    def __post_init__(self) -> None:
        for name in ("num_requests", "input_len", "output_len", "concurrency", "vocab_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1")
        if (self.concurrency is None) == (self.rate is None):
            raise ValueError("give either a concurrency or a rate of arrivals")
        if self.rate is not None and not self.rate > 0:
            raise ValueError(f"rate is {self.rate}; it must be above 0")
        if self.chat and self.vocab_size is not None:
            raise ValueError("a chat has no prompt of token ids; leave vocab_size out")

    def bodies(self, model: str) -> list[dict[str, Any]]:
        """The bodies of all requests; the same seed makes the same."""
        draw = random.Random(self.seed)
        common: dict[str, Any] = {
            "model": model,
            "max_tokens": self.output_len,
            "temperature": self.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.ignore_eos:
            common["ignore_eos"] = True
        bodies = []
        for _ in range(self.num_requests):
            if self.vocab_size is not None:
                prompt: Any = [draw.randrange(self.vocab_size) for _ in range(self.input_len)]
            else:
                prompt = " ".join(draw.choices(WORDS, k=self.input_len))
            if self.chat:
                bodies.append({**common, "messages": [{"role": "user", "content": prompt}]})
            else:
                bodies.append({**common, "prompt": prompt})
        return bodies

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self.chat else "/v1/completions"


@dataclass
class Record:
    """One request; times in seconds since the run began. error: None where it succeeded."""

    start: float
    events: list[float] = field(default_factory=list)  # arrivals of text
    end: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    error: str | None = None

    @property
    def time_to_first_token(self) -> float:
        return self.events[0] - self.start

    @property
    def inter_token_latencies(self) -> list[float]:
        return [b - a for a, b in zip(self.events, self.events[1:], strict=False)]

    @property
    def latency(self) -> float:
        return self.end - self.start


async def run_load(
    target: Target, model: str, load: Load, on_end: Callable[[Record], None] = lambda record: None
) -> list[Record]:
    """Ask everything; the records in the order of arrival."""
    bodies = load.bodies(model)
    began = time.perf_counter()

    async def ask(body: dict[str, Any]) -> Record:
        record = Record(time.perf_counter() - began)
        try:
            await asyncio.wait_for(_follow(target, load.path, body, record, began), load.timeout)
        except RequestFailed as error:
            record.error = str(error)
        except asyncio.TimeoutError:
            record.error = f"no end within {load.timeout:g} s"
        record.end = time.perf_counter() - began
        on_end(record)
        return record

    if load.rate is not None:
        draw = random.Random(load.seed)
        tasks, due = [], began
        for body in bodies:
            # Against the clock, so that a late start does not delay the arrivals after it.
            await asyncio.sleep(due - time.perf_counter())
            tasks.append(asyncio.create_task(ask(body)))
            due += draw.expovariate(load.rate)
        return list(await asyncio.gather(*tasks))

    records: list[Record] = []
    waiting = iter(bodies)

    async def client() -> None:
        for body in waiting:
            records.append(await ask(body))

    await asyncio.gather(*(client() for _ in range(load.concurrency or 1)))
    return sorted(records, key=lambda record: record.start)


async def _follow(
    target: Target, path: str, body: dict[str, Any], record: Record, began: float
) -> None:
    async for event in target.stream(path, body):
        if event.get("choices"):
            record.events.append(time.perf_counter() - began)
        if usage := event.get("usage"):
            record.prompt_tokens = usage["prompt_tokens"]
            record.output_tokens = usage["completion_tokens"]
            details = usage.get("prompt_tokens_details") or {}
            record.cached_tokens = details.get("cached_tokens") or 0
    if not record.events:
        raise RequestFailed("the answer had no text")
    if not record.output_tokens:  # a server that tells no usage: an event is about a token
        record.output_tokens = len(record.events)
