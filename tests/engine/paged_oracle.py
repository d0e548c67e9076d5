"""A runner without a model: its next token is a function of the tokens that it reads *through the
pages*, so a wrong page, a lost copy or a stale prefix changes the result."""

from __future__ import annotations

import pickle
import zlib
from collections.abc import Callable

from rooftile.engine.beam import BeamSearch, Hypothesis
from rooftile.engine.config import EngineConfig
from rooftile.engine.core import EngineCore, Limits
from rooftile.engine.outputs import TokenLogprobs
from rooftile.engine.params import BeamSearchParams
from rooftile.engine.runner import Runner
from rooftile.engine.step import RowStart, StepInput, StepOutput
from rooftile.kvcache.cache import KVCache

VOCAB = 50
EOS = 49
UNWRITTEN = -7


def next_token(history: list[int], seed: int, sample_index: int) -> int:
    return zlib.crc32(repr((history, seed, sample_index)).encode()) % VOCAB


def expected_output(
    prompt: list[int], seed: int, sample_index: int, max_tokens: int, ignore_eos: bool = False
) -> list[int]:
    tokens = list(prompt)
    while len(tokens) - len(prompt) < max_tokens:
        tokens.append(next_token(tokens, seed, sample_index))
        if tokens[-1] == EOS and not ignore_eos:
            break
    return tokens[len(prompt) :]


def ranked_tokens(history: list[int], count: int) -> tuple[tuple[int, float], ...]:
    """The likeliest next tokens in beam search: a function of the history, in steps of 1/64."""
    seed = zlib.crc32(repr(history).encode())
    order = sorted(range(VOCAB), key=lambda token: zlib.crc32(f"{seed} {token}".encode()))
    return tuple((token, -(at + 1 + seed % 7) / 64) for at, token in enumerate(order[:count]))


def expected_beams(prompt: list[int], params: BeamSearchParams, longest: int) -> list[Hypothesis]:
    """The same search over the same function, without pages."""
    end = frozenset() if params.ignore_eos else frozenset([EOS])
    search = BeamSearch(params, end, min(params.max_tokens, longest))
    outputs: list[list[int]] = [[]]
    while outputs:
        ranked = [ranked_tokens(prompt + o, search.candidates_per_beam) for o in outputs]
        outputs = [[*outputs[c.beam], c.token] for c in search.advance(outputs, ranked)]
    return search.results()


class PagedOracleRunner(Runner):
    """Keeps a token in each KV slot where a model would keep its key and value."""

    def __init__(self, num_groups: int, num_pages: int, page_size: int) -> None:
        self.page_size = page_size
        self.slots = [
            [[UNWRITTEN] * page_size for _ in range(num_pages)] for _ in range(num_groups)
        ]
        self.page_tables: list[dict[int, list[int]]] = [{} for _ in range(num_groups)]
        self.starts: dict[int, RowStart] = {}
        self.last_token: dict[int, int] = {}
        self.fail_next: int | None = None  # raise: 0 before anything is applied, 1 after the writes
        self.nan_rows: set[int] = set()

    def launch(self, step: StepInput) -> Callable[[], StepOutput]:
        step = pickle.loads(pickle.dumps(step))  # it travels to other ranks
        failing, self.fail_next = self.fail_next, None
        if failing == 0:
            raise RuntimeError("injected before the step")
        for start in step.starts:
            self.starts[start.row] = start
        for update in step.page_updates:
            pages = self.page_tables[update.group].setdefault(update.row, [])
            pages[update.start :] = update.pages
        for copy in step.copies:
            self.slots[copy.group][copy.target] = list(self.slots[copy.group][copy.source])
        for group, tables in enumerate(self.page_tables):
            for entry in step.entries:
                for offset, token in enumerate(entry.token_ids):
                    position = entry.first + offset
                    value = self.last_token[entry.row] if token < 0 else token
                    page = self.slots[group][tables[entry.row][position // self.page_size]]
                    if position >= entry.write_from:
                        page[position % self.page_size] = value
                    else:
                        assert page[position % self.page_size] == value
        if failing == 1:
            raise RuntimeError("injected after the writes")
        tokens = []
        logprobs: list[TokenLogprobs | None] = []
        for sample in step.samples:
            entry = step.entries[sample.entry]
            length = entry.first + len(entry.token_ids)
            histories = [
                [
                    slots[tables[entry.row][p // self.page_size]][p % self.page_size]
                    for p in range(length)
                ]
                for slots, tables in zip(self.slots, self.page_tables, strict=True)
            ]
            assert all(history == histories[0] for history in histories)
            assert UNWRITTEN not in histories[0]
            start = self.starts[sample.row]
            token = next_token(histories[0], start.seed, start.sample_index)
            if sample.row in self.nan_rows:
                self.nan_rows.discard(sample.row)
                token = -1
            tokens.append(token)
            self.last_token[sample.row] = token
            count = start.params.logprobs
            ranked = None if count is None else ranked_tokens(histories[0], count)
            logprobs.append(None if ranked is None else TokenLogprobs(token, 0.0, ranked))
        output = StepOutput(tokens, logprobs)
        return lambda: output


def make_core(
    *,
    num_pages: int,
    page_size: int,
    num_groups: int = 1,
    pipeline_depth: int = 1,
    max_num_batched_tokens: int = 16,
    max_num_seqs: int = 6,
    max_model_len: int = 64,
    prefix_cache: bool = True,
) -> tuple[EngineCore, PagedOracleRunner, KVCache]:
    config = EngineConfig(
        "oracle",
        page_size=page_size,
        max_num_batched_tokens=max_num_batched_tokens,
        max_num_seqs=max_num_seqs,
        pipeline_depth=pipeline_depth,
    )
    cache = KVCache(num_groups, [num_pages] * num_groups, page_size, prefix_cache)
    runner = PagedOracleRunner(num_groups, num_pages, page_size)
    limits = Limits(VOCAB, max_model_len, num_pages * page_size, max_num_seqs)
    return EngineCore(config, runner, cache, limits, frozenset([EOS])), runner, cache
