"""8-bit pages, batch invariance and plans of paged attention, on a CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from rooftile.ops.append import append_kv
from rooftile.ops.paged import paged_attention, plan_paged_attention
from rooftile.types import AttentionPlan, PagedBatch, SplitSpec
from tests.ops import attention_oracle as oracle

FP8 = torch.float8_e4m3fn


def case(
    lengths: list[tuple[int, int]], dtype: torch.dtype = torch.bfloat16
) -> tuple[Tensor, Tensor, Tensor, PagedBatch]:
    counts = [-(-kv // 16) for _, kv in lengths]
    k, v = torch.randn(2, sum(counts), 2, 16, 32).to(dtype)
    table = torch.zeros(len(lengths), max(counts), dtype=torch.int32)
    for row, pages in zip(table, torch.randperm(sum(counts)).int().split(counts), strict=True):
        row[: len(pages)] = pages
    cu = torch.tensor([0, *(q for q, _ in lengths)]).cumsum(0).int()
    kv_lens = torch.tensor([kv for _, kv in lengths]).int()
    most = max(q for q, _ in lengths), max(kv for _, kv in lengths)
    return torch.randn(int(cu[-1]), 4, 32).to(dtype), k, v, PagedBatch(cu, kv_lens, table, *most)


@pytest.mark.parametrize("kernel", ["cpu", "reference"])
def test_a_request_alone_has_the_bits_it_has_among_others(kernel: str) -> None:
    lengths = [(1, 3000), (1, 50), (5, 700), (1, 9), (40, 40), (1, 5000)]
    q, k, v, batch = case(lengths)
    together = paged_attention(q, k, v, batch, batch_invariant=True, kernel=kernel)
    for i, (q_len, kv_len) in enumerate(lengths):
        mine = slice(*batch.cu_seqlens_q[i : i + 2].tolist())
        one = PagedBatch(
            torch.tensor([0, q_len]), batch.kv_lens[i : i + 1], batch.page_table[i : i + 1],
            q_len, kv_len,
        )  # fmt: skip
        alone = paged_attention(q[mine], k, v, one, batch_invariant=True, kernel=kernel)
        assert torch.equal(alone, together[mine])  # type: ignore[arg-type,index]
    with pytest.raises(NotImplementedError, match="padded to the longest of their batch"):
        paged_attention(q, k, v, batch, batch_invariant=True, kernel="torch")


def test_pages_in_8_bits() -> None:
    lengths = [(1, 40), (3, 90), (0, 5), (2, 1)]
    q, k, v, batch = case(lengths)
    k_scale, v_scale = torch.rand(2, 2) + 0.5
    k8, v8 = k.to(FP8), v.to(FP8)
    options: dict[str, Any] = {"k_scale": k_scale, "v_scale": v_scale}
    out, lse = paged_attention(q, k8, v8, batch, return_lse=True, **options)
    for i, (_, kv_len) in enumerate(lengths):
        mine = slice(*batch.cu_seqlens_q[i : i + 2].tolist())
        pages = batch.page_table[i, : -(-kv_len // 16)].long()
        keys, values = (
            (x[pages].double() * s.double()[:, None, None]).transpose(1, 2).flatten(0, 1)[:kv_len]
            for x, s in ((k8, k_scale), (v8, v_scale))
        )
        expected = oracle.attend(q[mine], keys, values, causal=True)
        oracle.assert_attention_close((out[mine], lse[mine]), expected, torch.bfloat16)
    wide = paged_attention(q.double(), k8, v8, batch, **options)
    assert isinstance(wide, Tensor)
    assert float((wide - out).abs().max()) < 0.02
    for kernel in ("cpu", "torch"):
        with pytest.raises(NotImplementedError, match="it has no pages of torch.float8_e4m3fn"):
            paged_attention(q, k8, v8, batch, kernel=kernel, **options)


def test_appending_in_8_bits() -> None:
    k, v = torch.randn(2, 5, 2, 32)
    k[1, 0, 3] = 1e6  # beyond what 8 bits hold
    k_scale, v_scale = torch.tensor([0.1, 0.02]), torch.tensor([0.5, 3.0])
    slots = torch.tensor([3, 17, -1, 40, 0])
    k8, v8 = torch.zeros(2, 3, 2, 16, 32).to(FP8)
    append_kv(k, v, k8, v8, slots, k_scale=k_scale, v_scale=v_scale)
    assert float(k8[1, 0, 1, 3]) == 448
    for token, slot in enumerate(slots.tolist()):
        if slot < 0:
            continue
        for pages, x, scale in ((k8, k, k_scale), (v8, v, v_scale)):
            got = pages[slot // 16, :, slot % 16].float() * scale[:, None]
            exact = x[token].clamp(-448 * scale[:, None], 448 * scale[:, None])
            # Three bits of mantissa; the smallest step is 2^-9 of a unit.
            assert bool(((got - exact).abs() <= exact.abs() / 16 + scale[:, None] / 512).all())
    assert bool((k8[2, :, 9:].float() == 0).all())


def test_refusals_of_scales() -> None:
    q, k, v, batch = case([(1, 9)])
    ones = torch.ones(2)
    for message, arguments, options in (
        ("k_scale is missing and pages are torch.float8_e4m3fn", (q, k.to(FP8), v.to(FP8)), {}),
        ("k_scale is given and pages are torch.bfloat16", (q, k, v), {"k_scale": ones}),
        (
            r"v_scale has shape \[3\]; expected \[num_kv_heads\] = \[2\]",
            (q, k.to(FP8), v.to(FP8)),
            {"k_scale": ones, "v_scale": torch.ones(3)},
        ),
        ("v_pages is torch.bfloat16 but k_pages is torch.float8", (q, k.to(FP8), v), {}),
    ):
        with pytest.raises(ValueError, match=message):
            paged_attention(*arguments, batch, **options)  # type: ignore[arg-type]


def test_kernels_of_a_cpu_follow_no_plan_and_the_same_code_runs() -> None:
    q, k, v, batch = case([(1, 40), (3, 90)])
    plan = plan_paged_attention(q, k, v, batch)
    assert plan.split is None
    assert plan.buffer.numel() == 0
    planned = paged_attention(q, k, v, batch, plan=plan)
    assert torch.equal(planned, paged_attention(q, k, v, batch))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="kernel='reference' but the plan is for 'cpu'"):
        paged_attention(q, k, v, batch, plan=plan, kernel="reference")
    foreign = AttentionPlan("cpu", SPEC, torch.empty(3, dtype=torch.int32))
    with pytest.raises(ValueError, match="the plan was made for SplitSpec"):
        paged_attention(q, k, v, batch, plan=foreign)


SPEC = SplitSpec(1, 2, 3, 4, 5, 6, -1, 0, 64, (16, 128), (7, 8), 9, 10, 2, 11)


def test_a_spec_passes_as_numbers() -> None:
    assert SplitSpec.from_numbers(SPEC.numbers) == SPEC
    assert all(isinstance(number, int) for number in SPEC.numbers)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kernel", ["cpu", "torch", "reference"])
def test_pages_with_tokens_before_heads_are_a_view(kernel: str, dtype: torch.dtype) -> None:
    """As other libraries keep them: [pages, page_size, heads, dim], transposed, written and read."""
    g = torch.Generator().manual_seed(0)
    theirs = [torch.full((5, 4, 2, 32), torch.nan, dtype=dtype) for _ in range(2)]
    ours = [torch.full((5, 2, 4, 32), torch.nan, dtype=dtype) for _ in range(2)]
    views = [pages.transpose(1, 2) for pages in theirs]
    new = [torch.randn(6, 2, 32, generator=g).to(dtype) for _ in range(2)]
    slots = torch.tensor([12, 13, 14, 15, 4, 5])
    for pool in (views, ours):
        append_kv(*new, *pool, slots)
    batch = PagedBatch(
        torch.tensor([0, 2], dtype=torch.int32),
        torch.tensor([6], dtype=torch.int32),
        torch.tensor([[3, 1]], dtype=torch.int32),
        *(2, 6),
    )
    q = torch.randn(2, 4, 32, generator=g).to(dtype)
    for view, pages in zip(views, ours, strict=True):
        torch.testing.assert_close(view, pages, rtol=0, atol=0, equal_nan=True)
    results = [paged_attention(q, *pool, batch, kernel=kernel) for pool in (views, ours)]
    torch.testing.assert_close(results[0], results[1])
    assert results[0].isfinite().all()
