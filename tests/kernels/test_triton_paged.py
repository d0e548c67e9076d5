"""Paged attention, appending and merging in Triton's interpreter on a CPU, against the oracle.

TRITON_INTERPRET=1 python -m pytest tests/kernels/test_triton_paged.py
"""

from __future__ import annotations

import dataclasses
import math
import os
import unittest.mock
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rooftile.ops.append import append_kv
from rooftile.ops.attention import attention_varlen
from rooftile.ops.merge import merge_attention_states
from rooftile.ops.paged import paged_attention, plan_paged_attention
from rooftile.planning.split_kv import Item, Layout
from rooftile.types import PagedBatch
from tests.ops import attention_oracle as oracle
from tests.ops import test_shared_prefix as prefixes
from tests.ops.test_paged import GARBAGE, check, fill, pool

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1, in a process of its own", allow_module_level=True)
pytest.importorskip("triton", reason="Triton is not installed")

from rooftile.kernels.triton import attention as attention_kernel
from rooftile.kernels.triton import paged as kernel
from rooftile.kernels.triton import ragged_pages

# A program takes 32 keys at a time and 5 programs share the work: 150 keys are split.
LENGTHS = st.tuples(
    st.sampled_from([0, 1, 1, 1, 2, 5, 20]), st.sampled_from([0, 1, 5, 31, 64, 150])
)
DTYPES = st.sampled_from([torch.float16, torch.float32])


@settings(max_examples=20)
@given(
    lengths=st.lists(LENGTHS, max_size=3),
    padding=st.integers(0, 2),
    heads=st.sampled_from([(1, 1), (4, 2), (5, 1)]),
    dims=st.sampled_from([(64, 64), (5, 3), (24, 40), (80, 16)]),
    page_size=st.sampled_from([1, 4, 16, 64]),
    dtype=DTYPES,
    causal=st.booleans(),
    window=oracle.WINDOWS,
    softcap=oracle.SOFTCAPS,
    sink_kind=oracle.SINKS,
    garbage=GARBAGE,
    apart=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_equals_the_oracle(
    lengths: list[tuple[int, int]],
    padding: int,
    heads: tuple[int, int],
    dims: tuple[int, int],
    page_size: int,
    dtype: torch.dtype,
    causal: bool,
    window: tuple[int | None, int | None] | None,
    softcap: float,
    sink_kind: float | None,
    garbage: int,
    apart: bool,
    seed: int,
) -> None:
    g = torch.Generator().manual_seed(seed)
    left = None if window is None else window[0]
    paged = fill(
        g, lengths, heads, dims, page_size, dtype,
        padding=padding, garbage=garbage, left=left, apart=apart,
    )  # fmt: skip
    sink = oracle.sink_of(g, heads[0], sink_kind)
    check(paged, dtype, "triton", causal=causal, window=window, softcap=softcap, sink=sink)


def test_a_plan_serves_many_calls_and_a_request_alone_has_the_same_bits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kernel, "PIECE_TOKENS", 64)
    g = torch.Generator().manual_seed(0)
    lengths = [(1, 300), (3, 70), (1, 33)]
    paged = fill(g, lengths, (2, 1), (16, 16), 16, torch.float32)
    arguments = (paged.q, paged.k_pages, paged.v_pages, paged.batch)
    plan = plan_paged_attention(*arguments, kernel="triton", batch_invariant=True)
    together = paged_attention(*arguments, plan=plan)
    assert torch.equal(together, paged_attention(*arguments, plan=plan))  # type: ignore[arg-type]
    assert plan.split is not None
    assert plan.split.piece == 2
    free = paged_attention(*arguments, kernel="triton")
    torch.testing.assert_close(together, free, rtol=1e-5, atol=1e-5)
    ends = [0, 1, 4, 5]
    for i, (q_len, kv_len) in enumerate(lengths):
        b = paged.batch
        cu = torch.tensor([0, q_len], dtype=torch.int32)
        one = PagedBatch(cu, b.kv_lens[i : i + 1], b.page_table[i : i + 1], q_len, kv_len)
        alone = paged_attention(
            paged.q[ends[i] : ends[i + 1]],
            *arguments[1:3],
            one,
            kernel="triton",
            batch_invariant=True,
        )
        assert torch.equal(alone, together[ends[i] : ends[i + 1]])  # type: ignore[arg-type,index]


def test_latent_values_are_the_first_dims_of_the_keys() -> None:
    g = torch.Generator().manual_seed(1)
    pages = torch.randn(12, 1, 16, 80, generator=g)
    table = torch.randperm(12, generator=g).int().view(2, 6)
    cu, lens = torch.tensor([0, 1, 3]).int(), torch.tensor([90, 37]).int()
    q = torch.randn(3, 4, 80, generator=g)
    batch = PagedBatch(cu, lens, table, 2, 90)
    for v_dim in (64, 40):
        arguments = (q, pages, pages[..., :v_dim], batch)
        got = paged_attention(*arguments, kernel="triton")
        expected = paged_attention(*arguments, kernel="reference")
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


