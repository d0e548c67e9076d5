"""The Hopper kernels of paged attention in the simulator: host path and device source against float64.

What a simulator cannot check (layouts, swizzles, visibility) tests/ops/test_paged_gpu.py checks on a
GPU, over the same features.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rooftile.kernels.reference.attention import attention_varlen
from rooftile.kernels.reference.paged import paged_attention as reference
from rooftile.ops.attention import AttentionCall
from rooftile.planning.split_kv import plan
from rooftile.types import SplitSpec
from tests.kernels.test_gluon_attention import assert_close
from tests.support.gluon_sim import load_simulated, simulation

KERNEL, CONFIG = load_simulated(
    "rooftile.kernels.gluon.paged.forward", "rooftile.kernels.gluon.paged.config"
)
WINDOWS = [(-1, -1), (-1, 0), (-1, 0), (40, 0), (0, 0), (70, 10), (-1, 30), (20, -1)]
Lengths = Sequence[tuple[int, int]]  # query, keys


@pytest.fixture(autouse=True)
def three_multiprocessors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KERNEL, "_ctas", lambda device: 3)


class Batch:
    """Random requests in a pool whose pages are dealt out at random, unused memory full of NaN."""

    def __init__(
        self, lengths: Lengths, heads: tuple[int, int], dims: tuple[int, int], page_size: int,
        dtype: torch.dtype = torch.bfloat16, padding: int = 0, left: int = -1, seed: int = 0,
        shared: bool = False, quantised: bool = False,
    ) -> None:  # fmt: skip
        generator = torch.Generator().manual_seed(seed)
        self.lengths = lengths
        pages = [-(-kv_len // page_size) for _, kv_len in lengths]
        total = sum(pages) + 2
        order = torch.randperm(total, generator=generator).tolist()
        kv_heads = heads[1]
        if shared:  # keys and values of a page in one piece, as the engine allocates them
            both = torch.full((total, kv_heads, page_size, sum(dims)), math.nan, dtype=dtype)
            self.k_pages, self.v_pages = both[..., : dims[0]], both[..., dims[0] :]
        else:
            self.k_pages, self.v_pages = (
                torch.full((total, kv_heads, page_size, dim), math.nan, dtype=dtype) for dim in dims
            )
        self.table = torch.full((len(lengths), max([*pages, 1]) + 1), 10**6, dtype=torch.int32)
        for request, (q_len, kv_len) in enumerate(lengths):
            gone = max(0, kv_len - q_len - left) // page_size if left >= 0 else 0
            for i in range(pages[request]):
                page = order.pop()
                if i >= gone:  # pages before the window may be gone
                    self.table[request, i] = page
                rows = min(page_size, kv_len - i * page_size)
                for pool in (self.k_pages, self.v_pages):
                    shape = (kv_heads, rows, pool.shape[3])
                    pool[page, :, :rows] = torch.randn(shape, generator=generator).to(dtype)
        self.scales: tuple[Tensor | None, Tensor | None] = (None, None)
        if quantised:
            self.k_pages, self.v_pages = (
                x.to(torch.float8_e4m3fn) for x in (self.k_pages, self.v_pages)
            )
            self.scales = tuple(torch.rand(kv_heads, generator=generator) + 0.5 for _ in range(2))  # type: ignore[assignment]
        tokens = sum(q_len for q_len, _ in lengths)
        self.q = torch.full((tokens + padding, heads[0], dims[0]), math.nan, dtype=dtype)
        self.q[:tokens] = torch.randn((tokens, *self.q.shape[1:]), generator=generator).to(dtype)
        starts = torch.tensor([0, *(q_len for q_len, _ in lengths)]).cumsum(0)
        self.cu_seqlens_q = starts.to(torch.int32)
        self.kv_lens = torch.tensor([kv_len for _, kv_len in lengths], dtype=torch.int32)
        self.max_q_len = max((q_len for q_len, _ in lengths), default=0)
        self.max_kv_len = max((kv_len for _, kv_len in lengths), default=0)

    @property
    def arguments(self) -> tuple[Any, ...]:
        tensors = (self.q, self.k_pages, self.v_pages, self.cu_seqlens_q, self.kv_lens, self.table)
        return (*tensors, self.max_q_len, self.max_kv_len)

    def spec(self, left: int, right: int, invariant: bool = False, config: Any = None) -> SplitSpec:
        call = AttentionCall(
            "cpu", self.q.dtype, self.q.shape[1], self.k_pages.shape[1], self.q.shape[2],
            self.v_pages.shape[3], left, right, has_softcap=False, has_sink=False,
            page_size=self.k_pages.shape[2], batch_invariant=invariant,
            kv_dtype=None if self.k_pages.dtype == self.q.dtype else self.k_pages.dtype,
        )  # fmt: skip
        capacities = (len(self.lengths), self.q.shape[0], self.max_q_len, self.max_kv_len)
        spec: SplitSpec = KERNEL.split(call, *capacities, config=config)
        return spec

    def planned(self, spec: SplitSpec) -> Tensor:
        made = plan(spec, [q for q, _ in self.lengths], [kv for _, kv in self.lengths])
        return torch.tensor(made.words(spec), dtype=torch.int32)


def check(
    batch: Batch, sink: Tensor | None = None, left: int = -1, right: int = 0, softcap: float = 0.0,
    scale: float = 0.125, seed: int = 0, config: Any = None, **changes: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    spec = replace(batch.spec(left, right, config=config), **changes)
    options = (sink, left, right, softcap, scale, *batch.scales, False)
    wide = [x.double() if x.is_floating_point() else x for x in batch.arguments[:6]]
    for i, factor in zip((1, 2), batch.scales, strict=True):
        if factor is not None:
            wide[i] = wide[i] * factor[:, None, None]
    arguments: tuple[Any, ...] = (*wide, *batch.arguments[6:], *options[:5])
    exact = reference(*(*arguments, None, None, False, None, []))
    with simulation(seed=seed, residency=1 + seed % 3):
        got: tuple[Tensor, Tensor] = KERNEL.paged_attention(
            *batch.arguments, *options, batch.planned(spec), spec.numbers, config=config
        )
    assert_close(got, exact)
    return got


@settings(max_examples=40)
@given(
    lengths=st.lists(
        st.tuples(
            st.sampled_from([1, 1, 1, 0, 3, 8]),
            st.sampled_from([0, 1, 15, 16, 17, 63, 64, 65, 200, 400]),
        ),
        min_size=1,
        max_size=5,
    ),
    heads=st.sampled_from([(4, 1), (4, 2), (7, 1), (3, 3), (10, 2)]),
    dims=st.sampled_from([(64, 64), (128, 128), (96, 96), (128, 64), (256, 256), (40, 72)]),
    page_size=st.sampled_from([8, 16, 32, 64, 128]),
    window=st.sampled_from(WINDOWS),
    softcap=st.sampled_from([0.0, 0.0, 15.0]),
    has_sink=st.booleans(),
    dtype=st.sampled_from([torch.bfloat16, torch.float16]),
    padding=st.sampled_from([0, 0, 3]),
    shared=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_decode(
    lengths: Lengths, heads: tuple[int, int], dims: tuple[int, int], page_size: int,
    window: tuple[int, int], softcap: float, has_sink: bool, dtype: torch.dtype, padding: int,
    shared: bool, seed: int,
) -> None:  # fmt: skip
    batch = Batch(lengths, heads, dims, page_size, dtype, padding, window[0], seed,
                  shared and dims[0] == dims[1])  # fmt: skip
    sink = torch.randn(heads[0]) if has_sink else None
    check(batch, sink, *window, softcap, dims[0] ** -0.5, seed=seed)


@settings(max_examples=25)
@given(
    lengths=st.lists(
        st.tuples(st.sampled_from([1, 1, 2, 0, 25]), st.sampled_from([0, 1, 17, 63, 65, 200, 400])),
        min_size=1,
        max_size=4,
    ),
    heads=st.sampled_from([(4, 1), (4, 2), (7, 1), (3, 3), (10, 2)]),
    dims=st.sampled_from([(128, 128), (96, 128), (256, 256), (64, 64)]),
    page_size=st.sampled_from([8, 16, 64, 128]),
    window=st.sampled_from(WINDOWS),
    softcap=st.sampled_from([0.0, 0.0, 15.0]),
    has_sink=st.booleans(),
    quantised=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_few_rows(
    lengths: Lengths, heads: tuple[int, int], dims: tuple[int, int], page_size: int,
    window: tuple[int, int], softcap: float, has_sink: bool, quantised: bool, seed: int,
) -> None:  # fmt: skip
    batch = Batch(lengths, heads, dims, page_size, left=window[0], seed=seed, quantised=quantised)
    sink = torch.randn(heads[0]) if has_sink else None
    rows = batch.max_q_len * heads[0] // heads[1]
    config = CONFIG.config_of(*dims, rows, quantised)
    if rows > 16 and not quantised:
        config = replace(CONFIG.config_of(*dims, 8, False), few=32)
    check(batch, sink, *window, softcap, dims[0] ** -0.5, seed=seed, config=config)


@settings(max_examples=15)
@given(
    lengths=st.lists(
        st.tuples(st.sampled_from([1, 1, 30, 100]), st.sampled_from([1, 64, 129, 300])),
        min_size=1,
        max_size=4,
    ),
    heads=st.sampled_from([(4, 1), (5, 1)]),
    dim=st.sampled_from([64, 128, 256]),
    page_size=st.sampled_from([16, 64, 128]),
    window=st.sampled_from(WINDOWS),
    few_keys=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_prefill_and_decode_together(
    lengths: Lengths, heads: tuple[int, int], dim: int, page_size: int,
    window: tuple[int, int], few_keys: bool, seed: int,
) -> None:  # fmt: skip
    batch = Batch([(100, 130), *lengths], heads, (dim, dim), page_size, left=window[0], seed=seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(KERNEL, "has_few_keys", lambda *_: few_keys)
        check(batch, None, *window, seed=seed)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("quantised", [False, True])
def test_whole_strips_are_drawn(quantised: bool, seed: int) -> None:
    lengths = [(200, 260), (1, 90), (150, 150)]
    batch = Batch(lengths, (4, 2), (128, 128), 16, seed=seed, quantised=quantised, padding=2)
    spec = batch.spec(-1, 0)
    assert spec.whole
    found = plan(replace(spec, whole=1), [q for q, _ in lengths], [kv for _, kv in lengths])
    assert found.drawn == found.strips > spec.num_ctas
    check(batch, seed=seed, whole=1)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("loaders", [1, 2])
def test_more_shares_than_ctas_are_drawn(loaders: int, seed: int) -> None:
    batch = Batch([(1, 700), (2, 90), (1, 0), (1, 333)], (4, 1), (128, 128), 16, seed=seed)
    for few in (True, False):
        config = CONFIG.SMALL[128][0] if few else replace(CONFIG.LARGE[128], k_stages=0, q_stages=2)
        config = replace(config, drawn=True, loaders=loaders)
        check(batch, seed=seed, config=config, num_ctas=11)


@pytest.mark.parametrize(
    "lengths", [[(1, 700), (2, 90), (0, 5)], [(200, 260), (1, 90), (150, 150)]]
)
def test_an_lse_that_nobody_reads_is_not_written(lengths: Lengths) -> None:
    batch = Batch(lengths, (4, 2), (128, 128), 16, padding=2)
    spec = batch.spec(-1, 0)
    options = (None, -1, 0, 0.0, 0.125, None, None, False, batch.planned(spec), spec.numbers)
    torch.use_deterministic_algorithms(True)  # memory is NaN before it is written
    try:
        with simulation():
            read, unread = (
                KERNEL.paged_attention(*batch.arguments, *options, with_lse=with_lse)
                for with_lse in (True, False)
            )
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.equal(read[0], unread[0])
    assert not bool(read[1].isnan().any())
    assert bool(unread[1].isnan().all())


@pytest.mark.parametrize("seed", range(3))
def test_a_plan_can_be_followed_again(seed: int) -> None:
    """Whoever draws last leaves the counters of the plan as they were."""
    batch = Batch([(1, 700), (100, 300)], (4, 1), (128, 128), 64, seed=seed)
    spec = replace(batch.spec(-1, 0), whole=1, num_ctas=3)
    words = batch.planned(spec)
    before = words.clone()
    options = (None, -1, 0, 0.0, 0.125, None, None, False, words, spec.numbers)
    with simulation(seed=seed, residency=3):
        first, second = [KERNEL.paged_attention(*batch.arguments, *options) for _ in range(2)]
    assert torch.equal(words, before)
    assert torch.equal(first[0], second[0])


@pytest.mark.parametrize("left", [-1, 150])
@pytest.mark.parametrize("heads", [(4, 1), (5, 1)])
@pytest.mark.parametrize(
    ("dim", "page_size", "few_keys"),
    [(128, 16, False), (128, 128, False), (64, 32, True), (128, 16, True), (128, 64, True)],
)
def test_scores_that_rise_far_above_those_of_the_last_keys(
    dim: int, page_size: int, few_keys: bool, heads: tuple[int, int], left: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(KERNEL, "anchored_from", lambda config, right: 1)
    monkeypatch.setattr(KERNEL, "has_few_keys", lambda *_: few_keys)
    lengths = [(90, 300), (40, 400), (1, 260)]
    batch = Batch(lengths, heads, (dim, dim), page_size, left=left)
    for request, (_, kv_len) in enumerate(lengths):
        for key in range(0, kv_len - 140, 3):  # hundreds of natural units above the others
            page = int(batch.table[request, key // page_size])
            if page < 10**6:
                batch.k_pages[page, :, key % page_size] *= 60.0
    check(batch, left=left, scale=0.1)
    check(batch, torch.full((heads[0],), 200.0), left=left, scale=0.1, softcap=300.0)
    check(batch, left=left, scale=0.1, whole=1)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    ("dim", "page_size", "few_keys"),
    [(128, 64, False), (128, 16, False), (64, 64, False), (128, 64, True), (128, 16, True)],
)
def test_an_anchored_maximum(
    dim: int, page_size: int, few_keys: bool, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(KERNEL, "anchored_from", lambda config, right: 1)
    monkeypatch.setattr(KERNEL, "has_few_keys", lambda *_: few_keys)
    lengths = [(100, 130), (1, 300), (300, 370), (30, 20)]
    for left, right in ((-1, 0), (-1, -1), (70, 0), (40, 30)):
        batch = Batch(lengths, (4, 1), (dim, dim), page_size, left=left, seed=seed)
        check(batch, None, left, right, seed=seed)


@pytest.mark.parametrize("left", [-1, 150])
@pytest.mark.parametrize(
    ("heads", "dims"), [((4, 1), (128, 128)), ((1, 1), (64, 64)), ((9, 9), (96, 96))]
)
def test_ragged_keys_as_pages_that_overlap(
    heads: tuple[int, int], dims: tuple[int, int], left: int
) -> None:
    """As `attention_varlen` attends to few queries by a plan: the last pages begin beyond those that exist
    in full, and their rows end with the keys."""
    pytest.importorskip("triton")
    from rooftile.kernels.triton.ragged_pages import PAGE, pages_of

    lengths = [(20, 400), (3, 131), (1, 128), (5, 1), (0, 0), (2, 130)]
    batch = Batch(lengths, heads, dims, PAGE, padding=3)
    starts = torch.tensor([0, *(kv_len for _, kv_len in lengths)]).cumsum(0)
    k, v = (torch.randn(int(starts[-1]), heads[1], dim).to(batch.q.dtype) for dim in dims)
    batch.k_pages, batch.v_pages = pages_of(k), pages_of(v)
    for i, (_, kv_len) in enumerate(lengths):
        used = -(-kv_len // PAGE)
        batch.table[i] = 10**6
        batch.table[i, :used] = starts[i] + PAGE * torch.arange(used)
    sink = torch.randn(heads[0])
    cu = (
        torch.cat([batch.cu_seqlens_q, torch.tensor([len(batch.q)])]),
        torch.cat([starts, starts[-1:]]),
    )
    spec = batch.spec(left, 0)
    with simulation(seed=left + 1):
        got = KERNEL.paged_attention(
            *batch.arguments, sink, left, 0, 0.0, 0.125, None, None, False, batch.planned(spec),
            spec.numbers,
        )  # fmt: skip
    exact = attention_varlen(
        batch.q.nan_to_num().double(), k.double(), v.double(), *cu, batch.max_q_len, batch.max_kv_len,
        sink.double(), left, 0, 0.0, 0.125,
    )  # fmt: skip
    count = int(batch.cu_seqlens_q[-1])
    assert_close((got[0][:count], got[1][:count]), (exact[0][:count], exact[1][:count]))
    assert bool((got[0][count:] == 0).all())
    assert bool((got[1][count:] == -math.inf).all())


@pytest.mark.parametrize("seed", range(10))  # every policy of the scheduler, twice
def test_any_order_of_events(seed: int) -> None:
    batch = Batch([(1, 700), (2, 90), (1, 0), (1, 333)], (4, 1), (128, 128), 16, seed=seed)
    check(batch, seed=seed)


def test_same_inputs_same_bits_whatever_the_order() -> None:
    batch = Batch([(1, 700), (2, 90)], (4, 2), (64, 64), 16)
    first, *others = [check(batch, seed=seed) for seed in range(3)]
    for out, lse in others:
        assert torch.equal(out, first[0])
        assert torch.equal(lse, first[1])


def test_a_request_alone_and_among_others_gives_the_same_bits() -> None:
    lengths = [(1, 500), (3, 64), (1, 900), (1, 1)]
    batch = Batch(lengths, (4, 2), (64, 64), 16)
    spec = replace(batch.spec(-1, 0, invariant=True), piece=2)
    options = (None, -1, 0, 0.0, 0.125, None, None, True)
    with simulation():
        together = KERNEL.paged_attention(
            *batch.arguments, *options, batch.planned(spec), spec.numbers
        )
        start = 0
        for i, (q_len, kv_len) in enumerate(lengths):
            one = Batch([lengths[i]], (4, 2), (64, 64), 16)
            one.q, one.k_pages, one.v_pages = batch.q[start:][:q_len], batch.k_pages, batch.v_pages
            one.table = batch.table[i : i + 1]
            spec = replace(one.spec(-1, 0, invariant=True), piece=2, num_ctas=2)
            alone = KERNEL.paged_attention(
                *one.arguments, *options, one.planned(spec), spec.numbers
            )
            for mine, ours in zip(alone, together, strict=True):
                assert torch.equal(mine, ours[start : start + q_len]), (i, kv_len)
            start += q_len


@pytest.mark.parametrize("scale", [-0.2, 0.0, 3.0])
def test_any_scale(scale: float) -> None:
    check(Batch([(1, 70), (2, 140)], (2, 1), (64, 64), 16), scale=scale)


def test_pools_as_they_come() -> None:
    batch = Batch([(1, 70), (2, 140)], (4, 2), (64, 64), 16)
    transposed = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in batch.arguments[1:3]]
    batch.k_pages, batch.v_pages = transposed  # [pages, page_size, heads, dim] in memory
    check(batch)
    batch.k_pages = torch.nn.functional.pad(batch.k_pages, (0, 3))[..., :64]
    assert KERNEL.page_pitch(batch.k_pages) is None  # the copy engine cannot take it
    check(batch)


@pytest.mark.parametrize("scale", [0.125, -0.125])
@pytest.mark.parametrize("sink", [None, torch.tensor([0.5, -1.0, 2.0, 0.0])])
def test_a_bound_call_is_the_call(scale: float, sink: Tensor | None) -> None:
    """For tensors of the same kind wherever they begin; `split_kv` is Triton's, so with a plan."""
    first = Batch([(1, 70), (3, 130)], (4, 2), (64, 64), 16)
    spec = first.spec(-1, 0)
    options = (sink, -1, 0, 0.0, scale, None, None, False)
    plans = first.planned(spec), spec.numbers
    bound = KERNEL.bind(*first.arguments, *options, *plans)
    for seed in range(3):
        other = Batch(first.lengths, (4, 2), (64, 64), 16, seed=seed)
        if seed == 2:  # where no tensor map can begin
            other.q = torch.cat([other.q.new_empty(1), other.q.flatten()])[1:].view(other.q.shape)
        with simulation(seed=seed):
            got = bound(*other.arguments[:6], sink, None, None, plans[0])
        with simulation(seed=seed):
            wanted = KERNEL.paged_attention(*other.arguments, *options, *plans)
        assert all(torch.equal(x, y) for x, y in zip(got, wanted, strict=True))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("lies", ["wide", "transposed", "apart"])
