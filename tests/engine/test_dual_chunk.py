"""Dual chunk attention in the engine: nothing about how a text was computed changes its tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rooftile import DualChunkConfig
from rooftile.engine.llm import LLM
from rooftile.engine.params import SamplingParams
from rooftile.layers.attention import AttentionLayer, LayerKV
from tests.engine.padded import use_padded_runner
from tests.models import hugging_face
from tests.models.test_families_engine import greedy

CHUNKS = {"chunk_size": 12, "local_size": 4, "original": 10}
PARAMS = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, logprobs=1)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Any]:
    directory = tmp_path_factory.mktemp("llama")
    oracle = hugging_face.random_model("llama", max_position_embeddings=16)
    hugging_face.save(oracle, directory)
    return str(directory), oracle


def prompts() -> list[list[int]]:
    """Below one chunk of 8, at its border, of two and of many; some begin alike."""
    generator = torch.Generator().manual_seed(4)
    common = torch.randint(3, 67, (45,), generator=generator).tolist()
    return [common, common[:7], common[:8], [*common[:16], 9], [*common[:40], 8, 8], [60, 61]]


def load(directory: str, **options: Any) -> LLM:
    given: dict[str, Any] = {"dtype": "float32", "page_size": 4, "num_pages": 200}
    given |= {"max_model_len": 70, "dual_chunk": CHUNKS}
    return LLM(directory, **(given | options))


def answers(llm: LLM, given: list[list[int]] | None = None) -> list[tuple[int, ...]]:
    outputs = llm.generate(prompts() if given is None else given, PARAMS)
    assert llm.stats().kv.in_use == 0
    return [tuple(output.outputs[0].token_ids) for output in outputs]


@pytest.fixture(scope="module")
def expected(model: tuple[str, Any]) -> list[tuple[int, ...]]:
    """Each prompt alone, whole, nothing shared."""
    llm = load(model[0], prefix_cache=False)
    return [answers(llm, [prompt])[0] for prompt in prompts()]


@pytest.mark.parametrize(
    "options",
    [
        {"page_size": 1, "num_pages": 800},
        {"page_size": 16},  # no multiple of a chunk
        {"page_size": 2, "max_num_batched_tokens": 3},
        {"max_num_batched_tokens": 11},
        {"num_pages": 24},  # requests are preempted
        {"max_num_seqs": 2, "pipeline_depth": 2},
    ],
)
def test_pages_steps_prefixes_and_preemption_change_nothing(
    model: tuple[str, Any], expected: list[tuple[int, ...]], options: dict[str, Any]
) -> None:
    llm = load(model[0], **options)
    assert answers(llm) == expected
    assert answers(llm) == expected
    assert llm.stats().kv.prefix_hit_tokens > 0


@pytest.mark.parametrize("kind", ["dual chunk", "whole prompts", "differential"])
@pytest.mark.parametrize("joined", [False, True])
def test_on_the_runner_for_gpus(
    kind: str,
    joined: bool,
    model: tuple[str, Any],
    expected: list[tuple[int, ...]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Which pads its steps, and whose layers have one operator before they attend: here on a CPU."""
    directory, options = model[0], {"max_num_batched_tokens": 11}
    if kind == "differential":
        hugging_face.save(hugging_face.random_model("diffllama", head_dim=8), tmp_path)
        directory, options = str(tmp_path), {**options, "dual_chunk": None}
        expected = answers(load(directory, **options))
    if kind == "whole prompts":
        options["dual_chunk"] = {**CHUNKS, "length_factor": "prompt"}
        expected = answers(load(directory, **options))
    use_padded_runner(monkeypatch)
    if joined:
        monkeypatch.setattr(AttentionLayer, "finish", finish_joined)
    llm = load(directory, **options)
    assert answers(llm) == expected
    assert answers(llm) == expected


def finish_joined(
    layer: AttentionLayer, qkv: Tensor, positions: Tensor, kv: LayerKV, x: Tensor | None = None
) -> Tensor:
    q = layer._norm_rotate_append(qkv, positions, kv)
    return layer.out(layer.attend(q, kv, x).flatten(1))


