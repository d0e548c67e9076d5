"""The size of the KV memory follows from what is free, and is said when nothing fits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from rooftile.engine import memory
from rooftile.engine.llm import LLM
from rooftile.kvcache.spec import KVGroup
from rooftile.types import KVSpec

SPEC = KVSpec(heads=2, k_dim=8, v_dim=4, dtype=torch.float32)  # 96 bytes a token
GROUPS = (KVGroup(SPEC, (0, 1, 2)), KVGroup(SPEC, (3,)))  # 384 bytes a token in all


def test_pages_are_what_memory_holds() -> None:
    page_bytes = 16 * 384
    assert memory.pages_that_fit(GROUPS, 16, 10 * page_bytes + 1, most_tokens=10**6) == 10
    assert memory.pages_that_fit(GROUPS, 16, 10 * page_bytes - 1, most_tokens=10**6) == 9
    # No more than can ever be used.
    assert memory.pages_that_fit(GROUPS, 16, 10**9, most_tokens=33) == 3
    with pytest.raises(ValueError, match=r"a KV page takes 6144 bytes and only 6000 may be used"):
        memory.pages_that_fit(GROUPS, 16, 6000, most_tokens=100)


def test_free_memory_is_the_smaller_of_system_and_container(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:  4000 kB\nMemAvailable:  3000 kB\n")
    monkeypatch.setattr(memory, "MEMINFO", meminfo)
    monkeypatch.setattr(memory, "CGROUP", tmp_path)
    assert memory.free_memory_bytes() == 3000 * 1024
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("5\n")
    assert memory.free_memory_bytes() == 3000 * 1024
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("400000\n")
    assert memory.free_memory_bytes() == 600000
    (tmp_path / "memory.current").write_text("1400000\n")
    assert memory.free_memory_bytes() == 0


def test_the_share_sizes_the_engine(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm(num_pages=None, max_num_seqs=3, page_size=16)
    assert llm.stats().kv_tokens == 3 * 160
    with pytest.raises(ValueError, match="max_model_len is 161; .* takes 1 to 160 tokens"):
        make_llm(max_model_len=161)
