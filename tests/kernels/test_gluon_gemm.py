"""The Hopper matrix product in the simulator: host path and device source, exactly and in float64.

What a simulator cannot check (layouts, swizzles, visibility) tests/ops/test_gemm_gpu.py checks on a
GPU, over the same features.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rooftile.kernels.flags import flags
from rooftile.kernels.reference import gemm as reference
from rooftile.kernels.weights_at_rest import weights_at_rest
from rooftile.planning.stream_k import (
    Product,
    Tiling,
    cluster_k,
    data_parallel,
    hybrid,
    split_k,
    stream_k,
)
from rooftile.planning.stream_k_choice import wide_tilings
from rooftile.planning.tile_width import step_of
from tests.support.gluon_sim import load_simulated, simulation

FORWARD, PLAN, CONFIG, LINEAR, CHOICE = load_simulated(
    "rooftile.kernels.gluon.gemm.forward",
    "rooftile.kernels.gluon.gemm.plan",
    "rooftile.kernels.gluon.gemm.config",
    "rooftile.kernels.gluon.linear",
    "rooftile.kernels.gluon.gemm.choice",
)
ACTIVATIONS = list(reference.ACTIVATIONS)
WIDE = st.builds(
    lambda rows, pieces, sharers, across: CONFIG.wide(
        Tiling(
            *(rows * sharers, pieces * step_of(rows, sharers) * across),
            *(64, sharers * across, 1, across),
        )
    ),
    st.sampled_from([64, 128, 256]),
    st.integers(2, 7),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([1, 2, 4]),
).filter(lambda config: config.joined and config.cluster <= 8 and config.block_n >= 48)
FP8 = torch.float8_e4m3fn


@pytest.fixture(autouse=True)
def three_multiprocessors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FORWARD, "multiprocessors", lambda device: 3)


def planned(config: Any, scheme: str, m: int, n: int, k: int, sms: int, itemsize: int = 2) -> Any:
    product, tiling = Product(m, n, k), config.tiling(itemsize)
    if config.split > 1:
        return PLAN.plan_of(config, cluster_k(product, tiling, sms))
    if scheme == "split-k":
        split = min(3, tiling.iterations(product))
        plan = split_k(product, tiling, split * tiling.tiles(product), split)
    else:
        build = {"data-parallel": data_parallel, "stream-k": stream_k, "hybrid": hybrid}[scheme]
        plan = build(product, tiling, sms)
    return PLAN.plan_of(config, plan)


def laid_out(x: Tensor, layout: str) -> Tensor:
    if layout == "column":
        return x.T.contiguous().T
    if layout == "inside":
        wide = torch.full((x.shape[0], x.shape[1] + 5), torch.nan).to(x.dtype)
        wide[:, 2:-3] = x
        return wide[:, 2:-3]
    return x


def product(
    a: Tensor, b: Tensor, *rest: Any, activation: str = "none", out: Any = None, plan: Any = None,
    seed: int = 0, residency: int | None = None, at_rest: bool = False,
) -> Tensor:  # fmt: skip
    bias, residual, scale_a, scale_b = (*rest, None, None, None, None)[:4]
    with simulation(seed=seed, residency=residency or plan.num_ctas), ExitStack() as stack:
        if at_rest:
            stack.enter_context(weights_at_rest())
        got: Tensor = FORWARD.matmul(
            *(a, b, bias, residual, scale_a, scale_b, activation, out or a.dtype, False, plan)
        )
    assert not flags(a.device).any()  # as the next launch expects them
    return got


@settings(max_examples=60)
@given(
    config=st.sampled_from(CONFIG.CONFIGS),
    scheme=st.sampled_from(["data-parallel", "split-k", "stream-k", "hybrid"]),
    m=st.sampled_from([1, 63, 64, 65, 129, 300]),
    n=st.sampled_from([1, 8, 64, 127, 264, 520]),
    k=st.sampled_from([1, 8, 64, 65, 200, 512]),
    layouts=st.tuples(*[st.sampled_from(["row", "column", "inside"])] * 2),
    dtype=st.sampled_from([torch.bfloat16, torch.float16]),
    sms=st.integers(1, 7),
    at_rest=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_integers_come_out_exactly(
    config: Any,
    scheme: str,
    m: int,
    n: int,
    k: int,
    layouts: tuple[str, str],
    dtype: torch.dtype,
    sms: int,
    at_rest: bool,
    seed: int,
) -> None:
    """Every slice of k of every tile is there once, whatever the scheme and the order of events."""
    generator = torch.Generator().manual_seed(seed)
    a = torch.randint(1, 4, (m, k), generator=generator)
    b = torch.randint(1, 4, (k, n), generator=generator)
    got = product(
        laid_out(a.to(dtype), layouts[0]),
        laid_out(b.to(dtype), layouts[1]),
        out=torch.float32,
        plan=planned(config, scheme, m, n, k, sms),
        seed=seed,
        at_rest=at_rest,
    )
    assert torch.equal(got, (a @ b).float())


@settings(max_examples=20)
@given(
    config=st.sampled_from(CONFIG.PAIRS + CONFIG.QUADS + CONFIG.SPLIT)
    | WIDE
    | st.sampled_from(CONFIG.CONFIGS).map(lambda config: config.by_itself),
    scheme=st.sampled_from(["data-parallel", "split-k", "stream-k", "hybrid"]),
    m=st.sampled_from([1, 65, 129, 300]),
    n=st.sampled_from([8, 127, 193, 264]),
    k=st.sampled_from([512, 520, 1000]),
    inside=st.booleans(),
    has_bias=st.booleans(),
    has_residual=st.booleans(),
    out=st.sampled_from([torch.bfloat16, torch.float32]),
    clusters=st.integers(1, 4),
    turned=st.booleans(),
    short=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_clusters(
    config: Any,
    scheme: str,
    m: int,
    n: int,
    k: int,
    inside: bool,
    has_bias: bool,
    has_residual: bool,
    out: torch.dtype,
    clusters: int,
    turned: bool,
    short: bool,
    seed: int,
) -> None:
    """CTAs that load columns or rows together, and those that share a tile's steps; tiles of any width,
    and results that are stored transposed. short: the ring is, so that every stage is filled again."""
    if short:
        config = replace(config, stages=4)
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randint(-2, 3, shape, generator=generator).bfloat16()

    layout = "inside" if inside else "row"
    a, b = laid_out(draw(m, k), layout), laid_out(draw(n, k), layout).T
    bias = draw(n) if has_bias else None
    residual = draw(m, n + 3)[:, 1:-2] if has_residual else None
    if config.rows != config.stored_rows and scheme != "split-k":
        scheme = "data-parallel"
    if turned and n % 8 == 0 and config.stored_rows == 64 and config.split == 1:
        residual, out = None, torch.bfloat16
        scheme = "data-parallel" if scheme == "split-k" else scheme
        plan = replace(planned(config, scheme, n, m, k, clusters), transposed=True)
    else:
        plan = planned(config, scheme, m, n, k, clusters)
    got = product(a, b, bias, residual, out=out, plan=plan, seed=seed)
    exact = a.double() @ b.double() + (0 if bias is None else bias.double())
    exact += 0 if residual is None else residual.double()
    assert torch.equal(got, exact.to(out))


@settings(max_examples=40)
@given(
    config=st.sampled_from(CONFIG.CONFIGS),
    m=st.sampled_from([1, 65, 140]),
    n=st.sampled_from([2, 64, 130, 272]),
    k=st.sampled_from([1, 8, 130, 300]),
    activation=st.sampled_from(ACTIVATIONS),
    has_bias=st.booleans(),
    has_residual=st.booleans(),
    out=st.sampled_from([torch.bfloat16, torch.float16, torch.float32]),
    sms=st.integers(1, 5),
    seed=st.integers(0, 2**31),
)
def test_epilogues(
    config: Any,
    m: int,
    n: int,
    k: int,
    activation: str,
    has_bias: bool,
    has_residual: bool,
    out: torch.dtype,
    sms: int,
    seed: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).bfloat16()

    a, b = draw(m, k), draw(n, k).T / k**0.5
    bias = draw(n) if has_bias else None
    columns = n // 2 if reference.is_gated(activation) else n
    residual = draw(m, columns + 3)[:, 1:-2] if has_residual else None
    got = product(
        *(a, b, bias, residual),
        activation=activation,
        out=out,
        plan=planned(config, "hybrid", m, n, k, sms),
        seed=seed,
    )
    wide = [None if x is None else x.double() for x in (a, b, bias, residual)]
    exact = reference.matmul(*wide, None, None, activation, torch.float64, False)  # type: ignore[arg-type]
    allowed = (torch.finfo(out).eps + 3e-6) * (exact.abs() + 0.1)
    assert bool(((got.double() - exact).abs() <= allowed).all())


@pytest.mark.parametrize("seed", range(8))
def test_a_chunk_waits_for_the_store_of_the_tile_before(seed: int) -> None:
    """Half of 128 columns is one chunk, of two buffers: tile after tile fills the first."""
    generator = torch.Generator().manual_seed(seed)
    a = torch.randn(128, 8, generator=generator).bfloat16()
    b = torch.randn(8, 6 * 128, generator=generator).bfloat16()
    plan = planned(CONFIG.SQUARE, "data-parallel", 128, 6 * 128, 8, 1)
    got = product(a, b.T.contiguous().T, activation="silu_and_mul", plan=plan, seed=seed)
    exact = reference.matmul(
        *(a.double(), b.double(), None, None, None, None, "silu_and_mul", torch.float64, False)
    )
    assert torch.allclose(got.double(), exact, rtol=0.01, atol=0.01)


@pytest.mark.parametrize("config", [CONFIG.LARGE, CONFIG.FEW_64])
@pytest.mark.parametrize("layouts", [("row", "column"), ("column", "row")])
def test_fp8(config: Any, layouts: tuple[str, str]) -> None:
    generator = torch.Generator().manual_seed(1)
    a = laid_out(torch.randn(150, 600, generator=generator).to(FP8), layouts[0])
    b = laid_out(torch.randn(600, 140, generator=generator).to(FP8), layouts[1])
    rows, columns = (torch.rand(n, generator=generator) + 0.5 for n in (150, 140))
    for scales in ((rows, columns), (torch.tensor(0.3), torch.tensor(2.0)), (rows, columns[0])):
        got = product(
            *(a, b, None, None, *scales),
            out=torch.float32,
            plan=planned(config, "hybrid", 150, 140, 600, 3, 1),
        )
        exact = reference.matmul(
            a.double(), b.double(), None, None, *scales, "none", torch.float64, False
        )
        assert torch.allclose(got.double(), exact, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("seed", range(10))  # every policy of the scheduler, twice
@pytest.mark.parametrize("scheme", ["stream-k", "split-k"])
def test_any_order_of_events(scheme: str, seed: int) -> None:
    """Bits, too: parts are added in one order, whoever comes first."""
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(*s, generator=generator).bfloat16() for s in ((70, 900), (900, 200)))
    plan = planned(CONFIG.SQUARE, scheme, 70, 200, 900, 5)
    got = product(a, b, plan=plan, seed=seed)
    assert torch.equal(got, product(a, b, plan=plan, seed=99))


def test_ctas_that_start_late_are_waited_for_by_higher_ones_only() -> None:
    """With fewer places than CTAs those of low numbers run first: nobody waits for one to come."""
    a, b = torch.ones(70, 900).bfloat16(), torch.ones(900, 200).bfloat16()
    plan = planned(CONFIG.SQUARE, "stream-k", 70, 200, 900, 6)
    for residency in (1, 2, 4):
        got = product(a, b, plan=plan, residency=residency, seed=residency)
        assert torch.equal(got, torch.full((70, 200), 900.0).bfloat16())


def test_a_failed_launch_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = torch.ones(70, 900).bfloat16(), torch.ones(900, 200).bfloat16()
    plan = planned(CONFIG.SQUARE, "stream-k", 70, 200, 900, 3)
    published = flags(a.device)

    class Abort(Exception):
        pass

    def publish_and_fail(*_: Any) -> None:
        published[0] = 1
        raise Abort

    with monkeypatch.context() as patch:
        patch.setattr(FORWARD, "_launch", lambda *_: publish_and_fail)
        with pytest.raises(Abort):
            product(a, b, plan=plan)
    assert published.any()
    assert torch.equal(product(a, b, plan=plan), torch.full((70, 200), 900.0).bfloat16())


@pytest.mark.parametrize("shape", [(0, 5, 7), (5, 0, 7), (5, 8, 0)])
def test_empty(shape: tuple[int, int, int]) -> None:
    m, n, k = shape
    a, b, bias = torch.ones(m, k).half(), torch.ones(k, n).half(), torch.ones(n).half()
    with simulation():
        got = FORWARD.matmul(a, b, bias, None, None, None, "none", torch.float16, False)
    assert torch.equal(got, torch.ones(m, n).half())


def test_operands_are_read_where_they_lie() -> None:
    inside = torch.zeros(40, 3, 64).bfloat16()[:, 1]
    with simulation():
        (a, a_by_rows), (b, b_by_rows) = FORWARD._operands(inside, inside.T)
        assert (a.data_ptr(), a_by_rows) == (inside.data_ptr(), True)
        assert (b.data_ptr(), b_by_rows) == (inside.data_ptr(), False)
        narrow = torch.randn(40, 30).bfloat16()
        (a, a_by_rows), (b, b_by_rows) = FORWARD._operands(narrow, narrow[:7].T)
        assert a.stride(0) == b.stride(1) == 64
        assert torch.equal(a, narrow)
        assert torch.equal(b, narrow[:7].T)
        assert a_by_rows
        assert not b_by_rows


@pytest.mark.parametrize("shape", [(5, 40), (2, 3, 40), (40,), (0, 40)])
def test_linear_layers(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(3)
    x, weight, bias = (
        torch.randint(-3, 4, s, generator=generator).bfloat16() for s in (shape, (24, 40), (24,))
    )
    monkeypatch.setattr(
        FORWARD, "_choose", lambda *_: planned(CONFIG.FEW_64, "hybrid", 6, 24, 40, 3)
    )
    with simulation(residency=3):
        got = LINEAR.linear(x, [weight], "dense", 24, bias)
    assert torch.equal(got, (x.float() @ weight.float().T + bias.float()).bfloat16())
    call = SimpleNamespace(device="cpu", dtype=torch.bfloat16, format="dense")
    assert LINEAR.efficiency(call) < 0.5
    monkeypatch.setenv("ROOFTILE_LINEAR", "stream-k")
    assert LINEAR.efficiency(call) == 1.0
    monkeypatch.setenv("ROOFTILE_LINEAR", "")
    assert LINEAR.efficiency(call) < 0.5
    monkeypatch.setenv("ROOFTILE_LINEAR", "stream_k")
    with pytest.raises(ValueError, match="ROOFTILE_LINEAR is 'stream_k'; it is stream-k, or not"):
        LINEAR.efficiency(call)
    call.format = "onednn"
    assert LINEAR.supports(call) == "it cannot read 'onednn'"


@pytest.mark.parametrize("turned", [False, True])
def test_what_is_loaded_early_is_a_weight(turned: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Activations are what the kernel before computes, also where they are the right operand."""
    a, b = (torch.ones(rows, 64).bfloat16() for rows in (136, 72))
    early, launch = [], FORWARD._launch

    def spy(*arguments: Any) -> Any:
        early.append(arguments[-1])
        return launch(*arguments)

    monkeypatch.setattr(FORWARD, "_launch", spy)
    sizes = (72, 136) if turned else (136, 72)
    plan = replace(planned(CONFIG.SQUARE, "data-parallel", *sizes, 64, 2), transposed=turned)
    got = product(a, b.T, plan=plan, at_rest=True)
    assert torch.equal(got, torch.full((136, 72), 64.0).bfloat16())
    assert early == [not turned]


