"""Requests that share a prefix: the same attention as without sharing, read once.

Kernels that follow plans are those of a GPU and of Triton's interpreter: test_triton_paged.py.
"""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rooftile.ops.paged import PAGED_ATTENTION, paged_attention, plan_paged_attention
from rooftile.types import PagedBatch, PrefixGroups
from tests.ops.accuracy import kernels_to_test

PAGE = 16
Group = tuple[int, list[tuple[int, int]]]  # shared pages; queries, and own keys before them
GROUPS = st.lists(
    st.tuples(
        st.integers(0, 9),
        st.lists(st.tuples(st.integers(0, 3), st.integers(0, 70)), min_size=1, max_size=4),
    ),
    min_size=1,
    max_size=4,
)


def make(
    groups: list[Group], seed: int, dtype: torch.dtype = torch.float32, idle: int = 0
) -> tuple[Tensor, Tensor, Tensor, PagedBatch]:
    """Pages with NaN in the slots that nobody uses; `idle` groups without requests."""
    g = torch.Generator().manual_seed(seed)
    rows: list[list[int]] = []
    q_lens, kv_lens, first, lens = [], [], [0], []
    used = []
    pages = iter(torch.randperm(220, generator=g).tolist())
    for shared, members in groups:
        prefix = [next(pages) for _ in range(shared)]
        used += [page * PAGE + j for page in prefix for j in range(PAGE)]
        for q_len, own in members:
            keys = own + q_len
            mine = [next(pages) for _ in range(-(-keys // PAGE))]
            used += [mine[j // PAGE] * PAGE + j % PAGE for j in range(keys)]
            rows.append(prefix + mine)
            q_lens.append(q_len)
            kv_lens.append(shared * PAGE + keys)
        first.append(len(rows))
        lens.append(shared * PAGE)
    table = torch.full((len(rows), max(map(len, rows)) + 1), -7, dtype=torch.int32)
    for i, row in enumerate(rows):
        table[i, : len(row)] = torch.tensor(row, dtype=torch.int32)
    pools = []
    for dim in (16, 16):
        pool = torch.full((220, PAGE, 2, dim), math.nan, dtype=dtype)
        pool.view(-1, 2, dim)[used] = torch.randn(len(used), 2, dim, generator=g).to(dtype)
        pools.append(pool.transpose(1, 2))
    q = torch.randn(sum(q_lens) + 2, 4, 16, generator=g).to(dtype)
    prefix_groups = PrefixGroups(
        torch.tensor(first + [len(rows)] * idle, dtype=torch.int32),
        torch.tensor(lens + [0] * idle, dtype=torch.int32),
        max_len=9 * PAGE,
    )
    batch = PagedBatch(
        torch.tensor([0, *q_lens]).cumsum(0).int(), torch.tensor(kv_lens).int(), table,
        max(q_lens), max(kv_lens), prefix_groups,
    )  # fmt: skip
    return q, *pools, batch


def check(groups: list[Group], idle: int, has_sink: bool, planned: bool, seed: int, kernel: str,
          dtype: torch.dtype = torch.float32, tolerance: float = 2e-5) -> None:  # fmt: skip
    q, k, v, batch = make(groups, seed, dtype, idle)
    sink = torch.randn(4) if has_sink and kernel != "torch" else None
    options = {"sink": sink, "kernel": kernel}
    plan = plan_paged_attention(q, k, v, batch, **options) if planned else None  # type: ignore[arg-type]
    got = paged_attention(q, k, v, batch, plan=plan, return_lse=True, **options)  # type: ignore[arg-type]
    alone = dataclasses.replace(batch, prefix=None)
    expected = paged_attention(q, k, v, alone, return_lse=True, **options)  # type: ignore[arg-type]
    for mine, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("kernel", kernels_to_test(PAGED_ATTENTION))
@given(
    groups=GROUPS, idle=st.integers(0, 2), has_sink=st.booleans(), planned=st.booleans(),
    seed=st.integers(0, 2**31),
)  # fmt: skip
def test_equals_attention_without_sharing(
    kernel: str, groups: list[Group], idle: int, has_sink: bool, planned: bool, seed: int
) -> None:
    check(groups, idle, has_sink, planned, seed, kernel)


def test_compiled_calls_share_by_a_plan_that_was_made_outside() -> None:
    q, k, v, batch = make([(5, [(1, 3)] * 4)], 1)
    compiled = torch.compile(paged_attention, fullgraph=True, backend="aot_eager")
    alone = dataclasses.replace(batch, prefix=None)
    plan, expected = plan_paged_attention(q, k, v, batch), paged_attention(q, k, v, alone)
    torch.testing.assert_close(compiled(q, k, v, alone), expected)
    torch.testing.assert_close(compiled(q, k, v, batch), expected)
    torch.testing.assert_close(compiled(q, k, v, batch, plan=plan), expected)
    planned = torch.compile(plan_paged_attention, fullgraph=True, backend="aot_eager")
    with pytest.raises(RuntimeError, match="plans are made outside of torch.compile"):
        planned(q, k, v, batch)


def test_refusals_name_the_value_and_the_remedy() -> None:
    q, k, v, batch = make([(3, [(1, 3), (2, 5)]), (1, [(1, 1)])], 2)
    assert batch.prefix is not None
    other = batch.page_table.clone()
    other[1, 2] = other[2, 0]
    for message, change in (
        (r"prefix.lens\[0\] is 10; it must be whole pages of 16", {"lens": torch.tensor([10, 16])}),
        (
            r"prefix.lens\[0\] is 64;.*before every member's queries, 51",
            {"lens": torch.tensor([64, 16])},
        ),
        (r"prefix.lens\[0\] is 48;.*at most max_len = 32", {"max_len": 32}),
        (r"prefix.first is \[0, 2, 2\]; it must go up", {"first": torch.tensor([0, 2, 2])}),
        (r"prefix.lens has shape \[1\]", {"lens": torch.tensor([4])}),
        (r"prefix.first has dtype torch.float32", {"first": torch.tensor([0.0, 2.0, 3.0])}),
        (r"prefix.lens is \[48, 16\]; it must be a tensor", {"lens": [48, 16]}),
        (r"prefix.max_len is 12.0; it must be an int", {"max_len": 12.0}),
    ):
        groups = dataclasses.replace(batch.prefix, **change)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=message):
            paged_attention(q, k, v, dataclasses.replace(batch, prefix=groups))
    with pytest.raises(
        ValueError, match="request 1 does not begin with the same 3 pages as request 0"
    ):
        paged_attention(q, k, v, dataclasses.replace(batch, page_table=other))
