"""The product of int4 weights in the simulator: tiles in turn, borders, rows that begin anywhere."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rooftile.kernels.reference import gemm as reference
from rooftile.kernels.reference import int4_words
from rooftile.kernels.weights_at_rest import weights_at_rest
from tests.support.gluon_sim import load_simulated, simulation

PLANS, FORWARD = load_simulated(
    "rooftile.kernels.gluon.gemm.direct_plan", "rooftile.kernels.gluon.gemm.forward"
)


def inside(x: Tensor, offset: int) -> Tensor:
    """The same matrix within a wider one whose rest is NaN."""
    rows, columns = x.shape
    wide = torch.full((rows, columns + 2 * offset + 1), torch.nan, dtype=x.dtype)
    wide[:, offset : offset + columns] = x
    return wide[:, offset : offset + columns]


@settings(max_examples=30)
@given(
    m=st.integers(1, 40),
    n=st.integers(1, 50),
    k=st.sampled_from([1, 31, 32, 100, 128, 256, 300, 2100]),
    activation=st.sampled_from(["none", "silu"]),
    has_bias=st.booleans(),
    has_residual=st.booleans(),
    most_ctas=st.integers(1, 5),
    warps=st.sampled_from([4, 8]),
    at_rest=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_int4_equals_the_dequantised_weight(
    m: int,
    n: int,
    k: int,
    activation: str,
    has_bias: bool,
    has_residual: bool,
    most_ctas: int,
    warps: int,
    at_rest: bool,
    seed: int,
) -> None:
    """Products of the values that `unpack` says, in float32."""
    generator = torch.Generator().manual_seed(seed)
    a, weight = (torch.randn(s, generator=generator) for s in ((m, k), (n, k)))
    a = inside(a.bfloat16(), 2)
    packed = int4_words.pack(weight)
    bias = torch.randn(n, generator=generator).bfloat16() if has_bias else None
    residual = torch.randn(m, n, generator=generator).bfloat16() if has_residual else None
    plan = PLANS.DirectPlan(16, 8 if m <= 8 else 16, 256, warps, most_ctas)
    with pytest.MonkeyPatch.context() as patch, simulation(seed=seed):
        patch.setattr(FORWARD, "plan_of_codes", lambda *_: plan)
        with weights_at_rest() if at_rest else nullcontext():
            got = FORWARD.matmul(
                *(a, packed["weight"].T, bias, residual, None, packed["scale"]),
                *(activation, torch.float32, False),
            )
    dense = int4_words.unpack(packed["weight"], packed["scale"], k).double()
    wide = [None if x is None else x.double() for x in (bias, residual)]
    exact = reference.matmul(
        a.double(), dense.T, *wide, None, None, activation, torch.float64, False
    )
    total = a.double().abs() @ dense.abs().T + 1
    assert bool(((got.double() - exact).abs() <= 1e-5 * total).all())
