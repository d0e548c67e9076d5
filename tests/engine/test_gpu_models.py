"""Families of models on a GPU against the CPU: mixtures of experts, windows, GGUF files, 4 and 8 bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rooftile.engine.llm import LLM
from rooftile.engine.params import SamplingParams
from tests.engine.conftest import write_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
SIZES = {"hidden_size": 128, "intermediate_size": 192, "head_dim": 32, "vocab_size": 300}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("mixtral", {"num_local_experts": 5, "num_experts_per_tok": 2}),
    "qwen3 moe": (
        "qwen3_moe",
        {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 64},
    ),
    "mistral with a window": ("mistral", {"sliding_window": 20}),
    "gemma 3, windows in some layers": (
        "gemma3_text",
        {"num_hidden_layers": 7, "sliding_window": 17, "query_pre_attn_scalar": 32},
    ),
    "qwen 2, biases": ("qwen2", {}),
    "qwen 3, tied": ("qwen3", {"tie_word_embeddings": True}),
}
PROMPTS = [list(range(3, 90)), [5, 9, 2], list(range(50, 75))]


def compare(path: str, **options: Any) -> None:
    """Greedy texts of the CPU; the GPU scores them as the CPU did, and writes nearly all of them."""
    defaults = {"dtype": "float32", "num_pages": 100, "max_num_seqs": 8}
    cpu = LLM(path, device="cpu", **defaults)
    gpu = LLM(path, device="cuda", **{**defaults, **options})
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, logprobs=1)
    expected, got = cpu.generate(PROMPTS, params), gpu.generate(PROMPTS, params)
    scored = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)
    same = 0
    for prompt, one, other in zip(PROMPTS, expected, got, strict=True):
        text = one.outputs[0]
        assert other.outputs[0].error is None
        same += text.token_ids == other.outputs[0].token_ids
        (found,) = gpu.generate([prompt + text.token_ids], scored)
        assert found.prompt_logprobs is not None
        assert text.logprobs is not None
        for on_gpu, on_cpu in zip(found.prompt_logprobs[len(prompt) :], text.logprobs, strict=True):
            assert on_gpu is not None
            assert on_gpu.logprob == pytest.approx(on_cpu.logprob, abs=2e-3)
    assert same >= len(PROMPTS) - 1  # a near tie may turn
    assert gpu.stats().kv.in_use == 0


@pytest.mark.parametrize("family", FAMILIES)
def test_families(tmp_path: Path, family: str) -> None:
    pytest.importorskip("transformers")
    from tests.models.hugging_face import random_model, save

    kind, fields = FAMILIES[family]
    save(random_model(kind, **{**SIZES, **fields}), tmp_path)
    compare(str(tmp_path))


@pytest.mark.parametrize("kind", ["F16", "Q8_0", "Q4_0"])
def test_a_gguf_file(tmp_path: Path, kind: str) -> None:
    """Blocks become dense matrices on the way to the GPU."""
    gguf = pytest.importorskip("gguf")
    pytest.importorskip("transformers")
    from tests.models import gguf_files
    from tests.models.hugging_face import random_model

    model = random_model("llama", **SIZES)
    path = tmp_path / "model.gguf"
    gguf_files.write(path, model, gguf.GGMLQuantizationType[kind])
    compare(str(path))


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_quantisation_is_refused_by_name(tmp_path: Path, quantization: str) -> None:
    path = write_model(tmp_path)
    with pytest.raises(ValueError, match=f"quantization '{quantization}'.*quantization 'none'"):
        LLM(str(path), device="cuda", random_weights=True, quantization=quantization)


def test_memory_that_is_not_there_says_what_to_lower(tmp_path: Path) -> None:
    path = write_model(tmp_path)
    with pytest.raises(ValueError, match=r"the KV pages did not fit .* num_pages \(2000000000\)"):
        LLM(str(path), device="cuda", random_weights=True, num_pages=2_000_000_000)