@pytest.mark.parametrize(
    ("n", "k"), [(6144, 4096), (4096, 14336), (28672, 4096), (4096, 1024), (1024, 2048)]
)
def test_layers_that_decode_take_the_kernel_that_loads_weights_early(n: int, k: int) -> None:
    operands = CHOICE.Operands(2, True, 8, 0, (128, 128), False, True)
    for m in (8, 16, 64):
        plan, _ = CHOICE.choose(m, n, k, operands, 132, False)
        assert type(plan).__name__ == "FewRowsPlan"


def test_reasons_for_refusal() -> None:
    call = SimpleNamespace(device="cpu", dtype=torch.bfloat16)
    reason = FORWARD.supports(call)
    assert reason == "it needs an NVIDIA GPU of compute capability 9.0, not a cpu"


def test_configurations_fit_the_machine() -> None:
    for config in CONFIG.CONFIGS:
        for gated in (False, True):
            assert config.shared_bytes(2, gated) <= CONFIG.SHARED_BYTES
    tilings = {x for m in (80, 300, 900, 4000) for x in wide_tilings(Product(m, 2280, 64), 132)}
    wide = tuple(map(CONFIG.wide, tilings))
    assert len(wide) > 50
    alone = tuple(config.by_itself for config in CONFIG.CONFIGS)
    for config in CONFIG.PAIRS + CONFIG.QUADS + CONFIG.SPLIT + wide + alone:
        # The smaller operand's stages come before the results in shared memory.
        smaller = config.stages * min(config.block_m, config.block_n) * config.block_bytes
        for itemsize in (2, 4):
            results = config.buffers_of(itemsize) * config.chunk_bytes(itemsize)
            assert results <= smaller
            assert config.shared_bytes(itemsize, gated=False) <= CONFIG.SHARED_BYTES
        sums = 4 * config.block_m * config.block_n
        if config.split > 1:  # they go where the operands were
            assert sums <= config.stages * (config.block_m + config.block_n) * config.block_bytes
