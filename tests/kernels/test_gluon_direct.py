"""The product with int4 weights in the simulator: tiles, borders, units of loads."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rooftile.kernels.reference import gemm as reference
from rooftile.kernels.reference import int4_words
from rooftile.kernels.weights_at_rest import weights_at_rest
from tests.support.gluon_sim import load_simulated, simulation

DIRECT, DIRECT_PLAN = load_simulated(
    "rooftile.kernels.gluon.gemm.direct_forward", "rooftile.kernels.gluon.gemm.direct_plan"
)
PLANS_OF_CODES = [
    None,
    (16, 8, 256, 4),
    (16, 16, 256, 2),
    (16, 8, 256, 8, True),
    (32, 16, 256, 2, True),
]


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
    plan=st.sampled_from(PLANS_OF_CODES),
    offset=st.integers(0, 3),
    activation=st.sampled_from(["none", "silu"]),
    has_bias=st.booleans(),
    has_residual=st.booleans(),
    at_rest=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_int4_equals_the_dequantised_weight(
    m: int, n: int, k: int, plan: tuple[Any, ...] | None, offset: int, activation: str,
    has_bias: bool, has_residual: bool, at_rest: bool, seed: int,
) -> None:  # fmt: skip
    """Products of the values that `unpack` says, in float32."""
    generator = torch.Generator().manual_seed(seed)
    a, weight = (torch.randn(s, generator=generator) for s in ((m, k), (n, k)))
    a = inside(a.bfloat16(), offset)
    packed = int4_words.pack(weight)
    bias = torch.randn(n, generator=generator).bfloat16() if has_bias else None
    residual = torch.randn(m, n, generator=generator).bfloat16() if has_residual else None
    chosen = DIRECT_PLAN.DirectPlan(*plan) if plan else DIRECT_PLAN.plan_of_codes(m, n)
    with simulation(seed=seed), weights_at_rest() if at_rest else nullcontext():
        got = DIRECT.matmul(
            *(a, packed["weight"], packed["scale"], bias, residual),
            *(activation, torch.float32, chosen),
        )
    dense = int4_words.unpack(packed["weight"], packed["scale"], k).double()
    wide_bias, wide_residual = (None if x is None else x.double() for x in (bias, residual))
    exact = reference.matmul(
        *(a.double(), dense.T, wide_bias, wide_residual, None, None),
        *(activation, torch.float64, False),
    )
    total = a.double().abs() @ dense.abs().T + 1
    assert bool(((got.double() - exact).abs() <= 1e-5 * total).all())


ROW, ROW_PLAN = load_simulated(
    "rooftile.kernels.gluon.gemm.codes_forward", "rooftile.kernels.gluon.gemm.codes_plan"
)
PLANS_OF_A_ROW = [
    None,
    (2, 1, 2, 16, 2),
    (4, 2, 3, 8, 3),
    (1, 4, 9, 16, 1),
    (8, 1, 1, 8, 2),
    (2, 4, 2, 16, 70),
    (4, 1, 40, 16, 3, True),
    (2, 2, 20, 8, 10, True),
]


@settings(max_examples=30)
@given(
    n=st.integers(1, 70),
    k=st.sampled_from([8, 32, 104, 200, 256, 520, 1024, 2104]),
    plan=st.sampled_from(PLANS_OF_A_ROW),
    activation=st.sampled_from(["none", "silu"]),
    has_bias=st.booleans(),
    has_residual=st.booleans(),
    at_rest=st.booleans(),
    largest=st.sampled_from([1.0, 300.0, 2.0**-60, 2.0**60]),
    seed=st.integers(0, 2**31),
)
def test_one_row_is_multiplied_before_values_are_rounded(
    n: int, k: int, plan: tuple[int, ...] | None, activation: str, has_bias: bool,
    has_residual: bool, at_rest: bool, largest: float, seed: int,
) -> None:  # fmt: skip
    """The sums of codes times scales are as exact as float32 is, beside outliers too."""
    generator = torch.Generator().manual_seed(seed)
    a = torch.randn(1, k, generator=generator).bfloat16()
    a[0, ::37] *= largest
    packed = int4_words.pack(torch.randn(n, k, generator=generator))
    words, scale = packed["weight"], packed["scale"]
    if (
        words.shape[1] % 32
    ):  # of an odd number of blocks of 128: scales begin where none are addressed
        words, scale = (torch.cat([x, x], 1) for x in (words, scale))
    bias = torch.randn(n, generator=generator).bfloat16() if has_bias else None
    residual = torch.randn(1, n, generator=generator).bfloat16() if has_residual else None
    chosen = ROW_PLAN.RowPlan(*plan) if plan else ROW_PLAN.plan_of_row(n, 128 * 2 * (-(-k // 256)))
    with simulation(seed=seed), weights_at_rest() if at_rest else nullcontext():
        got = ROW.matmul(*(a, words, scale, bias, residual, activation, torch.float32, chosen))
    dense = codes_of(words)[:, :k] * scale.double().repeat_interleave(32, 1)[:, :k]
    wide = (None if x is None else x.double() for x in (bias, residual))
    exact = reference.matmul(
        *(a.double(), dense.T, *wide, None, None, activation, torch.float64, False)
    )
    total = a.double().abs() @ dense.abs().T + 1
    assert bool(((got.double() - exact).abs() <= 1e-6 * total).all())


def codes_of(words: Tensor) -> Tensor:
    """-8 to 7, [n, k] float64."""
    shifts = 4 * torch.arange(4)[:, None] + 16 * torch.arange(2)[None, :]
    codes = (words.view(len(words), -1, 4, 4, 1, 1) >> shifts) & 15
    return codes.transpose(2, 3).reshape(len(words), -1).double() - 8


@pytest.mark.parametrize("plan", PLANS_OF_A_ROW[1:])
def test_whole_numbers_are_multiplied_exactly(plan: tuple[int, ...]) -> None:
    """Of every group, code and place once: a word, digit or group that is left out cannot hide."""
    n, k = 40, 1280
    generator = torch.Generator().manual_seed(3)
    a = torch.randint(-200, 201, (1, k), generator=generator).bfloat16()
    words = torch.randint(-(2**31), 2**31, (n, k // 8), generator=generator).int()
    scale = torch.randint(1, 4, (n, k // 32), generator=generator).bfloat16()
    with simulation():
        got = ROW.matmul(
            *(a, words, scale, None, None, "none", torch.float32, ROW_PLAN.RowPlan(*plan))
        )
    exact = a.double() @ (codes_of(words) * scale.double().repeat_interleave(32, 1)).T
    assert torch.equal(got.double(), exact)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_activations_that_are_not_finite_leave_no_number(bad: float) -> None:
    a = torch.ones(1, 512).bfloat16()
    a[0, 300] = bad
    packed = int4_words.pack(torch.randn(20, 512))
    with simulation():
        got = ROW.matmul(
            *(a, packed["weight"], packed["scale"], None, None, "none", torch.float32),
            ROW_PLAN.RowPlan(2, 1, 2, 16, 2),
        )
    assert bool(got.isnan().all())
