"""The GPU kernels behind `attention` and `attention_varlen`, through the operators, on a GPU.

Against the reference kernel in float64 on the same device, which tests/ops/test_attention.py has
compared with an oracle written row by row.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rooftile.ops.attention import ATTENTION, attention, attention_varlen

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
FAMILIES = ("gluon", "triton")
LENGTHS = st.sampled_from([0, 1, 2, 63, 64, 65, 127, 128, 129, 200, 257, 384, 600])
DIMS = [(64, 64), (128, 128), (256, 256), (32, 32), (96, 96), (192, 128), (72, 40)]
HEADS = st.sampled_from([(1, 1), (4, 4), (6, 2), (5, 1), (9, 3)])
SIDES = st.sampled_from([None, 0, 1, 17, 128, 300])
OPTIONS = st.fixed_dictionaries(
    {
        "causal": st.booleans(),
        "window": st.one_of(st.none(), st.tuples(SIDES, SIDES)),
        "softcap": st.sampled_from([0.0, 0.0, 20.0]),
        "softmax_scale": st.sampled_from([None, 0.3, 0.02]),
    }
)
SINKS = st.sampled_from([None, None, 0.5, 40.0, -math.inf])
DTYPES = st.sampled_from([torch.bfloat16, torch.float16])
MANY = settings(max_examples=25, deadline=None)  # times families and dims


def random(g: torch.Generator, dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(shape, generator=g, device="cuda", dtype=torch.float32).to(dtype)


def assert_close(
    got: tuple[Tensor, Tensor], exact: tuple[Tensor, Tensor], plain: tuple[Tensor, Tensor]
) -> None:
    """Each row's error is at most twice that of the reference in the same dtype, plus a floor."""
    (out, lse), (exact_out, exact_lse), (plain_out, _) = got, exact, plain
    if out.numel():
        eps = torch.finfo(out.dtype).eps
        floor = 2 * eps * (exact_out.abs().amax(-1) + 0.05)
        error = (out.double() - exact_out).abs().amax(-1)
        allowed = 2 * (plain_out.double() - exact_out).abs().amax(-1) + floor
        assert bool((error <= allowed).all()), (error - allowed).amax()
    assert lse.dtype == torch.float32
    hidden = exact_lse == -math.inf
    assert torch.equal(lse == -math.inf, hidden)
    off = (lse.double() - exact_lse).masked_fill(hidden, 0).abs()
    assert bool((off <= 1e-4 * (1 + exact_lse.masked_fill(hidden, 0).abs())).all())


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dims", DIMS, ids=str)
@MANY
@given(
    batch=st.integers(0, 3), q_len=LENGTHS, kv_len=LENGTHS, heads=HEADS, dtype=DTYPES,
    options=OPTIONS, sink=SINKS, transposed=st.booleans(), seed=st.integers(0, 2**32),
)  # fmt: skip
def test_dense(
    family: str, dims: tuple[int, int], batch: int, q_len: int, kv_len: int, heads: tuple[int, int],
    dtype: torch.dtype, options: dict[str, object], sink: float | None, transposed: bool, seed: int,
) -> None:  # fmt: skip
    g = torch.Generator("cuda").manual_seed(seed)

    def tensor(length: int, count: int, dim: int) -> Tensor:
        if transposed:  # [batch, heads, length, dim] seen as [batch, length, heads, dim]
            return random(g, dtype, batch, count, length, dim).transpose(1, 2)
        return random(g, dtype, batch, length, count, dim)

    q = tensor(q_len, heads[0], dims[0])
    k, v = tensor(kv_len, heads[1], dims[0]), tensor(kv_len, heads[1], dims[1])
    sinks = None if sink is None else torch.full((heads[0],), sink, device="cuda")
    # Memory full of NaN, freed at once: what the allocator is likely to make the output of.
    torch.full((batch, q_len, heads[0], dims[1]), torch.nan, dtype=dtype, device="cuda")
    results = {
        name: attention(*tensors, sink=sinks, return_lse=True, kernel=kernel, **options)  # type: ignore[arg-type]
        for name, kernel, tensors in (
            ("got", family, (q, k, v)),
            ("exact", "reference", (q.double(), k.double(), v.double())),
            ("plain", "reference", (q, k, v)),
        )
    }
    assert_close(results["got"], results["exact"], results["plain"])


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dims", DIMS, ids=str)
@MANY
@given(
    lengths=st.lists(st.tuples(LENGTHS, LENGTHS), max_size=5), heads=HEADS,
    dtype=DTYPES, options=OPTIONS, sink=SINKS, seed=st.integers(0, 2**32),
)  # fmt: skip
def test_ragged(
    family: str, dims: tuple[int, int], lengths: list[tuple[int, int]], heads: tuple[int, int],
    dtype: torch.dtype, options: dict[str, object], sink: float | None, seed: int,
) -> None:  # fmt: skip
    g = torch.Generator("cuda").manual_seed(seed)
    q_lens, kv_lens = [a for a, _ in lengths], [b for _, b in lengths]
    q = random(g, dtype, sum(q_lens), heads[0], dims[0])
    # Packed: k and v are slices of one tensor, whose rest is NaN.
    packed = torch.full(
        (sum(kv_lens), heads[1], dims[0] + dims[1] + 8), torch.nan, dtype=dtype, device="cuda"
    )
    k, v = packed[..., : dims[0]], packed[..., dims[0] : dims[0] + dims[1]]
    k.copy_(random(g, dtype, *k.shape))
    v.copy_(random(g, dtype, *v.shape))
    cu_q, cu_k = (
        torch.tensor([0, *torch.tensor(lens).cumsum(0).tolist()], dtype=torch.int32, device="cuda")
        if lens
        else torch.zeros(1, dtype=torch.int32, device="cuda")
        for lens in (q_lens, kv_lens)
    )
    sinks = None if sink is None else torch.full((heads[0],), sink, device="cuda")
    most = {"max_q_len": max(q_lens, default=0), "max_kv_len": max(kv_lens, default=0)}
    results = {
        name: attention_varlen(
            *tensors, cu_q, cu_k, sink=sinks, return_lse=True, kernel=kernel, **most, **options  # type: ignore[arg-type]
        )
        for name, kernel, tensors in (
            ("got", family, (q, k, v)),
            ("exact", "reference", (q.double(), k.double(), v.double())),
            ("plain", "reference", (q, k, v)),
        )
    }  # fmt: skip
    assert_close(results["got"], results["exact"], results["plain"])