def test_the_factor_of_whole_prompts_reads_no_prefix(
    model: tuple[str, Any], expected: list[tuple[int, ...]]
) -> None:
    whole = {**CHUNKS, "length_factor": "prompt"}
    llm = load(model[0], dual_chunk=whole)
    found = answers(llm)
    assert answers(llm) == found
    assert llm.stats().kv.prefix_hit_tokens == 0
    for options in ({"max_num_batched_tokens": 3}, {"num_pages": 24}):
        assert answers(load(model[0], dual_chunk=whole, **options)) == found
    assert found != expected
    assert found[1] == expected[1], "a short prompt's own positions decide"


@pytest.mark.parametrize("length_factor", ["query", "prompt"])
@pytest.mark.parametrize("context", [1, 7, 45])
def test_a_continuation_scores_as_it_was_generated(
    model: tuple[str, Any], length_factor: str, context: int
) -> None:
    """It is none of the prompt whose length counts."""
    prompt = prompts()[0][:context]
    for options in ({}, {"max_num_batched_tokens": 7}):
        llm = load(model[0], dual_chunk={**CHUNKS, "length_factor": length_factor}, **options)
        (answer,) = llm.generate([prompt], PARAMS)[0].outputs
        assert answer.logprobs is not None
        (score,) = llm.score(prompt, [list(answer.token_ids)])
        assert score.is_greedy
        generated = [entry.logprob for entry in answer.logprobs]
        assert list(score.logprobs) == pytest.approx(generated, abs=1e-4)


def test_within_a_chunk_and_the_trained_length_it_is_the_plain_model(
    model: tuple[str, Any],
) -> None:
    llm = load(model[0], dual_chunk="chunk_size=40,local_size=8,original=100", max_model_len=32)
    prompt = prompts()[3][:11]
    assert list(answers(llm, [prompt])[0]) == greedy(model[1], prompt)


def test_beside_an_ordinary_model(model: tuple[str, Any], expected: list[tuple[int, ...]]) -> None:
    chunked, plain = load(model[0]), load(model[0], dual_chunk=None, max_model_len=None)
    short = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
    alone = plain.generate([prompts()[1]], short)[0].outputs[0].token_ids
    tokens: list[int] = []
    for output in chunked.stream(prompts()[0], PARAMS):
        tokens = output.outputs[0].token_ids
        again = plain.generate([prompts()[1]], short)[0].outputs[0].token_ids
        assert again == alone
    assert tuple(tokens) == expected[0]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("chunk_size=12", "dual_chunk lacks local_size; give chunk_size=6144,local_size=1024"),
        ("chunk_size=12,local_size=4,window=3", "dual_chunk has no field 'window'"),
        ("chunk_size=12,local", "dual_chunk has 'local', which is no name=value"),
        ("chunk_size=many,local_size=4", "chunk_size is 'many'; it must be a whole number"),
        ("chunk_size=12,local_size=4,original=10000000000", "position is 10000000000; it must be"),
        ({"chunk_size": 12, "local_size": 12}, "chunk_size is 12 and local_size is 12"),
        ({**CHUNKS, "original_max_position": 8}, "dual_chunk has a field twice"),
        (12, "dual_chunk is 12; give chunk_size"),
    ],
)
def test_options_that_make_no_sense(given: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LLM("demo", dual_chunk=given)


def test_forms_of_the_option() -> None:
    text = "chunk_size=12, local_size=4,original=10,length_factor=prompt"
    assert DualChunkConfig.of(text) == DualChunkConfig(12, 4, 10, "prompt")
    assert DualChunkConfig.of(CHUNKS) == DualChunkConfig(12, 4, 10)


@pytest.mark.parametrize(
    ("model_type", "options"), [("mistral", {"sliding_window": 6}), ("diffllama", {"head_dim": 8})]
)
def test_models_that_it_does_not_fit(
    model_type: str, options: dict[str, Any], tmp_path: Path
) -> None:
    model = hugging_face.random_model(model_type, num_hidden_layers=1, **options)
    hugging_face.save(model, tmp_path)
    with pytest.raises(ValueError, match="no layer has plain attention with rotary positions and"):
        load(str(tmp_path))
