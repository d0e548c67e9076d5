"""paged_attention and append_kv: against the oracle, with poison wherever nothing may be read."""

from __future__ import annotations

import dataclasses
import math
import os
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rooftile.ops.append import APPEND_KV, append_kv
from rooftile.ops.paged import PAGED_ATTENTION, paged_attention, plan_paged_attention
from rooftile.ops.rope import rotary_embedding
from rooftile.types import PagedBatch
from tests.ops import attention_oracle as oracle
from tests.ops.accuracy import dtype_for, kernels_to_test, opcheck

NUM_PAGES = 40
GARBAGE = st.sampled_from([-1, 2**31 - 1, NUM_PAGES, -(2**31)])


def pool(
    heads: int,
    page_size: int,
    k_dim: int,
    v_dim: int,
    dtype: torch.dtype,
    num_pages: int = NUM_PAGES,
) -> tuple[Tensor, Tensor]:
    """k_pages and v_pages as views of one allocation, as the engine lays them, all NaN."""
    k_size, v_size = (heads * page_size * dim for dim in (k_dim, v_dim))
    both = torch.full((num_pages, k_size + v_size), math.nan, dtype=dtype)
    k_pages, v_pages = both.split((k_size, v_size), -1)
    return (
        k_pages.unflatten(-1, (heads, page_size, k_dim)),
        v_pages.unflatten(-1, (heads, page_size, v_dim)),
    )


@dataclasses.dataclass
class Paged:
    """Requests whose keys and values lie in pages of a poisoned pool."""

    q: Tensor
    k_pages: Tensor
    v_pages: Tensor
    batch: PagedBatch
    k: list[Tensor]
    v: list[Tensor]