@settings(max_examples=10)
@given(
    tokens=st.integers(0, 9),
    heads=st.integers(1, 3),
    dims=st.tuples(st.integers(2, 9), st.integers(1, 9)),
    page_size=st.sampled_from([1, 4, 16]),
    dtype=DTYPES,
    rotated=st.sampled_from([None, False, True]),
    apart=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_append_writes_what_the_reference_writes(
    tokens: int,
    heads: int,
    dims: tuple[int, int],
    page_size: int,
    dtype: torch.dtype,
    rotated: bool | None,
    apart: bool,
    seed: int,
) -> None:
    g = torch.Generator().manual_seed(seed)
    k, v = (oracle.draw(g, dtype, tokens, heads, dim, strided=apart) for dim in dims)
    slots = torch.randperm(40 * page_size, generator=g)[:tokens]
    slots[torch.rand(tokens, generator=g) < 0.3] = -1
    k[slots < 0], v[slots < 0] = math.nan, math.inf
    options: dict[str, Any] = {}
    if rotated is not None:
        positions = torch.randint(0, 50, (tokens,), generator=g)
        positions[slots < 0] = -5
        cos_sin = torch.randn(50, 2, max(1, (dims[0] - 1) // 2), generator=g)
        options = {"positions": positions, "cos_sin": cos_sin, "interleaved": rotated}
    pools = {}
    for family in ("triton", "reference"):
        pools[family] = pool(heads, page_size, *dims, dtype)
        append_kv(k, v, *pools[family], slots, **options, kernel=family)
    unit = torch.finfo(dtype).eps
    for got, expected in zip(pools["triton"], pools["reference"], strict=True):
        torch.testing.assert_close(got, expected, rtol=2 * unit, atol=8 * unit, equal_nan=True)


def test_merging_many_parts() -> None:
    g = torch.Generator().manual_seed(2)
    for n in (0, 1, 40):
        outs, lses = torch.randn(n, 2, 3, 20, generator=g), torch.randn(n, 2, 3, generator=g) * 4
        lses[:, 1, 0] = -math.inf
        outs[:, 1, 0] = math.nan
        got = merge_attention_states(outs, lses, kernel="triton")
        expected = merge_attention_states(outs, lses, kernel="reference")
        for mine, theirs in zip(got, expected, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


def test_nan_among_the_keys_that_are_seen_comes_out_of_every_part() -> None:
    """Where a plan cuts a request, none of its parts may pass for one that saw nothing."""
    k_pages, v_pages = torch.randn(2, 80, 1, 16, 16)
    table = torch.arange(80, dtype=torch.int32)[None]
    batch = PagedBatch(torch.tensor([0, 1]), torch.tensor([1280]), table, 1, 1280)
    q = torch.randn(1, 2, 16)
    plan = plan_paged_attention(q, k_pages, v_pages, batch, kernel="triton")
    assert int(plan.buffer[0]) == 1  # a merge
    for page in (5, 79):
        broken = k_pages.clone()
        broken[page, 0, 3, 2] = math.nan
        got = paged_attention(q, broken, v_pages, batch, return_lse=True, plan=plan)
        assert all(bool(x.isnan().all()) for x in got)


def test_a_plan_of_other_lengths_is_refused() -> None:
    lengths = [(1, 700), (1, 90), (2, 40)]
    before = fill(torch.Generator().manual_seed(3), lengths, (2, 1), (16, 16), 16, torch.float32)
    after = fill(
        torch.Generator().manual_seed(3), lengths[::-1], (2, 1), (16, 16), 16, torch.float32
    )
    tensors = (before.q, before.k_pages, before.v_pages, before.batch)
    plan = plan_paged_attention(*tensors, kernel="triton")
    paged_attention(*tensors, plan=plan)
    stale = dataclasses.replace(plan, buffer=plan.buffer[:-1])
    for batch, old in ((after.batch, plan), (before.batch, stale)):
        pages = (after if batch is after.batch else before).k_pages
        with pytest.raises(ValueError, match="for other lengths.*plan_paged_attention again"):
            paged_attention(before.q, pages, pages, batch, plan=old)


def test_what_the_kernel_refuses() -> None:
    paged = fill(torch.Generator(), [(1, 9)], (1, 1), (8, 8), 4, torch.bfloat16)
    arguments = (paged.q, paged.k_pages, paged.v_pages, paged.batch)
    with pytest.raises(NotImplementedError, match="interpreter takes float16 and float32"):
        paged_attention(*arguments, kernel="triton")
    wide = dataclasses.replace(paged, q=torch.randn(1, 1, 600))
    pages = torch.randn(9, 1, 4, 600)
    with pytest.raises(
        NotImplementedError, match="dims are 600 and 600; it takes up to 576 and 512"
    ):
        paged_attention(wide.q, pages, pages, paged.batch, kernel="triton")


@settings(max_examples=10)
@given(
    groups=prefixes.GROUPS, idle=st.integers(0, 2), has_sink=st.booleans(), planned=st.booleans(),
    least=st.sampled_from([0, 0, 100]), dtype=DTYPES, seed=st.integers(0, 2**31),
)  # fmt: skip
def test_shared_prefixes_change_nothing(
    groups: list[prefixes.Group],
    idle: int,
    has_sink: bool,
    planned: bool,
    least: int,
    dtype: torch.dtype,
    seed: int,
) -> None:
    tolerance = 2e-5 if dtype == torch.float32 else 2e-3
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel, "LEAST_SAVED", least)
        prefixes.check(groups, idle, has_sink, planned, seed, "triton", dtype, tolerance)


def test_shared_keys_are_read_once_and_only_where_it_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v, batch = prefixes.make([(5, [(1, 3)] * 4), (2, [(1, 6)]), (2, [(1, 2)] * 2)], 0)

    def read(least: int) -> dict[int, int]:
        """KV tiles of 32 keys that each request's pages give, for each of 2 kv heads."""
        monkeypatch.setattr(kernel, "LEAST_SAVED", least)
        plan = plan_paged_attention(q, k, v, batch, kernel="triton")
        assert plan.split is not None
        assert plan.split.groups == 3
        layout, words = Layout(plan.split), plan.buffer.tolist()
        tiles: dict[int, int] = {}
        for cta in range(plan.split.num_ctas):
            first, count = words[layout.ctas + 2 * cta :][:2]
            for index in range(first, first + count):
                item = Item(*words[layout.items + 12 * index :][:12])
                tiles[item.request] = tiles.get(item.request, 0) + item.kv_end - item.kv_begin
        return {request: n // 2 for request, n in tiles.items()}

    assert read(1000) == {0: 3, 1: 3, 2: 3, 3: 3, 4: 2, 5: 2, 6: 2}
    assert read(100) == {0: 3, 1: 1, 2: 1, 3: 1, 4: 2, 5: 2, 6: 2}
    assert read(0) == {0: 3, 1: 1, 2: 1, 3: 1, 4: 2, 5: 2, 6: 1}


@settings(max_examples=8)
@given(
    lengths=st.lists(
        st.tuples(st.integers(0, 5), st.sampled_from([0, 1, 127, 128, 129, 600, 700])),
        min_size=1,
        max_size=4,
    ),
    heads=st.sampled_from([(1, 1), (4, 2), (5, 1)]),
    causal=st.booleans(),
    window=oracle.WINDOWS,
    softcap=oracle.SOFTCAPS,
    has_sink=st.booleans(),
    padding=st.integers(0, 2),
    dtype=DTYPES,
    seed=st.integers(0, 2**32),
)
def test_short_ragged_queries_over_long_keys_follow_a_plan(
    lengths: list[tuple[int, int]],
    heads: tuple[int, int],
    causal: bool,
    window: tuple[int | None, int | None] | None,
    softcap: float,
    has_sink: bool,
    padding: int,
    dtype: torch.dtype,
    seed: int,
) -> None:
    """Against the reference; keys that belong to no sequence are NaN."""
    g = torch.Generator().manual_seed(seed)
    lengths = [*lengths, (1, 530)]
    q_lens, kv_lens = zip(*lengths, strict=True)
    q = torch.randn(sum(q_lens) + padding, heads[0], 24, generator=g).to(dtype)
    k, v = torch.randn(2, sum(kv_lens) + 9, heads[1], 24, generator=g).to(dtype)
    k[-9:], v[-9:] = math.nan, math.nan
    cu = [torch.tensor([0, *n]).cumsum(0) for n in (q_lens, kv_lens)]
    sink = torch.randn(heads[0], generator=g) if has_sink else None
    options: dict[str, Any] = {
        "max_q_len": max(q_lens), "max_kv_len": max(kv_lens), "causal": causal, "window": window,
        "softcap": softcap, "sink": sink, "return_lse": True,
    }  # fmt: skip
    with (
        unittest.mock.patch.object(ragged_pages, "LEAST_TOKENS", 0),
        unittest.mock.patch.object(
            attention_kernel, "paged_attention", wraps=kernel.paged_attention
        ) as planned,
    ):
        got = attention_varlen(q, k, v, *cu, kernel="triton", **options)
    assert planned.call_count == 1
    expected = attention_varlen(q, k, v, *cu, kernel="reference", **options)
    tolerance = 2e-5 if dtype == torch.float32 else 4e-3
    for mine, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance)


def test_what_cannot_share_is_planned_without(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v, batch = prefixes.make([(5, [(1, 3)] * 4)], 1)
    options: list[dict[str, Any]] = [{"window": (6, 0)}, {"batch_invariant": True}]
    for option in options:
        plan = plan_paged_attention(q, k, v, batch, kernel="triton", **option)
        assert plan.split is not None
        assert plan.split.groups == 0
    many = prefixes.make([(5, [(20, 3)] * 4)], 1)
    plan = plan_paged_attention(*many, kernel="triton")  # 40 rows do not fit one tile
    assert plan.split is not None
    assert plan.split.groups == 0
    plan = plan_paged_attention(q, k, v, batch, kernel="triton")
    with pytest.raises(ValueError, match="groups=1.*this call needs .*groups=0"):
        paged_attention(q, k, v, batch, plan=plan, window=(6, 0), kernel="triton")
