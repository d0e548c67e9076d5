"""KV pages that sequences share: pages in use against a copy of every sequence's pages.

As in PagedAttention (Kwon et al. 2023, section 6.3, figure 15): the samples, or the beams, of one
prompt share the pages of what they have in common, and the share of pages saved is counted.
"""

from __future__ import annotations

import importlib
import inspect
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING

from rooftile.bench.failure import MeasurementFailed
from rooftile.engine.params import BeamSearchParams, SamplingParams

if TYPE_CHECKING:
    from rooftile.engine.llm import LLM
    from rooftile.engine.params import Params

BEGINNING = 8  # tokens; shorter than a page and than any prompt

# Modules whose documentation is mostly prose.
SOURCES = (
    "argparse", "asyncio.queues", "collections", "configparser", "copy", "csv", "dataclasses",
    "datetime", "decimal", "difflib", "doctest", "email.message", "fractions", "functools",
    "heapq", "http.cookiejar", "inspect", "logging", "optparse", "pathlib", "pickletools", "pprint",
    "random", "sched", "shutil", "statistics", "string", "subprocess", "tempfile", "textwrap",
    "threading", "types", "unittest", "unittest.mock", "zipfile",
)  # fmt: skip


@dataclass(frozen=True)
class Lengths:
    """Tokens of prompt and answer on average; each request draws its own from half to 1.5 times."""

    name: str
    prompt: int
    output: int


# The averages of the data sets in the paper (section 6.1).
LENGTHS = {
    shape.name: shape for shape in (Lengths("alpaca", 19, 58), Lengths("sharegpt", 161, 338))
}


@dataclass(frozen=True)
class Passage:
    prompt_token_ids: tuple[int, ...]
    max_tokens: int


@dataclass(frozen=True)
class Saving:
    """Pages over the steps of a run: in use, and entries of all page tables (a copy of each)."""

    in_use: tuple[int, ...]
    copied: tuple[int, ...]

    @property
    def average(self) -> float:
        """Share of pages saved, averaged over the steps."""
        return fmean(1 - a / b for a, b in zip(self.in_use, self.copied, strict=True))

    @property
    def peak(self) -> float:
        """Share by which the most pages in use at once are fewer."""
        return 1 - max(self.in_use) / max(self.copied)


def passages(
    encode: Callable[[str], Sequence[int]], lengths: Lengths, count: int, seed: int = 0
) -> list[Passage]:
    """Prompts of English prose from Python's documentation, of which no two begin alike.

    Raises:
        ValueError: fewer than one, or more than the documentation has.
    """
    drawn = random.Random(seed)
    texts = list(_paragraphs())
    drawn.shuffle(texts)
    found: list[Passage] = []
    beginnings: set[tuple[int, ...]] = set()
    for text in texts:
        if len(found) == count:
            break
        tokens = tuple(encode(text))
        # Long enough for any draw, so that lengths do not depend on what texts there are.
        if len(tokens) < lengths.prompt * 3 // 2 or tokens[:BEGINNING] in beginnings:
            continue
        beginnings.add(tokens[:BEGINNING])
        size = drawn.randint(lengths.prompt // 2, lengths.prompt * 3 // 2)
        output = drawn.randint(lengths.output // 2, lengths.output * 3 // 2)
        found.append(Passage(tokens[:size], output))
    if count < 1 or len(found) < count:
        raise ValueError(f"num_prompts is {count}; there are from 1 to {len(found)}")
    return found


def _paragraphs() -> Iterable[str]:
    """Documentation of modules, classes and functions, longest first, each text once."""
    texts = set()
    for name in SOURCES:
        module = importlib.import_module(name)
        members = [module, *(m for _, m in inspect.getmembers(module) if _is_own(m, name))]
        texts |= {inspect.getdoc(member) or "" for member in members}
    prose = (text for text in texts if not text.startswith(">>>"))
    return sorted(prose, key=lambda text: (-len(text), text))


def _is_own(member: object, module: str) -> bool:
    documented = inspect.isclass(member) or inspect.isfunction(member)
    return documented and getattr(member, "__module__", None) == module


def sampling(n: int) -> Callable[[int], Params]:
    """Parallel sampling from the model's own distribution, to the full length."""
    return lambda length: SamplingParams(n=n, max_tokens=length, ignore_eos=True)


def beams(width: int) -> Callable[[int], Params]:
    return lambda length: BeamSearchParams(width=width, max_tokens=length, ignore_eos=True)


def measure_sharing(
    llm: LLM, prompts: Sequence[Passage], params: Callable[[int], Params]
) -> Saving:
    """Run all prompts and count pages after each step.

    params: of a request, by the tokens that it generates. The prefix cache is emptied first, so
    that only sequences of one request share.

    Raises:
        MeasurementFailed: a request failed, or pages ran out, so that the counts mean nothing.
    """
    llm.reset_prefix_cache()
    before = llm.stats().num_preemptions
    in_use: list[int] = []
    copied: list[int] = []

    def count() -> None:
        stats = llm.stats()
        if stats.page_table_entries:  # 0 when the last request has ended
            in_use.append(stats.kv.in_use)
            copied.append(stats.page_table_entries)

    requests = [(list(p.prompt_token_ids), params(p.max_tokens)) for p in prompts]
    for position, result in llm.run(requests, on_step=count):
        if isinstance(result, ValueError):
            raise MeasurementFailed(f"prompt {position} cannot run: {result}")
        wanted = prompts[position].max_tokens
        for answer in result.outputs:
            if answer.error or len(answer.token_ids) != wanted:
                raise MeasurementFailed(
                    f"prompt {position} made {len(answer.token_ids)} of {wanted} tokens "
                    f"({answer.error or answer.finish_reason})"
                )
    if llm.stats().num_preemptions != before:
        raise MeasurementFailed("KV pages ran out during the run; raise --num-pages")
    return Saving(tuple(in_use), tuple(copied))
