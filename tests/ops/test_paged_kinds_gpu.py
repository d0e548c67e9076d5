"""Calls of one kind on a GPU: whose tensors they are, how these lie, and what a plan says."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from rooftile.ops.paged import paged_attention, plan_paged_attention
from rooftile.types import PagedBatch
from tests.ops.test_paged_gpu import FAMILIES, Case, Shape, assert_close, make

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
PAGES = 60


def of_one_kind(lengths: list[tuple[int, int]], seed: int, heads: tuple[int, int] = (8, 2)) -> Case:
    """Random tensors whose shapes depend on the number of requests and queries alone."""
    torch.manual_seed(seed)
    tokens = sum(q_len for q_len, _ in lengths)
    q = torch.randn(tokens, heads[0], 128, device="cuda").bfloat16()
    k_pages, v_pages = torch.randn(2, PAGES, heads[1], 16, 128, device="cuda").bfloat16()
    table = torch.stack([torch.randperm(PAGES)[:40] for _ in lengths]).int().cuda()
    cu = torch.tensor([0, *(q_len for q_len, _ in lengths)]).cumsum(0).int().cuda()
    kv_lens = torch.tensor([kv_len for _, kv_len in lengths]).int().cuda()
    return Case(q, k_pages, v_pages, PagedBatch(cu, kv_lens, table, 300, 640), {})


def misaligned(x: Tensor) -> Tensor:
    """The same where no tensor map can begin."""
    return torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)


def is_right(case: Case, got: tuple[Tensor, Tensor]) -> None:
    assert_close(got, case.run("reference", torch.float64), case.run("reference"))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("planned", [False, True])
def test_calls_of_one_kind_have_their_own_tensors(family: str, planned: bool) -> None:
    lengths = [[(5, 300), (1, 640)], [(1, 1), (5, 77)], [(3, 3), (3, 500)], [(6, 640), (0, 9)]]
    for seed, of_batch in enumerate(lengths):
        case = of_one_kind(of_batch, seed)
        if seed == 2:
            case.q = misaligned(case.q)
        if seed == 3:
            case.v_pages = misaligned(case.v_pages)
        arguments = (case.q, case.k_pages, case.v_pages, case.batch)
        plan = plan_paged_attention(*arguments, kernel=family) if planned else None
        for _ in range(2):
            is_right(case, case.run(family, plan=plan))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_known_kind_in_graphs_and_on_streams(family: str) -> None:
    case = of_one_kind([(5, 300), (1, 640)], 0)
    case.run(family)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        case.q.normal_()
        got = case.run(family)
    side.synchronize()
    is_right(case, got)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = case.run(family)
    case.batch.kv_lens.copy_(torch.tensor([17, 401]))
    case.batch.page_table.copy_(case.batch.page_table.flip(1))
    graph.replay()
    is_right(case, got)


@pytest.mark.parametrize("family", FAMILIES)
def test_page_tables_that_lie_elsewhere(family: str) -> None:
    case = of_one_kind([(5, 300), (1, 640)], 0)
    table = case.batch.page_table
    wide = torch.full((2, 100), 2**30, device="cuda", dtype=torch.int64)
    wide[:, :40] = table
    apart = torch.full((2, 80), 2**30, device="cuda", dtype=torch.int32)
    apart[:, ::2] = table
    tables = [table.long(), wide[:, :40], wide.int()[:, :40], table.T.contiguous().T, apart[:, ::2]]
    for table in tables:
        case.batch = dataclasses.replace(case.batch, page_table=table)
        for _ in range(2):  # the second one goes straight to a kernel
            is_right(case, case.run(family))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("longest", [200, 4])
@pytest.mark.parametrize("shape", [Shape(), Shape(dims=(64, 64))], ids=str)
def test_a_plan_brings_its_own_choice(family: str, longest: int, shape: Shape) -> None:
    """Fixed pieces, whatever tiles the call without a plan would have."""
    case = make(shape, [(longest, 260), (1, 90), (1, 900)], 0)
    arguments = (case.q, case.k_pages, case.v_pages, case.batch)
    case.batch = dataclasses.replace(case.batch, max_q_len=longest, max_kv_len=900)
    arguments = (case.q, case.k_pages, case.v_pages, case.batch)
    plan = plan_paged_attention(*arguments, batch_invariant=True, kernel=family)
    fixed = case.run(family, batch_invariant=True)
    for _ in range(2):
        got = case.run(family, plan=plan)
        is_right(case, got)
        assert all(torch.equal(x, y) for x, y in zip(got, fixed, strict=True))
    out = paged_attention(*arguments, plan=plan)
    assert torch.equal(out, got[0])  # type: ignore[arg-type]
