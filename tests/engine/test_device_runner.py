"""The GPU's runner, on a CPU: the engine's own tests again, and what padding and graphs must keep."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from rooftile.engine.graphs import decode_sizes, fitting, mixed_sizes
from rooftile.engine.llm import LLM
from rooftile.engine.params import SamplingParams
from rooftile.engine.staging import Staging, starts_of
from rooftile.engine.step import PageUpdate
from rooftile.models import decoder, native, packing
from rooftile.ops.step import PREPARE_STEP
from tests.engine.packed import check_prepared, packed_step
from tests.engine.padded import use_padded_runner
from tests.engine.test_llm import *  # noqa: F403  (all of them, with the fixtures below)
from tests.ops.accuracy import opcheck


@pytest.fixture(scope="module")
def make_llm(model_path: str) -> Iterator[Callable[..., LLM]]:
    with pytest.MonkeyPatch.context() as patch:
        use_padded_runner(patch)

        def make(**options: Any) -> LLM:
            defaults = {"dtype": "float32", "random_weights": True, "num_pages": 64, "page_size": 4}
            return LLM(model_path, **{**defaults, **options})

        yield make


@pytest.fixture(scope="module")
def shared_llm(make_llm: Callable[..., LLM]) -> LLM:
    return make_llm(pipeline_depth=2)


@pytest.mark.parametrize("most", [1, 3, 16, 100, 256, 1000])
def test_capacities_waste_at_most_an_eighth(most: int) -> None:
    for sizes, least in ((decode_sizes(most), 64), (mixed_sizes(8 * most), 128)):
        largest = sizes[-1]
        assert sizes == sorted(set(sizes))
        for needed in range(1, largest + 1):
            size = fitting(sizes, needed)
            assert size >= needed
            assert needed < least or size - needed <= needed / 8
        assert len(sizes) < 100


@pytest.mark.parametrize("options", [{"pipeline_depth": 1}, {"max_num_batched_tokens": 9}], ids=str)
def test_padding_does_not_change_a_token(
    model_path: str, make_llm: Callable[..., LLM], options: dict[str, Any]
) -> None:
    """Against the runner without padding: shared prefixes, forks, chunks, preemption, filters."""
    shared = list(range(30, 60))
    prompts = [[*shared, 1, 2], [*shared, 3], [7] * 19, [5], shared]
    params = [
        SamplingParams(temperature=0, max_tokens=25),
        SamplingParams(temperature=0.7, seed=1, max_tokens=9, n=3, top_k=20, top_p=0.9),
        SamplingParams(temperature=1, seed=2, max_tokens=30, min_p=0.01),
        SamplingParams(temperature=0.9, seed=3, max_tokens=12, repetition_penalty=1.3),
        SamplingParams(temperature=0, max_tokens=6, logprobs=3, prompt_logprobs=2),
    ]

    def tokens(llm: LLM) -> list[Any]:
        outputs = llm.generate(prompts, params)
        again = llm.generate(prompts, params)  # with a warm prefix cache
        assert llm.stats().kv.in_use == 0
        return [
            (c.token_ids, c.logprobs and [[i for i, _ in e.top] for e in c.logprobs])
            for output in (*outputs, *again)
            for c in output.outputs
        ]

    plain = LLM(model_path, dtype="float32", random_weights=True, num_pages=30, page_size=4)
    padded = make_llm(num_pages=30, **options)
    assert tokens(padded) == tokens(plain)


def test_the_packed_step() -> None:
    check_prepared("reference")
    words, state, out = packed_step(2, tokens=16, requests=5, samples=4)
    arguments = (words, state.page_tables, state.last_token, *out.all, 2)
    opcheck(PREPARE_STEP, *arguments, test_utils=("test_schema", "test_faketensor"))


def test_changes_beyond_one_copy_go_in_several() -> None:
    staging = Staging(max_tokens=4, max_rows=3, max_pages=5, groups=1, device=torch.device("cpu"))
    updates = [PageUpdate(0, row, 0, list(range(5))) for row in (0, 1, 2, 0, 1)]
    parts = staging.parts(updates)
    assert [len(part) for part in parts] == [3, 2]
    assert [update for part in parts for update in part] == updates
    assert starts_of([3, 0, 2]) == [0, 3, 3]


def test_norms_that_go_into_the_products_after_them(
    model_path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a GPU runs for each layer, with the reference kernels."""
    monkeypatch.setattr(native, "refusal", lambda decoder: "operator by operator")
    monkeypatch.setattr(packing, "best_format", lambda device, dtype: "dense")
    llm = LLM(model_path, dtype="float32", random_weights=True, num_pages=64, page_size=4)
    prompts = [[1, 2, 3], list(range(40)), [9]]
    params = SamplingParams(temperature=0, max_tokens=12)
    plain = [output.outputs[0].token_ids for output in llm.generate(prompts, params)]
    joined = []

    def forward(self: Any, token_ids: Any, positions: Any, kv: Any) -> Any:
        x, stream = self.embedding(token_ids), None
        for layer, layer_kv in zip(self.layers, kv, strict=True):
            assert decoder._has_joined_norms(layer)
            x, stream = decoder._run_joined(layer, x, stream, positions, layer_kv, 1.0)
            joined.append(layer)
        return self.norm.add(x, stream)[0]

    monkeypatch.setattr(decoder.Decoder, "forward", forward)
    llm.reset_prefix_cache()
    assert [output.outputs[0].token_ids for output in llm.generate(prompts, params)] == plain
    assert joined
