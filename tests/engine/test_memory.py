"""The size of the KV memory follows from what is free, and is said when nothing fits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from rooftile.engine import memory
from rooftile.engine.llm import LLM
from rooftile.engine.params import SamplingParams
from rooftile.kvcache.spec import KVGroup
from rooftile.planning import memory as planned
from rooftile.types import KVSpec

SPEC = KVSpec(heads=2, k_dim=8, v_dim=4, dtype=torch.float32)  # 96 bytes a token
GROUPS = (KVGroup(SPEC, (0, 1, 2)), KVGroup(SPEC, (3,)))  # 384 bytes a token in all


def test_pages_are_what_memory_holds() -> None:
    page_bytes = 16 * 384
    ample = [10**6] * 2
    assert memory.pages_that_fit(GROUPS, 16, 10 * page_bytes + 1, ample) == [10, 10]
    assert memory.pages_that_fit(GROUPS, 16, 10 * page_bytes - 1, ample) == [9, 9]
    # No more than can ever be used.
    assert memory.pages_that_fit(GROUPS, 16, 10**9, [3, 3]) == [3, 3]
    with pytest.raises(ValueError, match=r"a KV page takes 6144 bytes and only 6000 may be used"):
        memory.pages_that_fit(GROUPS, 16, 6000, ample)


@given(
    limits=st.lists(st.integers(1, 30), min_size=1, max_size=4),
    layers=st.lists(st.integers(1, 3), min_size=4, max_size=4),
    spare=st.integers(0, 5000),
)
def test_what_a_window_does_not_need_goes_to_the_other_groups(
    limits: list[int], layers: list[int], spare: int
) -> None:
    groups = [KVGroup(SPEC, tuple(range(count))) for count, _ in zip(layers, limits, strict=False)]
    sizes = [2 * group.bytes_per_token for group in groups]
    pages = memory.pages_that_fit(groups, 2, sum(sizes) + spare, limits)
    level = max(pages)
    assert pages == [min(level, limit) for limit in limits]
    assert level >= 1

    def taken(level: int) -> int:
        return sum(size * min(level, most) for size, most in zip(sizes, limits, strict=True))

    assert taken(level) <= sum(sizes) + spare
    assert level == max(limits) or taken(level + 1) > sum(sizes) + spare


def test_a_window_group_needs_the_window_and_a_step_for_each_sequence() -> None:
    demand = memory.Demand(page_size=16, max_num_seqs=4, max_model_len=4096, max_step_tokens=512)
    assert demand.pages([None, 127, 4000]) == [4 * 256, 4 * (40 + 2), 4 * 256]
    # Full groups always count; window groups only if they could end a sequence.
    assert demand.tokens_kept([None, 127], [100, 42]) == 1600
    assert demand.tokens_kept([None, 127], [100, 41]) == 41 * 16
    assert demand.tokens_kept([127, 4000], [42, 256]) == 4096
    assert demand.tokens_kept([127, 4000], [42, 255]) == 255 * 16


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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_pages": 10**12}, r"num_pages 1000000000000 .* needs \d+ bytes .*; lower num_pages"),
        ({"num_pages": 10**30}, r"num_pages 10+ .* needs \d+ bytes .*; lower num_pages"),
        ({"max_num_seqs": 10**12}, r"max_num_seqs 10+,.* needs \d+ bytes .*; lower max_num_seqs"),
        ({"max_num_seqs": 10**30, "num_pages": None}, r"needs \d+ bytes .*; lower max_num_seqs"),
    ],
)
def test_more_than_the_machine_has_is_refused_with_the_bytes(
    make_llm: Callable[..., LLM], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        make_llm(**options)


def test_budgets_take_no_memory(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm(max_num_batched_tokens=10**30)
    assert llm.generate([[1, 2]], SamplingParams(max_tokens=1))[0].finished


def test_what_a_container_allows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planned, "CGROUP", tmp_path)
    machine = planned.total_bytes()
    (tmp_path / "memory.max").write_text("max\n")
    assert planned.total_bytes() == machine > 2**28
    (tmp_path / "memory.max").write_text("1000000\n")
    assert planned.total_bytes() == 1000000
    planned.check_memory("all of it", 1000000, "lower it")
    with pytest.raises(
        ValueError, match="more needs 1000001 bytes of memory and there are 1000000; lower it"
    ):
        planned.check_memory("more", 1000001, "lower it")
