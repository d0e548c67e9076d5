"""The GPU kernels behind `matmul`, through the operator, on a GPU."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rooftile.kernels.reference.gemm import ACTIVATIONS, is_gated
from rooftile.kernels.weights_at_rest import weights_at_rest
from rooftile.ops.gemm import MATMUL, matmul
from rooftile.ops.linear import linear
from rooftile.ops.packed_weight import pack, unpack

pytest.importorskip("triton", reason="Triton is not installed")

from rooftile.kernels.gluon.gemm import forward
from rooftile.kernels.gluon.gemm.config import CONFIGS, PAIRS, QUADS, SPLIT, Config, wide
from rooftile.kernels.gluon.gemm.few_plan import FewRowsPlan
from rooftile.kernels.gluon.gemm.plan import plan_of
from rooftile.kernels.gluon.gemm.tile_plan import TilePlan
from rooftile.kernels.gluon.launch import multiprocessors
from rooftile.planning.stream_k import STREAMED, Product, Tiling
from rooftile.planning.stream_k_choice import candidates, may_be_transposed
from rooftile.planning.stream_k_cost import is_apart

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
FAMILIES = ("gluon", "triton")
SIZES = st.sampled_from([1, 2, 8, 16, 63, 64, 65, 127, 128, 130, 256, 264, 500, 777, 1024, 2200])
LAYOUTS = st.sampled_from(["row", "column", "inside"])
FP8 = torch.float8_e4m3fn
MANY = settings(max_examples=40, deadline=None)


def laid_out(x: Tensor, layout: str) -> Tensor:
    if layout == "column":
        return x.T.contiguous().T
    if layout == "inside":
        wide = torch.full((x.shape[0], x.shape[1] + 5), torch.nan, device=x.device).to(x.dtype)
        wide[:, 2:-3] = x
        return wide[:, 2:-3]
    return x


@pytest.mark.parametrize("family", FAMILIES)
@MANY
@given(
    m=SIZES, n=SIZES, k=SIZES, layouts=st.tuples(LAYOUTS, LAYOUTS),
    dtype=st.sampled_from([torch.bfloat16, torch.float16]), batch_invariant=st.booleans(),
    seed=st.integers(0, 2**31),
)  # fmt: skip
def test_integers_come_out_exactly(
    family: str,
    m: int,
    n: int,
    k: int,
    layouts: tuple[str, str],
    dtype: torch.dtype,
    batch_invariant: bool,
    seed: int,
) -> None:
    """Sums of small integers are exact in float32: a lost or doubled slice of k cannot hide."""
    g = torch.Generator("cuda").manual_seed(seed)
    a = torch.randint(1, 4, (m, k), generator=g, device="cuda").to(dtype)
    b = torch.randint(1, 4, (k, n), generator=g, device="cuda").to(dtype)
    expected = (a.double() @ b.double()).float()
    torch.full((m * n,), torch.nan, device="cuda")  # what the output is likely to be made of
    out = matmul(
        laid_out(a, layouts[0]),
        laid_out(b, layouts[1]),
        out_dtype=torch.float32,
        batch_invariant=batch_invariant,
        kernel=family,
    )
    assert torch.equal(out, expected)


@pytest.mark.parametrize(
    "plan",
    [TilePlan(64, 32), TilePlan(64, 64), TilePlan(128, 64)],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("k", [88, 130, 777, 2048])
def test_kernels_for_small_products(plan: TilePlan, k: int) -> None:
    """Whatever the choice is: rows that begin anywhere, with what follows the product."""
    g = torch.Generator("cuda").manual_seed(k)
    for m, n in ((1, 64), (7, 33), (130, 70), (61, 203)):
        for layout in ("row", "inside"):
            a, b, residual = (
                laid_out(torch.randint(-2, 3, s, generator=g, device="cuda").bfloat16(), layout)
                for s in ((m, k), (n, k), (m, n))
            )
            bias = torch.randint(-2, 3, (n,), generator=g, device="cuda").bfloat16()
            out = forward.matmul(
                *(a, b.T, bias, residual, None, None, "none", torch.float32, False), plan=plan
            )
            exact = a.double() @ b.double().T + bias.double() + residual.double()
            assert torch.equal(out, exact.float())


@pytest.mark.parametrize(
    "plan",
    [FewRowsPlan(64, 1, 4, 3), FewRowsPlan(64, 4, 2, 3), FewRowsPlan(128, 1, 2, 2),
     FewRowsPlan(256, 1, 2, 2, 8)],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("m", [5, 16, 20, 64])
def test_few_rows(plan: FewRowsPlan, m: int) -> None:
    """Every part of k once, whoever comes last; one after another, at rest, with identical bits."""
    g = torch.Generator("cuda").manual_seed(m)
    for n, k in ((8, 64), (264, 1096), (4096, 4096)):
        a, b, residual = (
            torch.randint(-2, 3, s, generator=g, device="cuda").bfloat16()
            for s in ((m, k), (n, k), (m, n))
        )
        bias = torch.randint(-2, 3, (n,), generator=g, device="cuda").bfloat16()
        exact = a.double() @ b.double().T + bias.double() + residual.double()
        arguments = (a, b.T, bias, residual, None, None, "none", torch.float32, False)
        with weights_at_rest():
            for _ in range(20):
                assert torch.equal(forward.matmul(*arguments, plan=plan), exact.float())
        if plan.tile > 64 and n % 16 == 0:
            x = torch.randn(m, k, generator=g, device="cuda").bfloat16()
            got = forward.matmul(
                *(x, b.T, bias, None, None, None, "silu_and_mul", torch.bfloat16, False), plan=plan
            )
            gate, value = (x.double() @ b.double().T + bias.double()).chunk(2, 1)
            gated = torch.nn.functional.silu(gate) * value
            allowed = 0.005 * gated.abs() + 1e-4 * gated.abs().max()
            assert bool(((got.double() - gated).abs() <= allowed).all())


@pytest.mark.parametrize("m", [1, 4, 5, 64])
@pytest.mark.parametrize("shape", [(6144, 4096), (1024, 3072), (28672, 4096)])
def test_decoding_shapes_as_chosen(m: int, shape: tuple[int, int]) -> None:
    n, k = shape
    a, b = torch.randn(m, k, device="cuda").bfloat16(), torch.randn(n, k, device="cuda").bfloat16()
    exact = a.double() @ b.double().T
    with weights_at_rest():
        out = matmul(a, b.T, kernel="gluon").double()
    added = a.double().abs() @ b.double().abs().T
    assert bool(((out - exact).abs() <= 2**-8 * exact.abs() + 1e-6 * added).all())


@pytest.mark.parametrize(
    "shape",
    [(64, 256), (1000, 4096), (4096, 1100), (33, 97), (28672, 1024), (6144, 1024), (1024, 2048),
     (1024, 3072), (4096, 4096), (5000, 4104), (70, 14336)],
)  # fmt: skip
@pytest.mark.parametrize("at_rest", [False, True])
def test_int4_weights(shape: tuple[int, int], at_rest: bool) -> None:
    """Against the values that `unpack` says, and rows against the same among others. One row alone is
    multiplied before the values are rounded, unless it must not depend on how many there are."""
    n, k = shape
    packed = pack(torch.randn(n, k, device="cuda"), "int4_words")
    dense, bias = unpack(packed).double(), torch.randn(n, device="cuda").bfloat16()
    x = torch.randn(70, k, device="cuda").bfloat16()
    exact, added = x.double() @ dense.T + bias.double(), x.double().abs() @ dense.abs().T + 1
    allowed = 2**-8 * exact.abs() + 1e-5 * added
    with weights_at_rest() if at_rest else nullcontext():
        whole = linear(x, packed, bias)
        assert bool(((whole.double() - exact).abs() <= allowed).all())
        for m in (1, 3, 8, 9, 16, 33):
            rows = linear(x[:m], packed, bias)
            off = (rows.double() - exact[:m]).abs()
            assert torch.equal(rows, whole[:m]) if m > 1 else True
            assert bool((off <= allowed[:m] + (2**-9 * added[:m] if m == 1 else 0)).all())
            alike = matmul(x[:m], packed, bias, batch_invariant=True)
            assert torch.equal(alike, whole[:m])
            gated = matmul(x[:m], packed, bias, "silu", torch.float32, batch_invariant=True)
            silu = torch.nn.functional.silu(exact[:m])
            assert bool(((gated.double() - silu).abs() <= 2 * allowed[:m]).all())


ROWS_OF_CODES = [
    *((64, 256), (1000, 2048), (1024, 3072), (28672, 1024), (1000, 4352), (6144, 4096)),
    *((4096, 14336), (9000, 5120), (20011, 4096), (6144, 1024)),
]


@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("shape", ROWS_OF_CODES)
def test_one_row_and_int4_weights(shape: tuple[int, int], activation: str | None) -> None:
    """Scales of powers of two: values are not rounded, so that sums are as exact as float32 is, beside
    outliers too."""
    n, k = shape
    packed = pack(torch.randn(n, k, device="cuda"), "int4_words")
    words, scale = packed.tensors["weight"], packed.tensors["scale"]
    scale.copy_(2.0 ** torch.randint(-3, 3, scale.shape, device="cuda"))
    words.copy_(torch.randint(-(2**31), 2**31, words.shape, device="cuda"))
    dense = unpack(packed).double()
    x, residual = (torch.randn(1, size, device="cuda").bfloat16() for size in (k, n))
    x[0, ::97] *= 300
    exact = x.double() @ dense.T
    off = matmul(x, packed, None, activation, torch.float32, residual).double()
    if activation:
        exact = torch.nn.functional.silu(exact)
    off -= exact + residual.double()
    assert bool((off.abs() <= 1e-6 * (x.double().abs() @ dense.abs().T + 1)).all())


@pytest.mark.parametrize("at_rest", [False, True])
@pytest.mark.parametrize("shape", ROWS_OF_CODES)
def test_one_row_of_whole_numbers_and_int4_weights(shape: tuple[int, int], at_rest: bool) -> None:
    """Exactly, whatever the order of sums, one launch after another."""
    n, k = shape
    packed = pack(torch.randn(n, k, device="cuda"), "int4_words")
    words, scale = packed.tensors["weight"], packed.tensors["scale"]
    scale.fill_(1)
    words.copy_(torch.randint(-(2**31), 2**31, words.shape, device="cuda"))
    dense = unpack(packed).double()
    with weights_at_rest() if at_rest else nullcontext():
        for _ in range(5):
            x = torch.randint(-30, 31, (1, k), device="cuda").bfloat16()
            out = matmul(x, packed, None, None, torch.float32)
            assert torch.equal(out.double(), x.double() @ dense.T)
    x[0, k // 2] = torch.nan
    assert bool(matmul(x, packed).isnan().all())


@pytest.mark.parametrize(
    "shape",
    [(2500, 2500, 2500), (784, 2142, 3768), (1420, 808, 3835), (224, 5326, 2370),
     (4958, 4572, 1863), (81, 7757, 6256), (5631, 184, 8126)],
)  # fmt: skip
def test_large_products_with_copies(shape: tuple[int, int, int]) -> None:
    """Rows of no multiple of 16 bytes, where torch itself may round the parts of a split k."""
    m, n, k = shape
    a = torch.randint(-2, 3, (m, k), device="cuda").bfloat16()
    b = torch.randint(-2, 3, (n, k), device="cuda").bfloat16().T
    out = matmul(a, b, kernel="gluon")
    assert torch.equal(out, (a.double() @ b.double()).bfloat16())


WIDE = [
    wide(Tiling(rows * sharers, columns * across, 64, sharers * across, 1, across))
    for rows, columns, (sharers, across) in (
        *((128, 152, (1, 1)), (128, 144, (2, 1)), (128, 136, (1, 2)), (128, 72, (1, 4))),
        *((128, 80, (2, 2)), (128, 112, (2, 4)), (128, 256, (1, 2)), (64, 48, (1, 2))),
        *((64, 160, (4, 1)), (64, 240, (2, 2)), (64, 96, (4, 2)), (64, 48, (2, 4))),
        *((256, 160, (1, 1)), (256, 144, (2, 1)), (256, 200, (1, 2))),
    )
]


@pytest.mark.parametrize("passing", [False, True])
@pytest.mark.parametrize(
    "config", [*PAIRS, *QUADS, *WIDE, *SPLIT, *CONFIGS], ids=lambda c: f"{c.tiling(2)}"
)
def test_clusters(config: Config, passing: bool) -> None:
    """CTAs that load columns together or share a tile's steps; operands that pass through the cache."""
    if not passing and not config.joined:
        pytest.skip("a ring of Triton's own barriers")
    if passing and config in WIDE[2:]:
        pytest.skip("differs by an operand of its loads, and each takes seconds to compile")
    tiling, g = config.tiling(2), torch.Generator("cuda").manual_seed(0)
    config = config.passing_on if passing else config
    for m, n, k in ((65, 136, 1000), (300, 777, 4096), (2176, 520, 1032)):
        a, b, residual = (
            torch.randint(-2, 3, s, generator=g, device="cuda").bfloat16()
            for s in ((m, k), (n, k), (m, n))
        )
        bias = torch.randint(-2, 3, (n,), generator=g, device="cuda").bfloat16()
        exact = (a.float() @ b.float().T + bias.float() + residual.float()).bfloat16()
        for plan in candidates(Product(m, n, k), multiprocessors(a.device), [tiling]):
            if plan.scheme in STREAMED and passing:
                continue
            for _ in range(3):
                out = forward.matmul(
                    *(a, b.T, bias, residual, None, None, "none", torch.bfloat16, False),
                    plan=plan_of(config, plan),
                )
                assert torch.equal(out, exact), plan


