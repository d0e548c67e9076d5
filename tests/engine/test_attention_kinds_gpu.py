"""Models with dual chunk and with differential attention on a GPU, against the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rooftile.engine.llm import LLM
from rooftile.engine.params import SamplingParams
from tests.engine.conftest import write_model
from tests.engine.test_gpu import copy_weights

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
WIDE = {
    "hidden_size": 256,
    "head_dim": 64,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 256,
    "max_position_embeddings": 2048,
}
# Chunks of 128 tokens: whole tiles of Hopper's kernel, and many of them in a prompt.
CHUNKS = "chunk_size=160,local_size=32,original=96"
DIFFLLAMA = {"architectures": ["DiffLlamaForCausalLM"], "model_type": "diffllama"}
SCALE = 6
TOLERANCE = 0.016  # twice what bfloat16 costs on the CPU; a wrong chunk length costs 0.12
KINDS = ("dual chunk", "differential")
WHOLE = f"{CHUNKS},length_factor=prompt"


def prompts() -> list[list[int]]:
    """At chunks' borders and about them, some alike, one of many chunks."""
    generator = torch.Generator().manual_seed(3)
    text = torch.randint(0, 250, (700,), generator=generator).tolist()
    return [text[:n] for n in (5, 127, 128, 129, 257, 390, 700)] + [[*text[:200], 1, 2], [9] * 33]


def let_attention_matter(llm: LLM) -> None:
    """Random weights are so small that it attends to everything alike."""
    with torch.inference_mode():
        for layer in llm._core._runner._decoder.layers:
            for linear in (layer.attention.qkv, layer.attention.out):
                linear.weight.tensors["weight"].mul_(SCALE)


def pair(
    kind: str, directory: Path, monkeypatch: pytest.MonkeyPatch, **options: Any
) -> tuple[LLM, LLM]:
    """The same model on both; the CPU's in float32, operator by operator, with dense weights."""
    from rooftile.models import native, packing

    monkeypatch.setattr(native, "refusal", lambda decoder: "compared operator by operator")
    monkeypatch.setattr(packing, "best_format", lambda device, dtype: "dense")
    path = str(write_model(directory, **WIDE, **(DIFFLLAMA if kind == "differential" else {})))
    given: dict[str, Any] = {"random_weights": True, "page_size": 16, "num_pages": 400}
    given["dual_chunk"] = {"dual chunk": CHUNKS, "whole prompts": WHOLE}.get(kind)
    cpu = LLM(path, device="cpu", dtype="float32", **given)
    gpu = LLM(path, device="cuda", **{**given, **options})
    let_attention_matter(cpu)
    copy_weights(cpu, gpu)
    return cpu, gpu


@pytest.mark.parametrize("kind", [*KINDS, "whole prompts"])
@pytest.mark.parametrize(
    "options",
    [
        {"max_num_batched_tokens": 300, "max_num_seqs": 16},
        {"cuda_graphs": False, "pipeline_depth": 1},
        {"num_pages": 60, "max_num_batched_tokens": 96, "max_num_seqs": 8},  # preempts
    ],
    ids=str,
)
def test_tokens_equal_the_cpus(
    kind: str, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """float32, greedy: chunked prompts beside decoding requests, then all on cached prefixes."""
    cpu, gpu = pair(kind, tmp_path, monkeypatch, dtype="float32", **options)
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    expected = [output.outputs[0].token_ids for output in cpu.generate(prompts(), params)]
    for _ in range(2):
        outputs = gpu.generate(prompts(), params)
        assert [output.outputs[0].error for output in outputs] == [None] * len(outputs)
        same = [
            output.outputs[0].token_ids == e for output, e in zip(outputs, expected, strict=True)
        ]
        # float32 rounds differently there, which may turn a near tie and what follows it.
        assert sum(same) >= len(same) - 1
        assert gpu.stats().kv.in_use == 0
    assert (gpu.stats().kv.prefix_hit_tokens > 0) == (kind != "whole prompts")


@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16_gives_the_same_probabilities(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On Hopper's own kernels, by captured graphs but for what scores prompts."""
    options: dict[str, Any] = {"max_num_batched_tokens": 256, "max_num_seqs": 16}
    cpu, gpu = pair(kind, tmp_path, monkeypatch, dtype="bfloat16", **options)
    score = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    texts = [
        output.prompt_token_ids + output.outputs[0].token_ids
        for output in gpu.generate(prompts(), params)
    ]
    entries: list[list[Any]] = [
        [entry for output in llm.generate(texts, score) for entry in output.prompt_logprobs[1:]]
        for llm in (cpu, gpu)
    ]
    exact, got = (torch.tensor([entry.logprob for entry in found]) for found in entries)
    assert float((got - exact).square().mean().sqrt()) < TOLERANCE
    # What was drawn step by step, through graphs, is as likely as anything on the CPU.
    end = 0
    for text in texts:
        end += len(text) - 1
        for entry in entries[0][end - 40 : end]:
            assert entry.top[0][1] - entry.logprob < 6 * TOLERANCE


def test_beside_an_ordinary_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one process, by turns, each on its own graphs."""
    cpu, gpu = pair("dual chunk", tmp_path, monkeypatch, dtype="float32", max_num_seqs=8)
    plain = LLM(str(tmp_path), device="cuda", dtype="float32", random_weights=True, num_pages=200)
    short = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    alone = plain.generate([prompts()[1]], short)[0].outputs[0].token_ids
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    tokens: list[int] = []
    for output in gpu.stream(prompts()[-4], params):
        tokens = output.outputs[0].token_ids
        assert plain.generate([prompts()[1]], short)[0].outputs[0].token_ids == alone
    assert tokens == cpu.generate([prompts()[-4]], params)[0].outputs[0].token_ids
