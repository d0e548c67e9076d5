"""Sliding windows in the engine: long runs in little memory, with the same texts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from rooftile.engine.llm import LLM
from rooftile.engine.params import SamplingParams
from rooftile.engine.step import StepInput, StepOutput
from tests.engine.conftest import write_model

LONG = 480
MISTRAL = {
    "architectures": ["MistralForCausalLM"],
    "model_type": "mistral",
    "sliding_window": 20,  # counts the token itself: 19 earlier ones
    "max_position_embeddings": LONG,
}
GEMMA = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "hidden_activation": "gelu_pytorch_tanh",
    "num_hidden_layers": 4,
    "sliding_window": 20,
    "sliding_window_pattern": 2,
    "query_pre_attn_scalar": 8,
    "tie_word_embeddings": True,
    "max_position_embeddings": LONG,
}
WINDOW = 19
# The penalty keeps the random model from repeating itself.
GREEDY = SamplingParams(temperature=0, repetition_penalty=1.5, max_tokens=40, ignore_eos=True)
TEXT = "The quick brown fox jumps over the lazy dog, and the dog sleeps on."
PROMPTS = [TEXT, TEXT[:40], TEXT[:33] + "hides.", TEXT + TEXT[:20], "a"]


@pytest.fixture(scope="module", params=[MISTRAL, GEMMA], ids=["mistral", "gemma3"])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp(request.param["model_type"])
    return str(write_model(directory, **request.param))


def make(path: str, **options: Any) -> LLM:
    defaults = {"dtype": "float32", "random_weights": True, "page_size": 4, "num_pages": 300}
    return LLM(path, **{**defaults, **options})


def poisoned(llm: LLM) -> LLM:
    """Before each step, free pages hold NaN, and page tables nonsense where pages are gone."""
    runner, cache = llm._core._runner, llm._core._cache
    launch = runner.launch

    def poison(step: StepInput) -> Callable[[], StepOutput]:
        for buffer, pool in zip(runner._storage._buffers, cache._pools, strict=True):
            copied = {copy.source for copy in step.copies}  # freed since, but copied first
            for page in set(pool._free) - copied:
                buffer[:, page] = torch.nan
        for table in runner._page_tables:
            table[table < 0] = 1 << 30
        return launch(step)

    for table in runner._page_tables:
        table[:] = -1
    runner.launch = poison  # type: ignore[method-assign]
    return llm


@pytest.fixture(scope="module")
def texts(path: str) -> list[list[int]]:
    """One request at a time in pages that are longer than any text, so that nothing comes back."""
    llm = make(path, page_size=256, num_pages=2, max_model_len=256, prefix_cache=False)
    return [llm.generate(prompt, GREEDY)[0].outputs[0].token_ids for prompt in PROMPTS]


@pytest.mark.parametrize(
    "options",
    [
        {"page_size": 1},
        {"page_size": 4},
        {"page_size": 16},
        {"page_size": 4, "max_num_batched_tokens": 9, "pipeline_depth": 2},
        {"page_size": 1, "max_num_batched_tokens": 30, "pipeline_depth": 2},
        {"page_size": 4, "max_num_seqs": 2, "max_num_batched_tokens": 8},
        {"page_size": 4, "num_pages": 34, "max_num_batched_tokens": 16},
        {"page_size": 4, "prefix_cache": False},
    ],
    ids=str,
)
def test_texts_are_those_of_an_engine_that_keeps_everything(
    path: str, texts: list[list[int]], options: dict[str, Any]
) -> None:
    llm = poisoned(make(path, **options))
    for _ in range(2):  # the second time from the prefix cache
        outputs = llm.generate(PROMPTS, GREEDY)
        assert [output.outputs[0].token_ids for output in outputs] == texts
    stats = llm.stats()
    assert stats.kv.in_use == 0
    assert (stats.kv.prefix_hit_tokens > 0) == options.get("prefix_cache", True)


def test_samples_and_beams_fork_what_is_left(path: str) -> None:
    wide = make(path, page_size=256, num_pages=20, max_model_len=256)
    narrow = poisoned(make(path, max_num_batched_tokens=16))
    sampled = SamplingParams(n=3, temperature=1.0, seed=3, max_tokens=30, ignore_eos=True)
    several = [
        [o.token_ids for o in llm.generate(TEXT, sampled)[0].outputs] for llm in (wide, narrow)
    ]
    assert several[0] == several[1]
    assert narrow.stats().kv.pages_copied > 0


def test_a_long_run_holds_a_window_and_a_page(path: str) -> None:
    """Shown by stats in every step, for each request that runs."""
    budget, page_size = 16, 4
    llm = make(path, max_num_batched_tokens=budget, max_num_seqs=2)
    core = llm._core
    windows = [group.spec.window for group in core._runner._storage.groups]
    assert windows in ([WINDOW], [WINDOW, None])
    params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    prompts = [list(range(1, 200)), list(range(2, 50))]
    for number, prompt in enumerate(prompts):
        core.add_request(str(number), prompt, params)
    most_filling = most_decoding = 0
    while core.has_unfinished:
        core.step()
        kv = core.stats().kv
        held = kv.groups[0].in_use
        if core.stats().generation_tokens < 4:
            most_filling = max(most_filling, held)
        else:
            most_decoding = max(most_decoding, held)
    assert core.stats().generation_tokens == 2 * LONG - sum(len(prompt) for prompt in prompts)
    assert core.stats().num_preemptions == 0
    # Of window + token, the first and the last page may each be partly out of sight.
    assert (most_decoding // 2) * page_size <= WINDOW + 1 + 2 * (page_size - 1)
    assert most_filling * page_size <= 2 * (WINDOW + 2 * (page_size - 1)) + budget
    assert core.stats().kv.in_use == 0


def test_memory_goes_where_it_is_needed(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A window group gets what its window needs; the full group gets the rest."""
    monkeypatch.setattr("rooftile.engine.build.free_memory_bytes", lambda: 500_000)
    llm = make(path, num_pages=None, max_num_batched_tokens=16, max_num_seqs=2)
    groups = llm._core._runner._storage.groups
    pages = [group.total for group in llm.stats().kv.groups]
    assert pages[0] == 2 * (-(-(WINDOW + 16) // 4) + 2)
    if len(groups) == 1:
        assert llm.stats().kv_tokens == LONG
        return
    taken = sum(4 * g.bytes_per_token * count for g, count in zip(groups, pages, strict=True))
    assert taken <= 150_000 < taken + 4 * groups[1].bytes_per_token
    assert llm.stats().kv_tokens == 4 * pages[1]


def test_num_pages_are_those_of_full_groups(path: str) -> None:
    llm = make(path, num_pages=100, max_num_seqs=2, max_num_batched_tokens=16)
    expected = [22, 100][: len(llm.stats().kv.groups)]
    assert [group.total for group in llm.stats().kv.groups] == expected
    # Too few for a window and a step: then the window group bounds the prompt, too.
    llm = make(path, num_pages=5, max_num_seqs=2, max_num_batched_tokens=16)
    with pytest.raises(ValueError, match="21 tokens, but all KV memory holds 20"):
        llm.generate([list(range(21))], GREEDY)