@pytest.mark.parametrize(
    ("config", "dtype"),
    [
        (WIDE[0], torch.float16),
        *(
            (config, torch.bfloat16)
            for config in (*PAIRS[1::2], *QUADS, *WIDE[1::2], *CONFIGS[::2])
            if may_be_transposed(config.tiling(2))
        ),
    ],
    ids=lambda x: f"{x.tiling(2)}" if isinstance(x, Config) else str(x),
)
def test_results_that_are_stored_transposed(config: Config, dtype: torch.dtype) -> None:
    g = torch.Generator("cuda").manual_seed(0)
    for m, n, k in ((136, 72, 1000), (777, 304, 4096), (520, 2176, 1032)):
        a, b = (
            torch.randint(-2, 3, s, generator=g, device="cuda").to(dtype) for s in ((m, k), (n, k))
        )
        bias = torch.randint(-2, 3, (n,), generator=g, device="cuda").to(dtype)
        exact = (a.float() @ b.float().T + bias.float()).to(dtype)
        tiling = config.tiling(2)
        for plan in candidates(Product(n, m, k), multiprocessors(a.device), [tiling]):
            if is_apart(plan):
                continue
            for _ in range(3):
                out = forward.matmul(
                    *(a, b.T, bias, None, None, None, "none", dtype, False),
                    plan=replace(plan_of(config, plan), transposed=True),
                )
                assert torch.equal(out, exact), plan


