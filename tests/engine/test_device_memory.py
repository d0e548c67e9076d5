"""What a GPU's memory is given to, and what is said where it does not suffice; without a GPU."""

from __future__ import annotations

import pytest
import torch

from rooftile.engine import device_memory
from rooftile.engine.config import EngineConfig
from rooftile.engine.llm import LLM

GIB = 1 << 30


@pytest.fixture
def gpu_of_10_gib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (8 * GIB, 10 * GIB))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)


@pytest.mark.usefixtures("gpu_of_10_gib")
def test_pages_get_their_share_unless_steps_need_more() -> None:
    device = torch.device("cpu")
    assert device_memory.kv_bytes(device, 0.5, GIB, 0) == 4 * GIB
    # Two steps' peaks, a reserve, and what sampling takes.
    assert device_memory.kv_bytes(device, 0.9, GIB, 0) == 5.5 * GIB
    assert device_memory.kv_bytes(device, 0.9, GIB, GIB // 30) == pytest.approx(4.5 * GIB, abs=99)
    assert device_memory.kv_bytes(device, 0.9, 5 * GIB, 0) == 0


@pytest.mark.usefixtures("gpu_of_10_gib")
def test_weights_that_do_not_fit_are_refused_before_they_are_read() -> None:
    device_memory.check_weights("m", 8 * GIB)
    with pytest.raises(ValueError, match=r"m takes 9.0 GiB of weights, and of the GPU's 10.0 GiB"):
        device_memory.check_weights("m", 9 * GIB)


@pytest.mark.usefixtures("gpu_of_10_gib")
def test_out_of_memory_says_what_to_lower() -> None:
    config = EngineConfig("m", num_pages=7).resolved("cuda")
    expected = (
        r"a step did not fit into the GPU's memory, of which 8.0 GiB of 10.0 GiB are free; lower "
        r"max_num_batched_tokens \(8192\), max_num_seqs \(256\), num_pages \(7\) or kv_memory_share"
    )
    with pytest.raises(ValueError, match=expected), device_memory.out_of_memory(config, "a step"):
        raise torch.OutOfMemoryError("CUDA out of memory")


def test_defaults_go_by_the_device() -> None:
    chosen = EngineConfig("m", pipeline_depth=1)
    on_gpu, on_cpu = chosen.resolved("cuda"), chosen.resolved("cpu")
    assert (on_gpu.max_num_batched_tokens, on_gpu.kv_memory_share) == (8192, 0.9)
    assert (on_cpu.max_num_batched_tokens, on_cpu.kv_memory_share) == (2048, 0.3)
    assert on_gpu.pipeline_depth == 1
    assert chosen.resolved("cuda").resolved("cuda") == on_gpu


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_cuda_without_a_gpu_is_refused() -> None:
    with pytest.raises(ValueError, match="device is 'cuda', but torch .* sees no GPU"):
        LLM("bench", device="cuda")
