"""The plan that the GPU kernel makes, in Triton's interpreter, against the pure-Python planner.

TRITON_INTERPRET=1 python -m pytest tests/kernels/test_triton_split_kv.py
"""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rooftile.planning.split_kv import defined, plan
from rooftile.types import SplitSpec
from tests.planning.split_batches import (
    Lengths,
    Prefixes,
    batches,
    decode_batches,
    sharing_batches,
)

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1, in a process of its own", allow_module_level=True)
pytest.importorskip("triton", reason="Triton is not installed")

from rooftile.kernels.triton import split_kv as kernel


@settings(max_examples=40)
@given(batch=st.one_of(batches(), decode_batches()))
def test_equals_the_specification(batch: tuple[SplitSpec, Lengths]) -> None:
    spec, lengths = batch
    q_lens, kv_lens = [q for q, _ in lengths], [kv for _, kv in lengths]
    idle = [0] * (spec.batch - len(lengths))  # a batch below its capacity ends in empty requests
    cu = torch.tensor([0, *q_lens, *idle]).cumsum(0).int()
    got = kernel.split_kv(cu, torch.tensor(kv_lens + idle, dtype=torch.int32), spec.numbers)
    expected = plan(spec, q_lens, kv_lens).words(spec)
    assert got.shape == (len(expected),)
    assert defined(got.tolist(), spec) == defined(expected, spec)


@pytest.mark.parametrize("together", [1, 2, 3, 16])
def test_whole_strips_of_several_requests_equal_the_specification(together: int) -> None:
    q_lens, kv_lens = [70, 0, 33, 5, 128, 64, 90], [90, 40, 33, 500, 128, 600, 90]
    spec = SplitSpec(
        batch=8, tokens=400, max_q_len=128, max_kv_len=600, group_size=4, num_kv_heads=2, left=-1,
        right=0, kv_tile=64, tile_rows=(64, 128), tile_cost=(100, 150), item_cost=80, num_ctas=2,
        min_piece=1, whole=1, together=together,
    )  # fmt: skip
    cu = torch.tensor([0, *q_lens, 0]).cumsum(0).int()
    got = kernel.split_kv(cu, torch.tensor([*kv_lens, 0], dtype=torch.int32), spec.numbers).tolist()
    expected = plan(spec, q_lens, kv_lens)
    assert expected.drawn
    assert defined(got, spec) == defined(expected.words(spec), spec)


@settings(max_examples=40)
@given(batch=sharing_batches())
def test_shared_prefixes_equal_the_specification(
    batch: tuple[SplitSpec, Lengths, Prefixes],
) -> None:
    spec, lengths, (first, shared) = batch
    idle = [0] * (spec.batch - len(lengths))
    q_lens, kv_lens = [q for q, _ in lengths] + idle, [kv for _, kv in lengths] + idle
    first = first + [first[-1]] * (spec.groups - len(shared))
    shared = shared + [0] * (spec.groups - len(shared))
    cu, lens, begins, keys = (
        torch.tensor(x, dtype=torch.int32)
        for x in ([0, *torch.tensor(q_lens).cumsum(0).tolist()], kv_lens, first, shared)
    )
    got = kernel.split_kv(cu, lens, spec.numbers, begins, keys)
    expected = plan(spec, q_lens, kv_lens, first, shared).words(spec)
    assert got.shape == (len(expected),)
    assert defined(got.tolist(), spec) == defined(expected, spec)


@pytest.mark.parametrize(
    ("members", "keys", "ctas"),
    [
        *[((64,), (8192,), 256), ((32,), (8192,), 128), ((7, 9), (640, 640), 61)],
        *[((80,), (8192,), 256), ((32, 32), (8192, 6144), 264)],
    ],
)
def test_groups_apart_equal_the_specification(
    members: tuple[int, ...], keys: tuple[int, ...], ctas: int
) -> None:
    count = sum(members)
    spec = SplitSpec(
        batch=count, tokens=count, max_q_len=1, max_kv_len=max(keys) + 256, group_size=4,
        num_kv_heads=8, left=-1, right=0, kv_tile=64, tile_rows=(64,), tile_cost=(3448,),
        item_cost=2750, num_ctas=ctas, min_piece=1, groups=len(keys), least_saved=1024,
    )  # fmt: skip
    kv_lens = [n + 256 for n, some in zip(keys, members, strict=True) for _ in range(some)]
    first = [sum(members[:g]) for g in range(len(members) + 1)]
    tensors = (torch.tensor(x, dtype=torch.int32) for x in (range(count + 1), kv_lens))
    groups = (torch.tensor(x, dtype=torch.int32) for x in (first, keys))
    got = kernel.split_kv(*tensors, spec.numbers, *groups)
    expected = plan(spec, [1] * count, kv_lens, first, keys)
    kinds = [{item.merge for item in expected.of_cta(cta)} for cta in range(ctas)]
    assert all(len(kind) == 1 for kind in kinds if kind)  # of requests or of groups
    assert {-2 if count > 64 or len(set(keys)) > 1 else -3} in kinds
    assert defined(got.tolist(), spec) == defined(expected.words(spec), spec)