def test_page_tables_as_they_come(lies: str, dtype: torch.dtype) -> None:
    batch = Batch([(1, 70), (3, 130)], (4, 2), (64, 64), 16)
    table, entries = batch.table.to(dtype), batch.table.shape[1]
    if lies == "transposed":
        batch.table = table.T.contiguous().T
    else:
        step = 2 if lies == "apart" else 1
        wide = torch.full((2, 2 * entries + 3), 10**6, dtype=dtype)
        wide[:, : step * entries : step] = table
        batch.table = wide[:, : step * entries : step]
    got = check(batch)
    spec = batch.spec(-1, 0)
    plans = batch.planned(spec), spec.numbers
    bound = KERNEL.bind(*batch.arguments, None, -1, 0, 0.0, 0.125, None, None, False, *plans)
    with simulation():
        again = bound(*batch.arguments[:6], None, None, None, plans[0])
    assert all(torch.equal(x, y) for x, y in zip(again, got, strict=True))


@pytest.mark.parametrize("lengths", [[(5, 130), (1, 90)], [(200, 260)]])
def test_a_plan_of_fixed_pieces_is_followed_by_calls_that_ask_for_none(lengths: Lengths) -> None:
    """The plan says of which tiles, whatever the call would have without it."""
    batch = Batch(lengths, (4, 2), (128, 128), 16)
    spec = batch.spec(-1, 0, invariant=True)
    options = (None, -1, 0, 0.0, 0.125, None, None)
    with simulation():
        asked, unasked = (
            KERNEL.paged_attention(
                *batch.arguments, *options, invariant, batch.planned(spec), spec.numbers
            )
            for invariant in (True, False)
        )
    assert all(torch.equal(x, y) for x, y in zip(asked, unasked, strict=True))


