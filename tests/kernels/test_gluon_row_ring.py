"""The product of a handful of rows in the simulator: dense weights exactly, int4 codes in float64."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rooftile.kernels.reference import gemm as reference
from rooftile.kernels.reference import int4_words
from rooftile.kernels.weights_at_rest import weights_at_rest
from tests.support.gluon_sim import load_simulated, simulation

FORWARD = load_simulated("rooftile.kernels.gluon.gemm.ring_forward")
TILINGS = [(16, 512, 1, 4), (16, 1024, 1, 8), (32, 512, 2, 4), (64, 512, 2, 4)]


def inside(x: Tensor) -> Tensor:
    """The same matrix within a wider one whose rest is NaN."""
    wide = torch.full((x.shape[0], x.shape[1] + 16), torch.nan, dtype=x.dtype)
    wide[:, 8:-8] = x
    return wide[:, 8:-8]


@settings(max_examples=30)
@given(
    tiling=st.sampled_from(TILINGS),
    stages=st.integers(1, 3),
    rows=st.sampled_from([8, 16]),
    m=st.sampled_from([1, 7, 9, 20]),
    n=st.sampled_from([1, 16, 50, 130]),
    k=st.sampled_from([8, 512, 1064, 2048]),
    codes=st.booleans(),
    dtype=st.sampled_from([torch.bfloat16, torch.float16]),
    activation=st.sampled_from(["none", "silu"]),
    has_bias=st.booleans(),
    has_residual=st.booleans(),
    at_rest=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_products(
    tiling: tuple[int, int, int, int],
    stages: int,
    rows: int,
    m: int,
    n: int,
    k: int,
    codes: bool,
    dtype: torch.dtype,
    activation: str,
    has_bias: bool,
    has_residual: bool,
    at_rest: bool,
    seed: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    dtype = torch.bfloat16 if codes else dtype

    def draw(*shape: int) -> Tensor:
        return torch.randint(-2, 3, shape, generator=generator).to(dtype)

    a, weight = inside(draw(m, k)), draw(n, k)
    bias, residual = draw(n) if has_bias else None, draw(m, n) if has_residual else None
    b: Any = inside(weight)
    scales = None
    if codes:
        packed = int4_words.pack(weight)
        b, scales = packed["weight"], packed["scale"]
        weight = int4_words.unpack(b, scales, k)
    plan = FORWARD.RingPlan(*tiling, stages, rows)
    with simulation(seed=seed, residency=2), weights_at_rest() if at_rest else nullcontext():
        got = FORWARD.matmul(a, b, scales, bias, residual, activation, torch.float32, plan)
    wide = [None if x is None else x.double() for x in (a, weight.T, bias, residual)]
    exact = reference.matmul(*wide, None, None, activation, torch.float64, False)  # type: ignore[arg-type]
    if activation == "none" and not codes:
        assert torch.equal(got, exact.float())
    else:
        added = a.double().abs() @ weight.double().abs().T + 1
        assert bool(((got.double() - exact).abs() <= 3e-6 * added).all())
