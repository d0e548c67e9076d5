"""Prefixes that running sequences share: found in each step of decodes, and said truly."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rooftile.engine import device_runner, scheduled_step
from rooftile.engine.beginnings import common_length
from rooftile.engine.device_runner import DeviceRunner
from rooftile.engine.llm import LLM
from rooftile.engine.params import SamplingParams
from rooftile.kvcache.storage import KVStorage
from rooftile.ops.paged_check import check_prefix
from rooftile.ops.prefixes import prefixes_of
from rooftile.types import PagedBatch, PrefixGroups
from tests.engine.padded import use_padded_runner

ONE, OTHER = list(range(30, 50)), list(range(60, 85))


def share_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is shared is to be read once, however little it saves."""
    monkeypatch.setattr(device_runner, "LEAST_SPARED", 0)
    monkeypatch.setattr(device_runner, "LEAST_SPARED_A_REQUEST", 0)
    monkeypatch.setattr(device_runner, "LEAST_SHARING", 2)
    for module in (device_runner, scheduled_step):
        monkeypatch.setattr(module, "LEAST_COMMON", 1)
    monkeypatch.setattr(scheduled_step, "LEAST_SAVED", 1)


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> list[list[tuple[int, int]]]:
    """By step (members, shared keys) of each group, as the GPU's kernel would read them."""
    use_padded_runner(monkeypatch)
    share_everything(monkeypatch)
    steps: list[list[tuple[int, int]]] = []

    def checked(batch: PagedBatch, page_size: int, least: int) -> PrefixGroups:
        prefix = prefixes_of(batch, page_size, least)
        check_prefix("step", batch, prefix, page_size)  # whole pages, before every query
        first, lens = prefix.first.tolist(), prefix.lens.tolist()
        groups = [(end - begin, n) for begin, end, n in zip(first, first[1:], lens, strict=False)]
        for begin, end, length in zip(first, first[1:], lens, strict=False):
            pages = batch.page_table[begin:end, : length // page_size]
            assert bool((pages == pages[:1]).all())
        steps.append([(members, keys) for members, keys in groups if members > 1 and keys])
        return prefix

    monkeypatch.setattr(device_runner, "prefixes_of", checked)
    attach = DeviceRunner.attach

    def sharing(self: DeviceRunner, storage: KVStorage) -> None:
        attach(self, storage)
        self._shared_bytes = 1 << 30  # the CPU's kernels read what they are given in any case

    monkeypatch.setattr(DeviceRunner, "attach", sharing)
    return steps


def make(path: str, num_pages: int = 100) -> LLM:
    return LLM(
        path, device="cpu", dtype="float32", random_weights=True, page_size=4, num_pages=num_pages,
        max_num_seqs=16, pipeline_depth=2,
    )  # fmt: skip


def test_what_is_shared_is_found_although_it_arrives_in_turn(
    model_path: str, found: list[list[tuple[int, int]]]
) -> None:
    llm = make(model_path)
    prompts = [[*(ONE, OTHER)[i % 2], i, i, i] for i in range(6)]
    llm.generate(prompts[:2], SamplingParams(max_tokens=1))  # what is to be shared is cached
    found.clear()
    llm.generate(prompts, SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
    assert [(3, 20), (3, 24)] in [sorted(step) for step in found]


def test_samples_of_a_prompt_share_it(model_path: str, found: list[list[tuple[int, int]]]) -> None:
    llm = make(model_path)
    params = SamplingParams(n=5, seed=1, temperature=1, max_tokens=8, ignore_eos=True)
    llm.generate([[*ONE, 7]], params)
    assert [(5, 20)] in found


@pytest.mark.parametrize("num_pages", [100, 30])
def test_texts_are_the_same(
    model_path: str, found: list[list[tuple[int, int]]], num_pages: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Whatever order sequences run in; with few pages some are preempted and come again."""
    prompts = [[*(ONE, OTHER)[i % 2], *([i] * (i % 3))] for i in range(8)]
    params = [
        SamplingParams(seed=i, temperature=0.8, max_tokens=10 + i, n=1 + i % 3, ignore_eos=True)
        for i in range(8)
    ]

    def texts(llm: LLM) -> list[list[int]]:
        got = [llm.generate(prompts, params) for _ in range(2)]
        assert llm.stats().kv.in_use == 0
        return [c.token_ids for outputs in got for output in outputs for c in output.outputs]

    shared = texts(make(model_path, num_pages))
    assert any(found)
    monkeypatch.setattr(device_runner, "LEAST_SPARED", 1 << 60)
    assert shared == texts(make(model_path))


def test_nothing_is_looked_for_where_nothing_is_shared(
    model_path: str, found: list[list[tuple[int, int]]]
) -> None:
    llm = make(model_path)
    found.clear()  # warming up ran the shapes that share
    llm.generate([[1] * 9, [2] * 9], SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
    assert found == []


@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=12),
    common=st.lists(st.integers(0, 10), min_size=12, max_size=12),
)
def test_what_is_spared_is_what_the_device_will_find(lengths: list[int], common: list[int]) -> None:
    """Each request begins with some of the pages of the one before, and one query."""
    page_size, fresh = 4, itertools.count()
    tables: list[list[int]] = []
    for length, shared in zip(lengths, common, strict=False):
        pages = -(-length // page_size)
        kept = tables[-1][: min(shared, pages)] if tables else []
        tables.append([*kept, *(next(fresh) for _ in range(pages - len(kept)))])
    table = torch.full((len(tables), 10), -1, dtype=torch.int32)
    for row, pages_of in enumerate(tables):
        table[row, : len(pages_of)] = torch.tensor(pages_of, dtype=torch.int32)
    starts, kv_lens = (
        torch.tensor(x, dtype=torch.int32) for x in (range(len(tables) + 1), lengths)
    )
    batch = PagedBatch(starts, kv_lens, table, max_q_len=1, max_kv_len=40)
    prefix = prefixes_of(batch, page_size, 4)
    members = prefix.first.diff().clamp(min=1) - 1

    keys = [0]
    for i, (one, other) in enumerate(itertools.pairwise(tables)):
        whole = (min(lengths[i : i + 2]) - 1) // page_size
        keys.append(common_length(one, other, whole) * page_size)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scheduled_step, "LEAST_COMMON", 4)
        patch.setattr(scheduled_step, "LEAST_SAVED", 1)
        assert scheduled_step._spared(keys) == int((members * prefix.lens).sum())