def test_nothing_to_do() -> None:
    for batch in (
        Batch([], (4, 2), (64, 64), 16, padding=2),
        Batch([(0, 5)], (4, 2), (64, 64), 16),
    ):
        got = KERNEL.paged_attention(
            *batch.arguments, None, -1, 0, 0.0, 0.125, None, None, False, None, []
        )
        assert not bool(got[0].any())
        assert bool((got[1] == -math.inf).all())


def test_reasons_for_refusal() -> None:
    call = {
        "device": "cuda",
        "dtype": torch.bfloat16,
        "kv_dtype": None,
        "k_dim": 128,
        "v_dim": 128,
        "page_size": 16,
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
        assert KERNEL.supports(SimpleNamespace(**call)) is None
        for change, reason in (
            ({"page_size": 4}, "page_size is 4; it takes powers of two from 8 on"),
            ({"page_size": 24}, "page_size is 24; it takes powers of two from 8 on"),
            ({"v_dim": 512}, "v_dim is 512; it takes multiples of 8 from 32 to 256"),
            ({"k_dim": 40, "kv_dtype": torch.float8_e4m3fn},
             "k_dim is 40; it takes multiples of 16 from 32 to 256"),
            ({"dtype": torch.float32}, "it takes bfloat16 and float16, not torch.float32"),
            ({"kv_dtype": torch.int8},
             "it takes pages of q's dtype or float8_e4m3fn, not torch.int8"),
        ):  # fmt: skip
            assert KERNEL.supports(SimpleNamespace(**{**call, **change})) == reason
    assert KERNEL.supports(SimpleNamespace(**{**call, "device": "cpu"})) == (
        "it needs an NVIDIA GPU of compute capability 9.0, not a cpu"
    )
