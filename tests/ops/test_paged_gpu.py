"""paged_attention, its plans and append_kv on a GPU, through the operators.

Against the reference kernel in float64 on the same device, which tests/ops/test_paged.py has compared
with an oracle written row by row.
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from rooftile.ops.append import append_kv
from rooftile.ops.attention import AttentionCall, attention_varlen
from rooftile.ops.merge import merge_attention_states
from rooftile.ops.paged import PAGED_ATTENTION, paged_attention, plan_paged_attention
from rooftile.ops.tree import tree_attention
from rooftile.planning.split_kv import Layout
from rooftile.planning.split_kv import plan as planned
from rooftile.types import PagedBatch, PrefixGroups, SplitSpec
from tests.planning.split_batches import (
    Lengths,
    Prefixes,
    batches,
    decode_batches,
    sharing_batches,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
FAMILIES = tuple(family for family in ("gluon", "triton") if family in PAGED_ATTENTION.families)
FP8 = torch.float8_e4m3fn
if torch.cuda.is_available():
    from rooftile.kernels.triton.ragged_pages import follows_plan


@dataclasses.dataclass(frozen=True)
class Shape:
    """What a kernel is compiled for."""

    heads: tuple[int, int] = (8, 2)
    dims: tuple[int, int] = (128, 128)
    page_size: int = 16
    dtype: torch.dtype = torch.bfloat16
    kv_dtype: torch.dtype | None = None
    options: tuple[tuple[str, Any], ...] = ()
    sink: bool = False
    latent: bool = False
    max_q_len: int = 300  # a bound: kernels are compiled for few rows or for many
    invariant: bool = False


FEW = 4  # queries of a request that decodes, some speculated
SHAPES = [
    Shape(),
    Shape(max_q_len=FEW),
    Shape(max_q_len=FEW, invariant=True),
    Shape(page_size=64, heads=(5, 1), max_q_len=1),
    Shape(page_size=256, heads=(7, 1), dtype=torch.float16, invariant=True),
    Shape(page_size=1, heads=(4, 4), max_q_len=FEW),
    Shape(page_size=8, heads=(24, 2), dims=(64, 64), options=(("softcap", 20.0),)),
    Shape(dims=(64, 64), sink=True, options=(("window", (100, 0)),), max_q_len=FEW),
    Shape(dims=(96, 96), options=(("window", (17, 3)), ("causal", False))),
    Shape(dims=(192, 128), page_size=32, options=(("causal", False),)),
    Shape(dims=(256, 256), heads=(6, 2), max_q_len=FEW),
    Shape(dims=(72, 40), page_size=4, sink=True),
    Shape(dims=(576, 512), heads=(16, 1), page_size=64, latent=True, max_q_len=1),
    Shape(kv_dtype=FP8, heads=(32, 8), max_q_len=FEW),
    Shape(kv_dtype=FP8, dims=(64, 64), page_size=128, options=(("window", (64, None)),)),
    Shape(dtype=torch.float32, dims=(64, 64)),
]
Q_LENS = st.one_of(st.just(1), st.integers(0, 8), st.sampled_from([33, 150, 300]))
KV_LENS = st.one_of(
    st.integers(0, 40), st.sampled_from([63, 64, 65, 127, 128, 129, 255, 256, 257, 1000, 5000])
)


@dataclasses.dataclass
class Case:
    q: Tensor
    k_pages: Tensor
    v_pages: Tensor
    batch: PagedBatch
    options: dict[str, Any]

    def run(self, kernel: str, dtype: torch.dtype | None = None, **more: Any) -> Any:
        """dtype: compute in this one, on the same values."""
        q, k, v, options = self.q, self.k_pages, self.v_pages, {**self.options, **more}
        if dtype is not None:
            q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
            scales = options.pop("k_scale", None), options.pop("v_scale", None)
            if scales[0] is not None:
                k, v = (x * s.to(dtype)[:, None, None] for x, s in zip((k, v), scales, strict=True))
        return paged_attention(q, k, v, self.batch, return_lse=True, kernel=kernel, **options)


def make(shape: Shape, lengths: Sequence[tuple[int, int]], seed: int, padding: int = 0) -> Case:
    """Pages in random order in a pool of NaN; garbage where no page number may be looked up."""
    g = torch.Generator("cuda").manual_seed(seed)
    size = shape.page_size
    options = dict(shape.options)
    left = (options.get("window") or (None, None))[0]
    counts = [-(-kv // size) for _, kv in lengths]
    num_pages = sum(counts) + 3
    kv_heads, dims = shape.heads[1], shape.dims
    wide = dims[0] if shape.latent else sum(dims)
    both = torch.full((num_pages, kv_heads * size * wide), math.nan, device="cuda")
    if shape.latent:
        k_pages = both.unflatten(-1, (kv_heads, size, dims[0]))
        v_pages = k_pages[..., : dims[1]]
    else:
        parts = both.split([kv_heads * size * d for d in dims], -1)
        k_pages, v_pages = (
            x.unflatten(-1, (kv_heads, size, d)) for x, d in zip(parts, dims, strict=True)
        )
    table = torch.full((len(lengths), max(counts, default=0) + 1), 2**31 - 1, dtype=torch.int32)
    free = torch.randperm(num_pages, generator=torch.Generator().manual_seed(seed)).int()
    used = torch.zeros(num_pages * size, dtype=torch.bool)
    for i, (q_len, kv_len) in enumerate(lengths):
        first = 0 if left is None else max(0, kv_len - q_len - left)
        pages, free = free[: counts[i]], free[counts[i] :]
        slots = (pages[:, None] * size + torch.arange(size)).flatten()
        used[slots[:kv_len]] = True
        seen = (torch.arange(counts[i]) + 1) * size > first
        table[i, : counts[i]] = pages.where(seen & (q_len > 0), 2**31 - 1)
    unused = ~used.view(num_pages, 1, size, 1).cuda()
    for pages in (k_pages,) if shape.latent else (k_pages, v_pages):
        pages.copy_(torch.randn(pages.shape, generator=g, device="cuda"))
        pages.masked_fill_(unused, math.nan)
    tokens = sum(q for q, _ in lengths)
    q = torch.randn(tokens + padding, shape.heads[0], dims[0], generator=g, device="cuda")
    q[tokens:] = math.nan
    kv_dtype = shape.kv_dtype or shape.dtype
    both = both.to(kv_dtype)
    k_pages, v_pages = (
        torch.as_strided(both, x.shape, x.stride(), x.storage_offset()) for x in (k_pages, v_pages)
    )
    if shape.kv_dtype is not None:
        for name in ("k_scale", "v_scale"):
            options[name] = torch.rand(kv_heads, generator=g, device="cuda") + 0.5
    if shape.sink:
        options["sink"] = torch.randn(shape.heads[0], generator=g, device="cuda")
    cu = torch.tensor([0, *(q for q, _ in lengths)]).cumsum(0)
    batch = PagedBatch(
        cu.int().cuda(),
        torch.tensor([kv for _, kv in lengths], dtype=torch.int32).cuda(),
        table.cuda(),
        max(shape.max_q_len, *(q for q, _ in lengths)),
        max(5000, *(kv for _, kv in lengths)),
    )
    return Case(q.to(shape.dtype), k_pages, v_pages, batch, options)


def skip_if_refused(family: str, shape: Shape) -> None:
    call = AttentionCall(
        "cuda", shape.dtype, *shape.heads, *shape.dims, -1, 0, False, shape.sink,
        page_size=shape.page_size, kv_dtype=shape.kv_dtype,
    )  # fmt: skip
    reason = PAGED_ATTENTION.refusal(call, family)
    if reason is not None:
        pytest.skip(reason)


def assert_close(got: Any, exact: Any, plain: Any) -> None:
    """Each row's error is at most twice that of the reference in the same dtype, plus a floor."""
    (out, lse), (exact_out, exact_lse), (plain_out, _) = got, exact, plain
    eps = torch.finfo(out.dtype).eps
    floor = 2 * eps * (exact_out.abs().amax(-1) + 0.05) + 2e-6
    error = (out.double() - exact_out).abs().amax(-1)
    allowed = 2 * (plain_out.double() - exact_out).abs().amax(-1) + floor
    assert bool((error <= allowed).all()), (error - allowed).amax()
    hidden = exact_lse == -math.inf
    assert torch.equal(lse == -math.inf, hidden)
    off = (lse.double() - exact_lse).masked_fill(hidden, 0).abs()
    assert bool((off <= 1e-4 * (1 + exact_lse.masked_fill(hidden, 0).abs())).all())


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@settings(max_examples=12, deadline=None)
@given(
    lengths=st.lists(st.tuples(Q_LENS, KV_LENS), min_size=1, max_size=6),
    padding=st.integers(0, 2),
    seed=st.integers(0, 2**31),
)
def test_matrix(family: str, shape: Shape, lengths: Lengths, padding: int, seed: int) -> None:
    skip_if_refused(family, shape)
    invariant = shape.invariant
    lengths = [(min(q, shape.max_q_len), kv) for q, kv in lengths]
    case = make(shape, lengths, seed, padding)
    torch.full((1 << 22,), math.nan, device="cuda")  # what outputs are likely to be made of
    got = case.run(family, batch_invariant=invariant)
    # The reference in q's dtype reads 8-bit pages through float32, as their values are.
    exact, plain = case.run("reference", torch.float64), case.run("reference")
    assert_close(got, exact, plain)
    again = case.run(family, batch_invariant=invariant)
    assert all(torch.equal(a, b) for a, b in zip(got, again, strict=True))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_thousand_engine_like_batches(family: str) -> None:
    rng = random.Random(0)
    shape = Shape()
    pool = make(shape, [(1, 16 * 3000)], 0)
    for _ in range(1000):
        count = rng.randint(1, 24)
        lengths = []
        for _ in range(count):
            kv = int(2 ** rng.uniform(0, 11))
            lengths.append((1 if rng.random() < 0.8 else rng.randint(1, min(kv, 200)), kv))
        # Pages are shared at random: every page of the pool holds finite numbers.
        width = max(-(-kv // 16) for _, kv in lengths)
        table = pool.batch.page_table[0, torch.randint(0, 3000, (count, width))]
        cu = torch.tensor([0, *(q for q, _ in lengths)]).cumsum(0).int().cuda()
        kv_lens = torch.tensor([kv for _, kv in lengths]).int().cuda()
        most = max(q for q, _ in lengths), max(kv for _, kv in lengths)
        q = torch.randn(int(cu[-1]), 8, 128, device="cuda").bfloat16()
        case = Case(q, pool.k_pages, pool.v_pages, PagedBatch(cu, kv_lens, table, *most), {})
        (out, lse), (plain, plain_lse) = case.run(family), case.run("reference")
        assert float((out - plain).abs().max()) < 0.03
        assert float((lse - plain_lse).abs().max()) < 1e-3


@pytest.mark.parametrize("family", FAMILIES)
def test_graph_replay_with_other_lengths_equals_eager(family: str) -> None:
    shape = Shape()
    lengths = [(1, 700), (4, 33), (1, 1), (1, 90), (1, 5000)]  # all have pages that others may see
    case = make(shape, lengths, 1, padding=6)
    case.batch = dataclasses.replace(case.batch, max_q_len=8, max_kv_len=6000)
    for pages in (case.k_pages, case.v_pages):
        pages.nan_to_num_(0.5)  # other lengths will see other slots
    arguments = (case.q, case.k_pages, case.v_pages, case.batch)

    def step() -> Tensor:
        made = plan_paged_attention(*arguments, kernel=family)
        return paged_attention(*arguments, plan=made)  # type: ignore[return-value]

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    case.q.normal_()
    for kv_lens, q_lens in (
        ([650, 40, 5, 90, 4097], [1, 4, 1, 0, 1]),
        ([16, 48, 1, 9, 5000], [8, 1, 0, 2, 2]),
        ([1, 0, 0, 0, 0], [1, 1, 0, 0, 0]),
    ):
        case.batch.kv_lens.copy_(torch.tensor(kv_lens))
        case.batch.cu_seqlens_q.copy_(torch.tensor([0, *q_lens]).cumsum(0))
        captured.fill_(math.nan)
        graph.replay()
        eager = paged_attention(*arguments, kernel=family)
        assert torch.equal(captured, eager)  # type: ignore[arg-type]
        exact = paged_attention(
            *(x.double() for x in arguments[:3]), case.batch, kernel="reference"
        )
        used = sum(q_lens)
        assert float((captured[:used].double() - exact[:used]).abs().max()) < 0.02  # type: ignore[index]
        assert bool((captured[used:] == 0).all())


@pytest.mark.parametrize("family", FAMILIES)
def test_a_request_alone_has_the_bits_it_has_among_two_hundred(family: str) -> None:
    rng = random.Random(3)
    shape = Shape()
    lengths = [(rng.choice([1, 1, 1, 7]), rng.randint(8, 3000)) for _ in range(200)]
    lengths[77] = (1, 20000)
    case = make(shape, lengths, 5)
    together, _ = case.run(family, batch_invariant=True)
    b = case.batch
    for i in (0, 77, 150, 199):
        begin, end = b.cu_seqlens_q[i : i + 2].tolist()
        alone = PagedBatch(
            torch.tensor([0, end - begin], dtype=torch.int32, device="cuda"),
            b.kv_lens[i : i + 1], b.page_table[i : i + 1], end - begin, lengths[i][1],
        )  # fmt: skip
        one = dataclasses.replace(case, q=case.q[begin:end], batch=alone)
        assert torch.equal(one.run(family, batch_invariant=True)[0], together[begin:end])


@settings(max_examples=100, deadline=None)
@given(batch=st.one_of(batches(), decode_batches()))
def test_the_gpu_makes_the_plan_of_the_specification(batch: tuple[SplitSpec, Lengths]) -> None:
    from rooftile.ops.split_kv import SPLIT_KV

    spec, lengths = batch
    # One set of compile-time constants, so that this measures plans and not compilers.
    spec = dataclasses.replace(
        spec, tile_rows=(16, 64), tile_cost=(100, 150), num_ctas=132, min_piece=2,
        piece=4 if spec.piece else 0,
    )  # fmt: skip
    q_lens, kv_lens = [q for q, _ in lengths], [kv for _, kv in lengths]
    idle = [0] * (spec.batch - len(lengths))
    cu = torch.tensor([0, *q_lens, *idle]).cumsum(0).int().cuda()
    lens = torch.tensor(kv_lens + idle, dtype=torch.int32).cuda()
    got = SPLIT_KV.handle(cu, lens, spec.numbers, None, None, "triton").tolist()
    expect_plan(got, spec, planned(spec, q_lens, kv_lens).words(spec))


@settings(max_examples=100, deadline=None)
@given(batch=sharing_batches())
def test_the_gpu_shares_prefixes_as_the_specification(
    batch: tuple[SplitSpec, Lengths, Prefixes],
) -> None:
    from rooftile.ops.split_kv import SPLIT_KV

    spec, lengths, (first, shared) = batch
    spec = dataclasses.replace(
        spec, tile_rows=(16, 64), tile_cost=(100, 150), num_ctas=132, min_piece=2, kv_tile=64
    )
    assume(spec.max_q_len * spec.group_size <= 64)
    missing = spec.groups - len(shared)
    first, shared = first + [first[-1]] * missing, shared + [0] * missing
    idle = [(0, 0)] * (spec.batch - len(lengths))
    q_lens, kv_lens = ([pair[i] for pair in lengths + idle] for i in (0, 1))
    numbers = ([0, *torch.tensor(q_lens).cumsum(0).tolist()], kv_lens, first, shared)
    cu, lens, *prefixes = (torch.tensor(x, dtype=torch.int32, device="cuda") for x in numbers)
    got = SPLIT_KV.handle(cu, lens, spec.numbers, *prefixes, "triton").tolist()
    expect_plan(got, spec, planned(spec, q_lens, kv_lens, first, shared).words(spec))


def expect_plan(got: list[int], spec: SplitSpec, expected: list[int]) -> None:
    layout = Layout(spec)
    ctas = slice(layout.ctas, layout.ctas + 2 * spec.num_ctas)
    merges = slice(layout.merges, layout.merges + 8 * expected[0])
    assert got[:8] == expected[:8]
    assert got[ctas] == expected[ctas]
    assert got[merges] == expected[merges]
    for first, count in zip(expected[ctas][::2], expected[ctas][1::2], strict=True):
        items = slice(layout.items + 12 * first, layout.items + 12 * (first + count))
        assert got[items] == expected[items]


def test_trees_of_speculated_tokens() -> None:
    case = make(Shape(), [(5, 900), (1, 3), (8, 8), (0, 50), (7, 2000)], 4, padding=1)
    case.batch = dataclasses.replace(case.batch, max_q_len=8)
    tree = torch.randint(0, 256, (22,), device="cuda")
    arguments = (case.q, case.k_pages, case.v_pages)
    got = tree_attention(*arguments, case.batch, tree, return_lse=True, kernel="triton")
    exact, plain = (
        tree_attention(*tensors, case.batch, tree, return_lse=True, kernel="reference")
        for tensors in ([x.double() for x in arguments], arguments)
    )
    assert_close(got, exact, plain)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("quantised", [False, True])
@pytest.mark.parametrize(("q_len", "page"), [(1, 16), (3, 64)])
def test_a_shared_prefix_gives_what_attention_without_sharing_gives(
    family: str, q_len: int, page: int, quantised: bool
) -> None:
    """Groups of 20 and 9 requests that share, and one request alone; some padding."""
    keys, own = (4800, 1024), 128
    g = torch.Generator("cuda").manual_seed(q_len)
    pages = [n // page for n in keys]
    count = sum(pages) + 30 * (own // page)
    k, v = torch.randn(2, count + 1, 2, page, 128, generator=g, device="cuda").bfloat16()
    k[-1], v[-1] = math.nan, math.nan
    scales: dict[str, Tensor] = {}
    if quantised:
        k, v = k.to(FP8), v.to(FP8)
        k_scale, v_scale = torch.rand(2, 2, generator=g, device="cuda") + 0.5
        scales = {"k_scale": k_scale, "v_scale": v_scale}
    order = torch.randperm(count, generator=g, device="cuda").int()
    prefixes, mine = order[: sum(pages)].split(pages), order[sum(pages) :].view(30, -1)
    table = torch.full((30, max(pages) + own // page), count, device="cuda", dtype=torch.int32)
    kv_lens = torch.randint(q_len, own + 1, (30,), generator=g, device="cuda").int()
    for i in range(30):
        shared = prefixes[i // 20] if i < 29 else prefixes[0][:0]
        table[i, : len(shared)] = shared
        table[i, len(shared) : len(shared) + own // page] = mine[i]
        kv_lens[i] += len(shared) * page
    groups = PrefixGroups(
        torch.tensor([0, 20, 29, 30, 30], device="cuda").int(),
        torch.tensor([*keys, 0, 0], device="cuda").int(),
        max(keys),
    )
    q = torch.randn(30 * q_len + 2, 8, 128, generator=g, device="cuda").bfloat16()
    cu = torch.arange(31, device="cuda").int() * q_len
    batch = PagedBatch(cu, kv_lens, table, q_len, max(keys) + own, groups)
    alone = dataclasses.replace(batch, prefix=None)
    sink = torch.randn(8, generator=g, device="cuda")
    plan = plan_paged_attention(q, k, v, batch, sink=sink, kernel=family)
    assert plan.split is not None
    assert plan.split.groups == 4
    assert plan.buffer[4] < plan.buffer[3]  # there are strips of groups
    arguments = {"sink": sink, "return_lse": True}
    shared_once, again, planned_inside = (
        paged_attention(q, k, v, batch, plan=p, kernel=family, **arguments, **scales)  # type: ignore[arg-type]
        for p in (plan, plan, None)
    )
    for got in (again, planned_inside):
        assert torch.equal(got[0], shared_once[0])
        assert torch.equal(got[1], shared_once[1])
    pages = [
        x.double() * (scales[name][:, None, None].double() if scales else 1.0)
        for x, name in ((k, "k_scale"), (v, "v_scale"))
    ]
    exact = paged_attention(q.double(), *pages, alone, kernel="reference", **arguments)  # type: ignore[arg-type]
    narrow = (x.to(q.dtype) for x in pages)
    plain = paged_attention(q, *narrow, alone, kernel="reference", **arguments)  # type: ignore[arg-type]
    assert_close(shared_once, exact, plain)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dims", [(128, 128), (64, 64), (192, 128), (72, 40)], ids=str)
@settings(max_examples=10, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 6), KV_LENS), min_size=1, max_size=6),
    heads=st.sampled_from([(8, 2), (5, 1), (4, 4)]),
    causal=st.booleans(),
    left=st.sampled_from([None, 0, 100]),
    padding=st.integers(0, 2),
    seed=st.integers(0, 2**31),
)
def test_ragged_batches_of_few_queries_follow_a_plan(
    family: str,
    dims: tuple[int, int],
    lengths: Lengths,
    heads: tuple[int, int],
    causal: bool,
    left: int | None,
    padding: int,
    seed: int,
) -> None:
    """Keys and values are slices of one tensor, whose rest is NaN, as are rows of no sequence."""
    g = torch.Generator("cuda").manual_seed(seed)
    lengths = [*lengths, (2, 4100)]
    q_lens, kv_lens = zip(*lengths, strict=True)
    used = sum(kv_lens)
    rows = torch.full((used + 3, heads[1], sum(dims) + 8), math.nan, device="cuda").bfloat16()
    rows[:used, :, : sum(dims)].normal_(generator=g)
    k, v = rows[..., : dims[0]], rows[..., dims[0] : sum(dims)]
    q = torch.randn(sum(q_lens) + padding, heads[0], dims[0], generator=g, device="cuda").bfloat16()
    most = max(q_lens), max(kv_lens)
    assert follows_plan(k, v, *most, heads[0] // heads[1])
    cu = [torch.tensor([0, *n], device="cuda").cumsum(0).int() for n in (q_lens, kv_lens)]
    sink = torch.randn(heads[0], generator=g, device="cuda")
    options: dict[str, Any] = {"sink": sink, "causal": causal, "window": (left, None)}
    got, exact, plain = (
        attention_varlen(
            *tensors, *cu, max_q_len=most[0], max_kv_len=most[1], return_lse=True, kernel=kernel,
            **options,
        )
        for tensors, kernel in (
            ((q, k, v), family),
            ((q.double(), k.double(), v.double()), "reference"),
            ((q, k, v), "reference"),
        )
    )  # fmt: skip
    assert_close(got, exact, plain)


def test_a_plan_serves_many_calls_and_no_others() -> None:
    case = make(Shape(), [(1, 300), (3, 77)], 2)
    arguments = (case.q, case.k_pages, case.v_pages, case.batch)
    made = plan_paged_attention(*arguments)
    assert torch.equal(paged_attention(*arguments, plan=made), paged_attention(*arguments))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="the plan was made for"):
        paged_attention(*arguments, plan=made, window=(3, 0))
    with pytest.raises(ValueError, match="kernel='reference' but the plan is for"):
        paged_attention(*arguments, plan=made, kernel="reference")


@pytest.mark.parametrize("planned", [False, True])
@pytest.mark.parametrize(
    "shape",
    [
        Shape(max_q_len=FEW),
        Shape(sink=True, options=(("window", (100, 0)), ("softmax_scale", -0.1))),
        Shape(kv_dtype=FP8, heads=(32, 8), max_q_len=FEW),
        Shape(page_size=1, heads=(4, 4), max_q_len=FEW),
    ],
    ids=str,
)
def test_calls_of_a_known_kind(shape: Shape, planned: bool) -> None:
    """They go straight to a kernel; with tensors of their own: test_paged_kinds_gpu.py."""
    batches = [[(1, 300), (3, 77)], [(3, 5), (1, 260)], [(2, 0), (2, 301)]]
    for seed, lengths in enumerate(batches):
        case = make(shape, lengths, seed)
        case.batch = dataclasses.replace(case.batch, max_q_len=3, max_kv_len=301)
        if seed == 2:  # where no tensor map can begin
            moved = torch.empty(case.q.numel() + 1, dtype=case.q.dtype, device="cuda")[1:]
            case.q = moved.view(case.q.shape).copy_(case.q)
        arguments = (case.q, case.k_pages, case.v_pages, case.batch)
        of_plan = {
            k: v for k, v in case.options.items() if k in ("window", "causal", "softcap", "sink")
        }
        plan = plan_paged_attention(*arguments, **of_plan) if planned else None
        with torch.autocast("cuda"):  # which the dispatcher has to see
            wanted = case.run("auto", plan=plan)
        for _ in range(2):
            got = case.run("auto", plan=plan)
            assert all(torch.equal(x, y) for x, y in zip(got, wanted, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kv_dtype", [None, FP8])
@pytest.mark.parametrize("interleaved", [None, False, True])
def test_append(dtype: torch.dtype, kv_dtype: torch.dtype | None, interleaved: bool | None) -> None:
    g = torch.Generator("cuda").manual_seed(0)
    tokens, heads, dims, page_size = 50, 5, (96, 64), 16
    packed = torch.randn(tokens, heads, 200, generator=g, device="cuda").to(dtype)
    k, v = packed[..., : dims[0]], packed[..., dims[0] : sum(dims)]
    slots = torch.randperm(10 * page_size, generator=g, device="cuda")[:tokens]
    slots[::7] = -1
    k[::7] = v[::7] = math.nan
    options: dict[str, Any] = {}
    if interleaved is not None:
        positions = torch.randint(0, 99, (tokens,), generator=g, device="cuda")
        positions[::7] = -3
        cos_sin = torch.randn(99, 2, 40, generator=g, device="cuda")
        options = {"positions": positions, "cos_sin": cos_sin, "interleaved": interleaved}
    if kv_dtype is not None:
        options["k_scale"], options["v_scale"] = (
            torch.rand(2, heads, generator=g, device="cuda") / 99
        )
    pools = {}
    for kernel in ("triton", "reference"):
        pools[kernel] = [
            torch.full((10, heads, page_size, d), 3.0, device="cuda").to(kv_dtype or dtype)
            for d in dims
        ]
        append_kv(k, v, *pools[kernel], slots, **options, kernel=kernel)
    # A rotation rounds twice, and quantising puts what rounding has moved into the next step.
    unit = 0.07 if kv_dtype else 4 * torch.finfo(dtype).eps
    for got, expected in zip(pools["triton"], pools["reference"], strict=True):
        error = (got.float() - expected.float()).abs()
        assert bool((error <= unit * (expected.float().abs() + 1)).all())
    assert torch.equal(
        pools["triton"][1].view(torch.uint8), pools["reference"][1].view(torch.uint8)
    )


def test_merge_attention_states() -> None:
    for n, dtype, dim in ((0, torch.float32, 8), (1, torch.bfloat16, 64), (37, torch.float16, 72)):
        outs = torch.randn(n, 9, 3, dim, device="cuda").to(dtype)
        lses = torch.randn(n, 9, 3, device="cuda") * 4
        lses[:, 2] = -math.inf
        outs[:, 2] = math.nan
        got = merge_attention_states(outs, lses, kernel="triton")
        exact = merge_attention_states(outs.double(), lses.double(), kernel="reference")
        assert float((got[0].double() - exact[0]).abs().amax()) <= 4 * torch.finfo(dtype).eps
        torch.testing.assert_close(got[1].double(), exact[1], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_offsets_beyond_two_to_the_31(family: str) -> None:
    heads, page_size, dim = 8, 16, 128
    num_pages = 2**31 // (2 * heads * page_size * dim) + 40
    both = torch.empty(num_pages, 2, heads, page_size, dim, dtype=torch.bfloat16, device="cuda")
    k_pages, v_pages = both.unbind(1)
    last = torch.arange(num_pages - 20, num_pages, device="cuda")
    both[-20:].normal_()
    k = torch.randn(5, heads, dim, device="cuda").bfloat16()
    append_kv(k, -k, k_pages, v_pages, last[-1] * page_size + torch.arange(5, device="cuda"))
    assert torch.equal(k_pages[-1, :, :5].transpose(0, 1), k)
    lens = torch.tensor([20 * page_size], dtype=torch.int32, device="cuda")
    cu = torch.tensor([0, 2], dtype=torch.int32, device="cuda")
    q = torch.randn(2, heads, dim, device="cuda").bfloat16()
    far = paged_attention(
        q, k_pages, v_pages, PagedBatch(cu, lens, last[None].int(), 2, 320), kernel=family
    )
    near = PagedBatch(cu, lens, torch.arange(20, device="cuda")[None].int(), 2, 320)
    copied = both[-20:].clone()
    assert torch.equal(far, paged_attention(q, *copied.unbind(1), near, kernel=family))  # type: ignore[arg-type]