@pytest.mark.parametrize("family", FAMILIES)
def test_longer_keys_under_the_same_shapes(family: str) -> None:
    """Few queries over many keys follow a plan, whose page table is as wide as the bound on the keys."""
    g = torch.Generator("cuda").manual_seed(0)
    q, k, v = (random(g, torch.bfloat16, n, h, 128) for n, h in ((8, 4), (9000, 2), (9000, 2)))
    cu_q = torch.tensor([0, 4, 8], device="cuda")
    for lengths in ((250, 60), (5000, 4000), (1, 8999)):
        cu_k = torch.tensor([0, *lengths], device="cuda").cumsum(0)
        bounds = {"max_q_len": 4, "max_kv_len": max(256, *lengths)}
        got, exact, plain = (
            attention_varlen(*x, cu_q, cu_k, **bounds, causal=True, return_lse=True, kernel=kernel)
            for x, kernel in (
                ((q, k, v), family),
                ((q.double(), k.double(), v.double()), "reference"),
                ((q, k, v), "reference"),
            )
        )
        assert_close(got, exact, plain)


@pytest.mark.parametrize("family", FAMILIES)
def test_graph_replay_and_same_bits(family: str) -> None:
    q, k, v = (torch.randn(2, 700, 4, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    eager = attention(q, k, v, causal=True, kernel=family)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = attention(q, k, v, causal=True, kernel=family)
    for _ in range(3):
        captured.fill_(torch.nan)  # type: ignore[union-attr]
        graph.replay()
        assert torch.equal(captured, eager)  # type: ignore[arg-type]


@pytest.mark.parametrize("family", FAMILIES)
def test_compiles_whole_and_has_gradients(family: str) -> None:
    q, k, v = (
        torch.randn(1, 130, 2, 64, device="cuda", dtype=torch.float16, requires_grad=True)
        for _ in range(3)
    )
    compiled = torch.compile(attention, fullgraph=True, backend="aot_eager")
    out = compiled(q, k, v, causal=True, kernel=family)
    assert torch.equal(out, attention(q, k, v, causal=True, kernel=family))
    grads = torch.autograd.grad(out.float().square().sum(), (q, k, v))
    wide = [x.detach().double().requires_grad_() for x in (q, k, v)]
    exact_out = attention(*wide, causal=True, kernel="reference")
    exact = torch.autograd.grad(exact_out.square().sum(), wide)  # type: ignore[union-attr]
    for mine, theirs in zip(grads, exact, strict=True):
        assert float((mine.double() - theirs).norm() / theirs.norm()) < 5e-3


def test_beyond_two_to_the_31_elements() -> None:
    """The last sequence of a batch whose keys begin past 2^31 elements."""
    batch, length, heads, dim = 5, 2**17, 32, 128  # 2.7 thousand million elements
    k = torch.zeros(batch, length, heads, dim, device="cuda", dtype=torch.bfloat16)
    k[-1, -300:].normal_()
    q = torch.randn(batch, 3, heads, dim, device="cuda", dtype=torch.bfloat16)
    for family in FAMILIES:
        out = attention(q, k, k, window=(100, 0), kernel=family)
        last = attention(q[-1:], k[-1:, -400:], k[-1:, -400:], window=(100, 0), kernel="reference")
        assert float((out[-1:] - last).abs().max()) < 0.03  # type: ignore[operator]


def test_auto_takes_gluon_on_hopper_and_says_why_it_cannot() -> None:
    q = torch.randn(1, 16, 2, 64, device="cuda", dtype=torch.bfloat16)
    assert torch.equal(attention(q, q, q), attention(q, q, q, kernel="gluon"))  # type: ignore[arg-type]
    wide = q.float()
    with pytest.raises(NotImplementedError, match="gluon.*takes bfloat16 and float16"):
        attention(wide, wide, wide, kernel="gluon")
    assert set(FAMILIES) <= set(ATTENTION.families)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("family", FAMILIES)
def test_any_device_and_stream(family: str) -> None:
    """On a GPU that is not the current one, on the first, on the other again and on its streams."""
    dense, ragged = [], []
    for device, on_stream in (("cuda:1", False), ("cuda:0", True), ("cuda:1", True)):
        g = torch.Generator("cpu").manual_seed(1)
        q, k, v = (
            torch.randn(1, 1500, 4, 128, generator=g).bfloat16().to(device) for _ in range(3)
        )
        cu = torch.tensor([0, 1500], dtype=torch.int32, device=device)
        torch.cuda.synchronize(device)
        assert torch.cuda.current_device() == 0
        stream = torch.cuda.Stream(device) if on_stream else torch.cuda.current_stream(device)
        with torch.cuda.stream(stream) if on_stream else nullcontext():
            out: Any = attention(q, k, v, causal=True, kernel=family)
            rows: Any = attention_varlen(q[0], k[0], v[0], cu, cu, causal=True, kernel=family)
        stream.synchronize()
        assert out.device == rows.device == q.device
        dense.append(out.cpu())
        ragged.append(rows[None].cpu())
    for other in dense[1:]:
        assert torch.equal(other, dense[0])
    for other in ragged:
        assert float((other - dense[0]).abs().max()) < 0.03


def test_counters_of_drawn_tiles_survive_graphs_and_streams() -> None:
    """Tiles are drawn from counters that each kernel must leave at zero for the next."""
    q = torch.randn(2, 1500, 8, 64, device="cuda", dtype=torch.bfloat16)
    expected: Any = attention(q, q, q, causal=True, kernel="gluon")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = [attention(q, q, q, causal=True, kernel="gluon") for _ in range(3)]
    side = torch.cuda.Stream()
    for _ in range(5):
        with torch.cuda.stream(side):
            other = attention(q, q, q, causal=True, kernel="gluon")
        graph.replay()
        eager = attention(q, q, q, causal=True, kernel="gluon")
        torch.cuda.synchronize()
        results: list[Any] = [*captured, eager, other]
        assert all(torch.equal(out, expected) for out in results)


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_linear_biases(dim: int) -> None:
    g = torch.Generator("cuda").manual_seed(dim)
    q, k, v = (random(g, torch.bfloat16, 2, n, h, dim) for n, h in ((333, 4), (500, 2), (500, 2)))
    slopes = torch.rand(4, device="cuda", generator=g)
    options: Any = {"causal": True, "alibi_slopes": slopes, "return_lse": True}
    exact: Any = attention(q.double(), k.double(), v.double(), kernel="reference", **options)
    plain: Any = attention(q, k, v, kernel="reference", **options)
    for family in FAMILIES:
        got: Any = attention(q, k, v, kernel=family, **options)
        assert_close(got, exact, plain)


@pytest.mark.parametrize("family", FAMILIES)
def test_more_sequences_and_heads_than_an_axis_of_a_grid_holds(family: str) -> None:
    number = 70_000
    q, k, v = (torch.randn(number, 3, 1, 64, device="cuda").bfloat16() for _ in range(3))
    some = [0, 1, 65_534, 65_535, 65_536, number - 1]
    exact: Any = attention(q[some], k[some], v[some], causal=True, kernel="reference")
    dense: Any = attention(q, k, v, causal=True, kernel=family)
    cu = 3 * torch.arange(number + 1, device="cuda", dtype=torch.int32)
    rows = (x.flatten(0, 1) for x in (q, k, v))
    options: Any = {"max_q_len": 3, "max_kv_len": 3, "causal": True}
    ragged: Any = attention_varlen(*rows, cu, cu, kernel=family, **options)
    by_head = (x.permute(2, 1, 0, 3) for x in (q, k, v))
    heads: Any = attention(*by_head, causal=True, kernel=family)
    for got in (dense, ragged.view(q.shape), heads.permute(2, 1, 0, 3)):
        assert float((got[some] - exact).abs().max()) < 0.03
