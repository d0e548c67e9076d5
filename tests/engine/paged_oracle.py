"""A runner without a model: its next token is a function of the tokens that it reads *through the
pages*, so a wrong page, a lost copy or a stale prefix changes the result. In a window group it reads
the tokens that the window shows, and nothing else."""

from __future__ import annotations

import pickle
import zlib
from collections.abc import Callable, Sequence

from rooftile.engine.beam import BeamSearch, Hypothesis
from rooftile.engine.config import EngineConfig
from rooftile.engine.core import EngineCore
from rooftile.engine.limits import Limits
from rooftile.engine.memory import Demand
from rooftile.engine.outputs import TokenLogprobs
from rooftile.engine.params import BeamSearchParams
from rooftile.engine.runner import Runner
from rooftile.engine.step import RowStart, StepEntry, StepInput, StepOutput
from rooftile.kvcache.cache import KVCache

VOCAB = 50
EOS = 49
UNWRITTEN = -7
Windows = Sequence[int | None]  # one a KV group
FULL: Windows = (None,)


def seen(tokens: list[int], windows: Windows) -> list[list[int]]:
    """What the last token sees, in each KV group."""
    return [tokens if window is None else tokens[-1 - window :] for window in windows]


def next_token(seen: list[list[int]], seed: int, sample_index: int) -> int:
    return zlib.crc32(repr((seen, seed, sample_index)).encode()) % VOCAB


def expected_output(
    prompt: list[int],
    seed: int,
    sample_index: int,
    max_tokens: int,
    ignore_eos: bool = False,
    windows: Windows = FULL,
) -> list[int]:
    tokens = list(prompt)
    while len(tokens) - len(prompt) < max_tokens:
        tokens.append(next_token(seen(tokens, windows), seed, sample_index))
        if tokens[-1] == EOS and not ignore_eos:
            break
    return tokens[len(prompt) :]


def ranked_tokens(seen: list[list[int]], count: int) -> tuple[tuple[int, float], ...]:
    """The likeliest next tokens in beam search: a function of what is seen, in steps of 1/64."""
    seed = zlib.crc32(repr(seen).encode())
    order = sorted(range(VOCAB), key=lambda token: zlib.crc32(f"{seed} {token}".encode()))
    return tuple((token, -(at + 1 + seed % 7) / 64) for at, token in enumerate(order[:count]))


def expected_beams(
    prompt: list[int], params: BeamSearchParams, longest: int, windows: Windows = FULL
) -> list[Hypothesis]:
    """The same search over the same function, without pages."""
    end = frozenset() if params.ignore_eos else frozenset([EOS])
    search = BeamSearch(params, end, min(params.max_tokens, longest))
    outputs: list[list[int]] = [[]]
    while outputs:
        count = search.candidates_per_beam
        ranked = [ranked_tokens(seen(prompt + o, windows), count) for o in outputs]
        outputs = [[*outputs[c.beam], c.token] for c in search.advance(outputs, ranked)]
    return search.results()


class PagedOracleRunner(Runner):
    """Keeps a token in each KV slot where a model would keep its key and value."""

    def __init__(self, windows: Windows, num_pages: Sequence[int], page_size: int) -> None:
        self.windows = windows
        self.page_size = page_size
        self.slots = [[[UNWRITTEN] * page_size for _ in range(count)] for count in num_pages]
        self.page_tables: list[dict[int, list[int]]] = [{} for _ in windows]
        self.starts: dict[int, RowStart] = {}
        self.last_token: dict[int, int] = {}
        self.fail_next: int | None = None  # raise: 0 before anything is applied, 1 after the writes
        self.nan_rows: set[int] = set()

    def launch(self, step: StepInput) -> Callable[[], StepOutput]:
        step = pickle.loads(pickle.dumps(step))  # it travels to other ranks
        failing, self.fail_next = self.fail_next, None
        if failing == 0:
            raise RuntimeError("injected before the step")
        for row in step.freed:
            self.starts.pop(row, None)
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
        for entry in step.entries:
            self.check_reads(entry)
        tokens = []
        logprobs: list[TokenLogprobs | None] = []
        for sample in step.samples:
            entry = step.entries[sample.entry]
            last = entry.first + len(entry.token_ids) - 1
            seen = [self.read(group, entry.row, last, last + 1) for group in range(len(self.slots))]
            start = self.starts[sample.row]
            token = next_token(seen, start.seed, start.sample_index)
            if sample.row in self.nan_rows:
                self.nan_rows.discard(sample.row)
                token = -1
            tokens.append(token)
            self.last_token[sample.row] = token
            count = start.params.logprobs
            ranked = None if count is None else ranked_tokens(seen, count)
            logprobs.append(None if ranked is None else TokenLogprobs(token, 0.0, ranked))
        output = StepOutput(tokens, logprobs)
        return lambda: output

    def read(self, group: int, row: int, first: int, stop: int) -> list[int]:
        """The tokens that queries first .. stop - 1 see in a group."""
        window, table = self.windows[group], self.page_tables[group][row]
        positions = range(0 if window is None else max(0, first - window), stop)
        pages = [table[position // self.page_size] for position in positions]
        assert min(pages) >= 0, "reads a page that has been given back"
        return [
            self.slots[group][page][position % self.page_size]
            for page, position in zip(pages, positions, strict=True)
        ]

    def check_reads(self, entry: StepEntry) -> None:
        """All queries of an entry, whether sampled or not, see the same tokens in all groups."""
        stop = entry.first + len(entry.token_ids)
        views = [self.read(group, entry.row, entry.first, stop) for group in range(len(self.slots))]
        longest = max(views, key=len)
        assert UNWRITTEN not in longest
        assert all(view == longest[-len(view) :] for view in views)


def make_core(
    *,
    num_pages: int | Sequence[int],
    page_size: int,
    windows: Windows = FULL,
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
    pages = [num_pages] * len(windows) if isinstance(num_pages, int) else list(num_pages)
    cache = KVCache(len(windows), pages, page_size, prefix_cache, windows)
    runner = PagedOracleRunner(windows, pages, page_size)
    demand = Demand(
        page_size, max_num_seqs, max_model_len, min(max_num_batched_tokens, max_model_len)
    )
    limits = Limits(VOCAB, max_model_len, demand.tokens_kept(windows, pages), max_num_seqs)
    return EngineCore(config, runner, cache, limits, frozenset([EOS])), runner, cache