@pytest.mark.parametrize("family", FAMILIES)
@MANY
@given(
    m=SIZES, n=SIZES, k=SIZES, activation=st.sampled_from(ACTIVATIONS), has_bias=st.booleans(),
    has_residual=st.booleans(), fp8=st.booleans(),
    out=st.sampled_from([torch.bfloat16, torch.float32]), seed=st.integers(0, 2**31),
)  # fmt: skip
def test_epilogues(
    family: str,
    m: int,
    n: int,
    k: int,
    activation: str,
    has_bias: bool,
    has_residual: bool,
    fp8: bool,
    out: torch.dtype,
    seed: int,
) -> None:
    n += n % 2
    g = torch.Generator("cuda").manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g, device="cuda").bfloat16()

    a, b = draw(m, k), draw(n, k).T
    scales: dict[str, Any] = {}
    if fp8:
        a, b = a.to(FP8), b.to(FP8)
        scales["scale_a"] = torch.rand(m, generator=g, device="cuda") + 0.5
        scales["scale_b"] = torch.rand(n, generator=g, device="cuda") / k**0.5
    else:
        b = b / k**0.5
    bias = draw(n) if has_bias else None
    residual = draw(m, n // 2 if is_gated(activation) else n) if has_residual else None
    name = None if activation == "none" else activation
    arguments = (a, b, bias, name, out, residual)
    got = matmul(*arguments, **scales, kernel=family).double()
    exact = matmul(
        a.double() * (scales["scale_a"][:, None].double() if fp8 else 1),
        b.double() * (scales["scale_b"].double() if fp8 else 1),
        *(None if x is None else x.double() for x in (bias,)),
        name,
        torch.float64,
        None if residual is None else residual.double(),
        kernel="reference",
    )
    eps = max(torch.finfo(out).eps, 1e-5)
    allowed = 2 * eps * (exact.abs().amax(-1, keepdim=True) + 0.1)
    if fp8:
        # The matrix unit keeps 13 bits after the point while it sums products of fp8: of what is
        # added, which may be much more than the sum.
        added = (
            (a.double().abs() @ b.double().abs()) * scales["scale_b"] * scales["scale_a"][:, None]
        )
        allowed = allowed + 4e-3 * added.amax(-1, keepdim=True)
    assert bool(((got - exact).abs() <= allowed).all())


@pytest.mark.parametrize("shape", [(1, 4096, 4096), (200, 384, 8192), (2176, 2176, 1024)])
def test_graphs_and_repeats_give_identical_bits(shape: tuple[int, int, int]) -> None:
    m, n, k = shape
    a = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
    b = torch.randn(n, k, device="cuda", dtype=torch.bfloat16).T
    first = matmul(a, b, kernel="gluon")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = matmul(a, b, kernel="gluon")
    for i in range(100):
        if i % 2:
            graph.replay()
            assert torch.equal(captured, first)
        else:
            assert torch.equal(matmul(a, b, kernel="gluon"), first)


def test_ten_thousand_launches_of_changing_shapes() -> None:
    shapes = [(1, 512, 4096), (64, 256, 2048), (130, 384, 4096), (300, 520, 1000), (16, 64, 8192)]
    made = []
    for m, n, k in shapes:
        a = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
        b = torch.randn(n, k, device="cuda", dtype=torch.bfloat16).T
        made.append((a, b, matmul(a, b, kernel="gluon")))
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for i in range(10_000):
        a, b, first = made[i % len(made)]
        wrong += (matmul(a, b, kernel="gluon") != first).any()
    assert int(wrong) == 0


def test_two_streams_at_a_time() -> None:
    """Launches that compete for SMs end, and do not touch each other's flags."""
    streams = [torch.cuda.Stream() for _ in range(2)]
    a = [torch.randn(64, 8192, device="cuda", dtype=torch.bfloat16) for _ in streams]
    b = torch.randn(512, 8192, device="cuda", dtype=torch.bfloat16).T
    expected = [matmul(x, b, kernel="gluon") for x in a]
    torch.cuda.synchronize()
    results: list[list[Tensor]] = [[], []]
    for _ in range(200):
        for i, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                results[i].append(matmul(a[i], b, kernel="gluon"))
    torch.cuda.synchronize()
    for got, want in zip(results, expected, strict=True):
        assert all(torch.equal(x, want) for x in got)


def test_batch_invariant_rows_do_not_depend_on_others() -> None:
    a = torch.randn(700, 4096, device="cuda", dtype=torch.bfloat16)
    b = torch.randn(1024, 4096, device="cuda", dtype=torch.bfloat16).T
    whole = matmul(a, b, batch_invariant=True)
    for m in (1, 3, 16, 64, 65, 256, 333):
        assert torch.equal(matmul(a[:m], b, batch_invariant=True), whole[:m])


def test_compiles_and_differentiates() -> None:
    a = torch.randn(70, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    b = torch.randn(64, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)

    def run(a: Tensor, b: Tensor) -> Tensor:
        return matmul(a, b.T, activation="silu")

    torch.compile(run, fullgraph=True, backend="aot_eager")(a, b).sum().backward()
    got = a.grad, b.grad
    wide = [x.detach().double().requires_grad_() for x in (a, b)]
    torch.nn.functional.silu(wide[0] @ wide[1].T).sum().backward()
    for x, exact in zip(got, wide, strict=True):
        assert torch.allclose(x.double(), exact.grad, atol=0.2, rtol=0.02)


def test_auto_takes_a_kernel_of_ours_or_the_vendors() -> None:
    a = torch.randn(256, 512, device="cuda", dtype=torch.bfloat16)
    out = matmul(a, a.T)
    assert torch.allclose(out.float(), a.float() @ a.float().T, atol=1, rtol=0.02)
    assert "gluon" in MATMUL.families