def fill(
    g: torch.Generator,
    lengths: list[tuple[int, int]],  # q_len, kv_len
    heads: tuple[int, int],
    dims: tuple[int, int],
    page_size: int,
    dtype: torch.dtype,
    *,
    padding: int = 0,
    garbage: int = -1,
    left: int | None = None,
    apart: bool = False,
) -> Paged:
    """apart: k_pages and v_pages as separate, permuted tensors that no fast path fits."""
    needed = sum(-(-kv_len // page_size) for _, kv_len in lengths)
    k_pages, v_pages = pool(heads[1], page_size, *dims, dtype, num_pages=needed + 3)
    if apart:
        k_pages, v_pages = (x.mT.contiguous().mT for x in (k_pages, v_pages))
    free = torch.randperm(needed + 3, generator=g).tolist()
    width = max((-(-kv_len // page_size) for _, kv_len in lengths), default=0) + 1
    table = torch.full((len(lengths), width), garbage, dtype=torch.int32)
    k, v = [], []
    for i, (q_len, kv_len) in enumerate(lengths):
        k.append(oracle.draw(g, dtype, kv_len, heads[1], dims[0]))
        v.append(oracle.draw(g, dtype, kv_len, heads[1], dims[1]))
        pages = [free.pop() for _ in range(-(-kv_len // page_size))]
        first = 0 if left is None else max(0, kv_len - q_len - left)
        for j in range(kv_len):
            k_pages[pages[j // page_size], :, j % page_size] = k[i][j]
            v_pages[pages[j // page_size], :, j % page_size] = v[i][j]
        for column, page in enumerate(pages):
            # A page that no query's window reaches may have been given away.
            if (column + 1) * page_size > first and q_len > 0:
                table[i, column] = page
    q_lens = [q_len for q_len, _ in lengths]
    q = oracle.draw(g, dtype, sum(q_lens) + padding, heads[0], dims[0])
    q[sum(q_lens) :] = math.nan
    batch = PagedBatch(
        cu_seqlens_q=torch.tensor([0, *q_lens], dtype=torch.int32).cumsum(0, dtype=torch.int32),
        kv_lens=torch.tensor([kv_len for _, kv_len in lengths], dtype=torch.int32),
        page_table=table,
        max_q_len=max(q_lens, default=0),
        max_kv_len=max((kv_len for _, kv_len in lengths), default=0),
    )
    return Paged(q, k_pages, v_pages, batch, k, v)


def check(paged: Paged, dtype: torch.dtype, kernel: str, **options: Any) -> None:
    before = paged.k_pages.clone(), paged.v_pages.clone()
    out, lse = paged_attention(
        paged.q,
        paged.k_pages,
        paged.v_pages,
        paged.batch,
        **options,
        return_lse=True,
        kernel=kernel,
    )
    ends = paged.batch.cu_seqlens_q.tolist()
    for i, (k, v) in enumerate(zip(paged.k, paged.v, strict=True)):
        queries = slice(ends[i], ends[i + 1])
        expected = oracle.attend(paged.q[queries], k, v, **options)
        oracle.assert_attention_close((out[queries], lse[queries]), expected, dtype)
    assert bool((out[ends[-1] :] == 0).all())
    assert bool((lse[ends[-1] :] == -math.inf).all())
    for pages, old in zip((paged.k_pages, paged.v_pages), before, strict=True):
        assert torch.equal(pages.nan_to_num(7), old.nan_to_num(7))


@pytest.mark.parametrize("kernel", kernels_to_test(PAGED_ATTENTION))
@given(
    lengths=st.lists(
        st.tuples(st.sampled_from([0, 1, 1, 1, 2, 5]), st.integers(0, 23)), max_size=5
    ),
    padding=st.integers(0, 2),
    heads=oracle.HEADS,
    dims=st.tuples(st.integers(1, 12), st.integers(1, 12)),
    page_size=st.sampled_from([1, 2, 4, 16]),
    dtype=oracle.DTYPES,
    causal=st.booleans(),
    window=oracle.WINDOWS,
    softcap=oracle.SOFTCAPS,
    scale=st.sampled_from([None, None, -0.2, 0.0]),
    sink_kind=oracle.SINKS,
    garbage=GARBAGE,
    apart=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_equals_the_oracle(
    kernel: str,
    lengths: list[tuple[int, int]],
    padding: int,
    heads: tuple[int, int],
    dims: tuple[int, int],
    page_size: int,
    dtype: torch.dtype,
    causal: bool,
    window: tuple[int | None, int | None] | None,
    softcap: float,
    scale: float | None,
    sink_kind: float | None,
    garbage: int,
    apart: bool,
    seed: int,
) -> None:
    dtype = dtype_for(kernel, dtype)
    if kernel == "torch":
        dims, softcap = (dims[0], dims[0]), 0.0
    g = torch.Generator().manual_seed(seed)
    paged = fill(
        g,
        lengths,
        heads,
        dims,
        page_size,
        dtype,
        padding=padding,
        garbage=garbage,
        left=None if window is None else window[0],
        apart=apart,
    )
    sink = oracle.sink_of(g, heads[0], sink_kind)
    options = {"causal": causal, "window": window, "softcap": softcap, "softmax_scale": scale}
    check(paged, dtype, kernel, sink=sink, **options)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("window", [None, (40, None)])
def test_a_large_ragged_batch(dtype: torch.dtype, window: tuple[int, None] | None) -> None:
    """Enough requests of unlike lengths that the CPU kernel cuts them into several batches."""
    g = torch.Generator().manual_seed(0)
    lengths = [(1, n) for n in (310, 3, 17, 290, 16, 1, 150, 33, 300, 64)] + [(20, 45), (7, 7)]
    paged = fill(g, lengths, (6, 2), (16, 16), 4, dtype, left=window and window[0])
    check(paged, dtype, "torch", causal=True, window=window)


def test_kernels_agree_on_many_long_requests() -> None:
    g = torch.Generator().manual_seed(1)
    paged = fill(g, [(1, 900 + i) for i in range(9)], (9, 3), (64, 64), 16, torch.bfloat16)
    arguments = (paged.q, paged.k_pages, paged.v_pages, paged.batch)
    reference = paged_attention(*arguments, kernel="reference")
    assert isinstance(reference, Tensor)
    error = (paged_attention(*arguments, kernel="torch") - reference).abs().amax()  # type: ignore[operator]
    assert float(error) <= 2**-8


@pytest.mark.parametrize("kernel", kernels_to_test(APPEND_KV))
@given(
    tokens=st.integers(0, 9),
    heads=st.integers(1, 3),
    dims=st.tuples(st.integers(2, 9), st.integers(1, 9)),
    page_size=st.sampled_from([1, 2, 4, 16]),
    dtype=oracle.DTYPES,
    index_dtype=st.sampled_from([torch.int32, torch.int64]),
    rotated=st.booleans(),
    interleaved=st.booleans(),
    apart=st.booleans(),
    strided=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_append_writes_its_slots_and_nothing_else(
    kernel: str,
    tokens: int,
    heads: int,
    dims: tuple[int, int],
    page_size: int,
    dtype: torch.dtype,
    index_dtype: torch.dtype,
    rotated: bool,
    interleaved: bool,
    apart: bool,
    strided: bool,
    seed: int,
) -> None:
    dtype = dtype_for(kernel, dtype)
    g = torch.Generator().manual_seed(seed)
    k_pages, v_pages = pool(heads, page_size, *dims, dtype)
    if apart:
        k_pages, v_pages = (x.mT.contiguous().mT for x in (k_pages, v_pages))
    k = oracle.draw(g, dtype, tokens, heads, dims[0], strided=strided)
    v = oracle.draw(g, dtype, tokens, heads, dims[1], strided=strided)
    slots = torch.randperm(NUM_PAGES * page_size, generator=g)[:tokens].to(index_dtype)
    slots[torch.rand(tokens, generator=g) < 0.3] = -1
    skipped = slots < 0
    k[skipped], v[skipped] = math.nan, math.inf
    positions = torch.randint(0, 50, (tokens,), generator=g).to(index_dtype)
    half = (dims[0] - 1) // 2 if dims[0] > 3 else 1
    cos_sin = torch.randn(50, 2, half, generator=g)
    options: dict[str, Any] = {}
    expected_k, expected_v = k_pages.clone(), v_pages.clone()
    turned = k
    if rotated:
        options = {"positions": positions.clone(), "cos_sin": cos_sin, "interleaved": interleaved}
        options["positions"][skipped] = -5  # a padding row has no position
        turned = rotary_embedding(
            k, positions.long(), cos_sin, interleaved=interleaved, kernel="reference"
        )
    for i, slot in enumerate(slots.tolist()):
        if slot >= 0:
            expected_k[slot // page_size, :, slot % page_size] = turned[i]
            expected_v[slot // page_size, :, slot % page_size] = v[i]
    append_kv(k, v, k_pages, v_pages, slots, **options, kernel=kernel)
    written = ~expected_k.isnan()
    assert torch.equal(k_pages.isnan(), expected_k.isnan())
    unit = float(torch.finfo(dtype).eps)
    torch.testing.assert_close(k_pages[written], expected_k[written], rtol=2 * unit, atol=8 * unit)
    assert torch.equal(v_pages.nan_to_num(7), expected_v.nan_to_num(7))


def memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")


@pytest.mark.skipif(memory_bytes() < 8 << 30, reason="needs 8 GB of free address space")
@pytest.mark.parametrize("kernel", kernels_to_test(PAGED_ATTENTION))
def test_offsets_beyond_two_to_the_31(kernel: str) -> None:
    heads, page_size, dim = 2, 16, 64
    size = heads * page_size * dim
    num_pages = (2**31 + 2**20) // (2 * size)
    # Not initialised, so only the pages that are touched take memory.
    both = torch.empty(num_pages, 2 * size, dtype=torch.bfloat16)
    k_pages, v_pages = (x.unflatten(-1, (heads, page_size, dim)) for x in both.split(size, -1))
    assert (num_pages - 1) * both.stride(0) > 2**31
    k, v = torch.randn(2, 20, heads, dim).bfloat16().unbind(0)
    pages = torch.tensor([[num_pages - 1, num_pages - 2]], dtype=torch.int32)
    slots = torch.cat([(num_pages - 1 - i) * page_size + torch.arange(16) for i in (0, 1)])[:20]
    append_kv(k, v, k_pages, v_pages, slots, kernel=kernel)
    assert torch.equal(k_pages[num_pages - 1].transpose(0, 1), k[:16])
    batch = PagedBatch(torch.tensor([0, 1, 4]), torch.tensor([20, 20]), pages.expand(2, 2), 3, 20)
    q = torch.randn(4, 4, dim).bfloat16()
    out, lse = paged_attention(q, k_pages, v_pages, batch, return_lse=True, kernel=kernel)
    for queries in (slice(0, 1), slice(1, 4)):
        expected = oracle.attend(q[queries], k, v, causal=True)
        oracle.assert_attention_close((out[queries], lse[queries]), expected, torch.bfloat16)


def small() -> Paged:
    g = torch.Generator().manual_seed(0)
    return fill(g, [(1, 5), (3, 9)], (4, 2), (8, 8), 4, torch.float32)


@pytest.mark.parametrize("kernel", ["cpu", "torch", "reference"])
@pytest.mark.parametrize("q_len", [1, 3])
def test_nan_reaches_every_row_that_sees_it(kernel: str, q_len: int) -> None:
    paged = fill(torch.Generator().manual_seed(0), [(q_len, 7)], (2, 1), (8, 8), 4, torch.float32)
    paged.q[0, 0, 3] = math.nan
    arguments = (paged.q, paged.k_pages, paged.v_pages, paged.batch)
    out, lse = paged_attention(*arguments, return_lse=True, kernel=kernel)
    assert lse.isnan().nonzero().tolist() == [[0, 0]]
    assert out.isnan().any(-1).nonzero().tolist() == [[0, 0]]  # type: ignore[union-attr]


def test_opcheck_and_compile() -> None:
    paged = small()
    b = paged.batch
    arguments = (paged.q, paged.k_pages.nan_to_num(), paged.v_pages.nan_to_num())
    lengths = (b.cu_seqlens_q, b.kv_lens, b.page_table, 3, 9)
    unplanned = (None, None, False, None, [], True)
    opcheck(PAGED_ATTENTION, *arguments, *lengths, None, -1, 0, 0.0, 0.3, *unplanned)
    opcheck(PAGED_ATTENTION, *arguments, *lengths, torch.zeros(4), 2, 0, 5.0, 0.3, *unplanned)
    k, slots = torch.randn(3, 2, 8), torch.tensor([5, -1, 0])
    cos_sin = torch.randn(7, 2, 4)
    pages = [torch.zeros(6, 2, 4, 8) for _ in range(4)]
    opcheck(APPEND_KV, k, k, *pages[:2], slots, torch.tensor([1, 2, 3]), cos_sin, False, None, None)

    compiled = torch.compile(paged_attention, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*arguments, b), paged_attention(*arguments, b))
    append_kv(k, -k, *pages[:2], slots)
    torch.compile(append_kv, fullgraph=True, backend="aot_eager")(k, -k, *pages[2:], slots)
    assert torch.equal(pages[0], pages[2])
    assert torch.equal(pages[1], pages[3])
    assert bool((pages[1] != 0).any())


def test_refusals_of_batches_name_the_value_and_the_remedy() -> None:
    paged = small()
    arguments = (paged.q, paged.k_pages, paged.v_pages)
    table = paged.batch.page_table.clone()
    table[1, 1] = 99
    for message, change in {
        r"kv_lens holds 10 but max_kv_len is 9; give an upper bound": {
            "kv_lens": torch.tensor([5, 10])
        },
        r"kv_lens holds -1": {"kv_lens": torch.tensor([-1, 9])},
        r"kv_lens holds 99 but page_table reaches 16 tokens": {
            "kv_lens": torch.tensor([5, 99]),
            "max_kv_len": 99,
        },
        r"page_table\[1, 1\] is 99, in use by request 1 with 9 tokens": {"page_table": table},
        r"page_table has shape \[1, 4\]; expected \[batch, max_pages\]": {"page_table": table[:1]},
        r"cu_seqlens_q has a sequence of 3 tokens but max_q_len is 2": {"max_q_len": 2},
        r"cu_seqlens_q ends with 5 but q has 4 tokens": {"cu_seqlens_q": torch.tensor([0, 2, 5])},
        r"kv_lens has shape \[3\]; expected \[batch\] = \[2\]": {"kv_lens": torch.zeros(3).int()},
        r"page_table has dtype torch.float32": {"page_table": table.float()},
        r"max_kv_len is 16.0; it must be an int": {"max_kv_len": 16.0},
        r"max_kv_len is None; it must be an int": {"max_kv_len": None},
        r"max_kv_len is 1000\d*; it must be at least 0 and below 2\*\*31": {"max_kv_len": 10**30},
        r"max_q_len is 3.0; it must be an int": {"max_q_len": 3.0},
        r"kv_lens is \[5, 9\]; it must be a tensor": {"kv_lens": [5, 9]},
    }.items():
        with pytest.raises(ValueError, match=message):
            paged_attention(*arguments, dataclasses.replace(paged.batch, **change))
    for function in (paged_attention, plan_paged_attention):
        with pytest.raises(ValueError, match="q has dim 7 but k_pages has dim 8"):
            function(paged.q[..., :7], *arguments[1:], paged.batch)  # type: ignore[operator]
        with pytest.raises(ValueError, match="batch is None; it must be a PagedBatch"):
            function(*arguments, None)  # type: ignore[operator]
    with pytest.raises(ValueError, match="plan is 3; pass what plan_paged_attention returned"):
        paged_attention(*arguments, paged.batch, plan=3)  # type: ignore[arg-type]
    eight = (paged.q, *(x.to(torch.float8_e4m3fn) for x in arguments[1:]))
    with pytest.raises(ValueError, match="k_scale is 1.0; it must be a tensor"):
        paged_attention(*eight, paged.batch, k_scale=1.0, v_scale=1.0)  # type: ignore[arg-type]
    with pytest.raises(
        NotImplementedError, match="q requires a gradient, .*; use attention_varlen"
    ):
        paged_attention(paged.q.clone().requires_grad_(), *arguments[1:], paged.batch)
    with pytest.raises(NotImplementedError, match="'torch' cannot run.*no softcap"):
        paged_attention(*arguments, paged.batch, softcap=1.0, kernel="torch")


def test_refusals_of_append() -> None:
    k, pages = torch.randn(2, 2, 8), torch.zeros(6, 2, 4, 8)
    good, cos_sin = torch.tensor([0, 1]), torch.randn(5, 2, 4)
    for message, slots, options in (
        (r"slots holds \[24\]; a slot must be -1 or below.*24", torch.tensor([0, 24]), {}),
        (r"slots holds \[-2\]", torch.tensor([-2, 0]), {}),
        (r"slot \[3\] occurs twice", torch.tensor([3, 3]), {}),
        (r"slots has shape \[3\]; expected \[tokens\]", torch.tensor([3, 3, 1]), {}),
        ("positions is given alone", good, {"positions": good}),
        (
            r"positions holds \[5\]; cos_sin has 5 positions",
            good,
            {"positions": torch.tensor([0, 5]), "cos_sin": cos_sin},
        ),
        (
            r"cos_sin has shape \[5, 2, 6\].*rotary_dim <= 8",
            good,
            {"positions": good, "cos_sin": torch.randn(5, 2, 6)},
        ),
    ):
        with pytest.raises(ValueError, match=message):
            append_kv(k, k, pages, pages.clone(), slots, **options)
    with pytest.raises(ValueError, match=r"v has shape \[2, 2, 7\]; expected"):
        append_kv(k, k[..., :7], pages, pages.clone(), good)
