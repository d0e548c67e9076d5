"""A thousand requests leave nothing behind."""

from __future__ import annotations

import gc
import os
from collections import Counter
from pathlib import Path

import pytest

from rooftile import LLM, SamplingParams
from rooftile.kernels.cpu.arena import trim
from tests.engine.conftest import write_model


def resident() -> int:
    """Bytes in use. What the C library keeps for later, more or less by what ran before, is not."""
    gc.collect()
    trim()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def objects() -> Counter[str]:
    gc.collect()
    kinds = (type(x) for x in gc.get_objects())
    return Counter(k.__name__ for k in kinds if str(k.__module__).startswith(("rooftile", "torch")))


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="no /proc")
@pytest.mark.parametrize("quantization", ["none", "int4"])
def test_memory_is_flat_over_a_thousand_requests(tmp_path: Path, quantization: str) -> None:
    # A shape that the native step takes.
    path = write_model(tmp_path, intermediate_size=96)
    llm = LLM(path, random_weights=True, quantization=quantization, num_pages=200, max_num_seqs=50)

    def run(requests: int, seed: int) -> None:
        for start in range(0, requests, 50):
            prompts = [
                [(seed + i * 7 + j) % 250 for j in range(3 + i % 40)]
                for i in range(start, start + 50)
            ]
            params = [
                SamplingParams(
                    max_tokens=1 + i % 6, temperature=i % 2, top_k=i % 5, seed=i, ignore_eos=True
                )
                for i in range(50)
            ]
            assert len(llm.generate(prompts, params)) == 50

    run(200, seed=0)  # buffers, pages and the allocator's reserves get their size
    before, kinds = resident(), objects()
    run(1000, seed=1)
    grown = objects() - kinds
    assert resident() - before < 4 << 20
    assert sum(grown.values()) < 300, grown  # the prefix tree may hold other pages than before
    assert llm.stats().kv.in_use == 0
