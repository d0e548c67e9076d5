"""The product of few rows in the simulator: every slice of k once, whoever comes last."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rooftile.kernels.flags import flags
from rooftile.kernels.reference import gemm as reference
from rooftile.kernels.weights_at_rest import weights_at_rest
from tests.support.gluon_sim import load_simulated, simulation

FORWARD, PLANS = load_simulated(
    "rooftile.kernels.gluon.gemm.few_forward",
    "rooftile.kernels.gluon.gemm.few_plan",
)
TILINGS = [(64, 4), (128, 4), (128, 8), (256, 8)]  # rows of a tile, warps


def inside(x: Tensor) -> Tensor:
    """The same matrix within a wider one whose rest is NaN."""
    wide = torch.full((x.shape[0], x.shape[1] + 16), torch.nan, dtype=x.dtype)
    wide[:, 8:-8] = x
    return wide[:, 8:-8]


@settings(max_examples=40)
@given(
    tiling=st.sampled_from(TILINGS),
    splits=st.integers(1, 5),
    pieces=st.integers(1, 2),
    stages=st.integers(1, 4),
    m=st.sampled_from([1, 7, 8, 9, 33, 64]),
    n=st.sampled_from([16, 64, 80, 272]),
    k=st.sampled_from([8, 64, 72, 136, 520]),
    dtype=st.sampled_from([torch.bfloat16, torch.float16]),
    out=st.sampled_from([torch.bfloat16, torch.float16, torch.float32]),
    activation=st.sampled_from(["none", "none", "silu", "silu_and_mul"]),
    has_bias=st.booleans(),
    has_residual=st.booleans(),
    at_rest=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_integers_come_out_exactly(
    tiling: tuple[int, int],
    splits: int,
    pieces: int,
    stages: int,
    m: int,
    n: int,
    k: int,
    dtype: torch.dtype,
    out: torch.dtype,
    activation: str,
    has_bias: bool,
    has_residual: bool,
    at_rest: bool,
    seed: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randint(-2, 3, shape, generator=generator).to(dtype)

    a, b = inside(draw(m, k)), inside(draw(n, k))
    bias, residual = draw(n) if has_bias else None, draw(m, n) if has_residual else None
    if residual is not None and activation.endswith("_and_mul"):
        residual = residual[:, : n // 2].contiguous()
    plan = PLANS.FewRowsPlan(tiling[0], splits, pieces, stages, tiling[1])
    with simulation(seed=seed, residency=3), weights_at_rest() if at_rest else nullcontext():
        got = FORWARD.matmul(a, b, bias, residual, activation, out, plan)
    assert not flags(a.device).any()  # as the next launch expects them
    wide = [None if x is None else x.double() for x in (a, b.T, bias, residual)]
    exact = reference.matmul(*wide, None, None, activation, torch.float64, False)  # type: ignore[arg-type]
    if activation == "none":
        assert torch.equal(got, exact.to(out))
    else:
        allowed = (torch.finfo(out).eps + 3e-6) * (exact.abs() + 0.1)
        assert bool(((got.double() - exact).abs() <= allowed).all())


@pytest.mark.parametrize("seed", range(5))  # every policy of the scheduler
def test_whoever_comes_last_adds_the_parts_in_one_order(seed: int) -> None:
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(*s, generator=generator).bfloat16() for s in ((9, 896), (128, 896)))
    plan = PLANS.FewRowsPlan(64, 5, 1, 3)
    bits = []
    for residency in (1, 2, 10):
        with simulation(seed=seed, residency=residency):
            bits.append(FORWARD.matmul(a, b, None, None, "none", torch.float32, plan))
    assert torch.equal(bits[0], bits[1])
    assert torch.equal(bits[0], bits[2])
