"""Families whose layers keep their keys in two groups, and mixtures of experts, in the engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rooftile.engine.llm import LLM
from rooftile.engine.params import SamplingParams
from tests.models import hugging_face
from tests.models.test_families import CASES

NAMES = (
    "gemma2 low caps, biases",
    "gemma3",
    "qwen2 tied, windows in the upper layers",
    "qwen3 moe renormalised, dense layers, window",
    "mixtral",
    "diffllama own head_dim, biases, four kv heads",
)
NEW_TOKENS = 20


@pytest.mark.parametrize("name", NAMES)
def test_greedy_tokens_equal_transformers(name: str, tmp_path: Path) -> None:
    """Chunked prompts beside decoding ones, prefixes shared, more tokens than any window."""
    model_type, options = CASES[name]
    model = hugging_face.random_model(model_type, **options)
    model.generation_config.eos_token_id = None
    hugging_face.save(model, tmp_path)
    generator = torch.Generator().manual_seed(11)
    common = torch.randint(3, 67, (24,), generator=generator).tolist()
    prompts = [common, [*common[:16], 9, 8, 7], common[:5], [*common, 4, 4], [60, 61]]
    llm = LLM(str(tmp_path), dtype="float32", page_size=4, num_pages=200, max_num_batched_tokens=11)
    params = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)
    outputs = llm.generate(prompts, params)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.outputs[0].token_ids == greedy(model, prompt), prompt
    again = llm.generate(prompts, params)
    assert [a.outputs[0].token_ids for a in again] == [o.outputs[0].token_ids for o in outputs]
    assert llm.stats().kv.in_use == 0


@pytest.mark.parametrize("name", ["qwen3 moe", "diffllama", "gemma3"])
def test_what_torch_takes_by_default_changes_nothing(name: str, tmp_path: Path) -> None:
    """Autocast, and a default dtype of half precision while a model is loaded and runs."""
    model_type, options = CASES[name]
    hugging_face.save(hugging_face.random_model(model_type, **options), tmp_path)

    def scores() -> list[float]:
        llm = LLM(str(tmp_path), dtype="float32", page_size=4, num_pages=40)
        params = SamplingParams(max_tokens=0, prompt_logprobs=0)
        (output,) = llm.generate([list(range(3, 40))], params)
        return [entry.logprob for entry in output.prompt_logprobs or [] if entry is not None]

    expected = scores()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert scores() == expected
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert scores() == expected
    finally:
        torch.set_default_dtype(torch.float32)


def greedy(model: Any, prompt: list[int]) -> list[int]:
    with torch.inference_mode():
        out = model.generate(
            torch.tensor([prompt]),
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
    return out[0, len(prompt) :].tolist()
