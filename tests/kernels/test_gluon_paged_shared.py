"""Shared prefixes by the Hopper kernel in the simulator, its parts merged here, against float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from rooftile.kernels.reference.paged import paged_attention as reference
from rooftile.kernels.triton import merge
from rooftile.ops.attention import AttentionCall
from rooftile.planning.split_kv import Layout, Shared, plan
from rooftile.types import SplitSpec
from tests.kernels.test_gluon_attention import assert_close
from tests.kernels.test_gluon_paged import KERNEL, Batch
from tests.support.gluon_sim import simulation

PAGE, TILE = 16, 64


@pytest.fixture(autouse=True)
def few_multiprocessors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KERNEL, "_ctas", lambda device: 4)
    monkeypatch.setattr(KERNEL, "say_policies", lambda: True)
    monkeypatch.setattr(merge, "merge_shared", merged)


def merged(
    words: Tensor, spec: SplitSpec, parts: Tensor, part_lse: Tensor, sink: Tensor | None,
    out: Tensor, lse: Tensor, planned: bool,
) -> None:  # fmt: skip
    """kernels/triton/merge.py: merge_shared, in words of torch."""
    at = Layout(spec).merges
    size = len(Shared._fields)
    strips = [Shared(*words[at + i * size :][:size].tolist()) for i in range(int(words[3]))]
    for strip in strips[: int(words[4])]:
        for row in range(strip.rows if strip.parts else 0):
            rows = [strip.partial_row + row + i * spec.tile_rows[-1] for i in range(strip.parts)]
            if strip.prefix >= 0:
                below = strip.group_row + row
                of_group = strips[strip.prefix + below // strip.tile_rows]
                first = of_group.partial_row + below % strip.tile_rows
                rows += [first + i * spec.tile_rows[-1] for i in range(of_group.parts)]
            token, head = divmod(row, spec.group_size)
            token, head = strip.q_begin + token, strip.kv_head * spec.group_size + head
            logs = part_lse[rows].double()
            if sink is not None:
                logs = torch.cat([logs, sink[head : head + 1].double()])
            lse[token, head] = logs.logsumexp(0)
            weights = (logs - logs.logsumexp(0)).exp()[: len(rows)].nan_to_num(0.0)
            values = torch.where(weights[:, None] > 0, parts[rows].double(), 0.0)
            out[token, head] = (weights @ values).to(out.dtype)


def check(
    lengths: list[tuple[int, int]],  # queries and keys of requests
    groups: list[tuple[int, int]],  # members and keys that they share
    heads: tuple[int, int] = (4, 1),
    dim: int = 128,
    dtype: torch.dtype = torch.bfloat16,
    sink: Tensor | None = None,
    rising: bool = False,
    seed: int = 0,
) -> None:
    batch = Batch(lengths, heads, (dim, dim), PAGE, dtype, padding=2, seed=seed)
    first, request = [0], 0
    for members, keys in groups:
        for i in range(request + 1, request + members):
            batch.table[i, : keys // PAGE] = batch.table[request, : keys // PAGE]
        if rising:  # hundreds of natural units above the keys that follow
            for key in range(0, keys - 2 * TILE, 3):
                batch.k_pages[int(batch.table[request, key // PAGE]), :, key % PAGE] *= 60.0
        request += members
        first.append(request)
    call = AttentionCall(
        "cpu", dtype, *heads, dim, dim, -1, 0, has_softcap=False, has_sink=sink is not None,
        page_size=PAGE, batch_invariant=False, kv_dtype=None,
    )  # fmt: skip
    capacities = (len(lengths), batch.q.shape[0], batch.max_q_len, batch.max_kv_len)
    spec: SplitSpec = KERNEL.split(call, *capacities, groups=len(groups))
    q_lens, kv_lens = zip(*lengths, strict=True)
    made = plan(spec, q_lens, kv_lens, first, [keys for _, keys in groups])
    assert any(item and item.merge < -1 for item in made.items), "nothing is shared"
    words = torch.tensor(made.words(spec), dtype=torch.int32)
    options = (sink, -1, 0, 0.0, 0.1, None, None, False)
    wide: list[Any] = [x.double() if x.is_floating_point() else x for x in batch.arguments[:6]]
    exact = reference(*(*wide, *batch.arguments[6:], *options, None, []))
    with simulation(seed=seed, residency=1 + seed % 3):
        got = KERNEL.paged_attention(*batch.arguments, *options, words, spec.numbers)
    assert_close(got, exact)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("heads", [(4, 1), (8, 2), (3, 1)])
def test_members_of_one_group(heads: tuple[int, int], dtype: torch.dtype) -> None:
    lengths = [(1, 1090 + 37 * i) for i in range(19)]
    check(lengths, [(19, 1024)], heads, dtype=dtype)


@pytest.mark.parametrize("seed", range(4))
def test_groups_and_others_with_several_queries(seed: int) -> None:
    lengths = [(3, 620), (2, 590), (4, 579), (1, 90), (0, 0), (1, 700), (5, 660), (2, 641)]
    sink = torch.linspace(-1.0, 2.0, 8) if seed % 2 else None
    check(lengths, [(3, 576), (1, 0), (1, 0), (3, 640)], (8, 2), sink=sink, seed=seed)


@pytest.mark.parametrize("heads", [(4, 1), (3, 1)])
def test_scores_that_rise_far_above_those_of_the_last_keys(heads: tuple[int, int]) -> None:
    check([(1, 640 + 20 * i) for i in range(16)], [(16, 640)], heads, rising=True)


def test_two_requests_of_few_rows() -> None:
    check([(1, 1200), (1, 1300)], [(2, 1152)])
