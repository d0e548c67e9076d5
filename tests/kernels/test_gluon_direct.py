"""The product with operands in registers in the simulator, exactly: tiles, borders, units, int4."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rooftile.kernels.reference import gemm as reference
from rooftile.kernels.reference import int4_words
from rooftile.kernels.weights_at_rest import weights_at_rest
from tests.support.gluon_sim import load_simulated, simulation

DIRECT, PLANS, FORWARD = load_simulated(
    "rooftile.kernels.gluon.gemm.direct_forward",
    "rooftile.kernels.gluon.gemm.direct_plan",
    "rooftile.kernels.gluon.gemm.forward",
)
TILINGS = [(16, 8, 64, 4), (16, 16, 128, 2), (32, 32, 64, 1), (64, 64, 64, 1, 2, 2)]


def inside(x: Tensor, offset: int) -> Tensor:
    """The same matrix within a wider one whose rest is NaN."""
    rows, columns = x.shape
    wide = torch.full((rows, columns + 2 * offset + 1), torch.nan, dtype=x.dtype)
    wide[:, offset : offset + columns] = x
    return wide[:, offset : offset + columns]


@settings(max_examples=50)
@given(
    tiling=st.sampled_from(TILINGS),
    transposed=st.booleans(),
    m=st.integers(1, 70),
    n=st.integers(1, 70),
    k=st.sampled_from([1, 2, 7, 8, 64, 100, 256, 300, 513]),
    offset=st.sampled_from([None, 0, 1, 3]),
    out=st.sampled_from([torch.bfloat16, torch.float16, torch.float32]),
    has_bias=st.booleans(),
    has_residual=st.booleans(),
    at_rest=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_integers_come_out_exactly(
    tiling: tuple[int, ...],
    transposed: bool,
    m: int,
    n: int,
    k: int,
    offset: int | None,
    out: torch.dtype,
    has_bias: bool,
    has_residual: bool,
    at_rest: bool,
    seed: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        x = torch.randint(-2, 3, shape, generator=generator).bfloat16()
        return x if offset is None or len(shape) == 1 else inside(x, offset)

    a, b = draw(m, k), draw(n, k)
    bias = draw(n) if has_bias else None
    residual = draw(m, n) if has_residual else None
    plan = PLANS.DirectPlan(*tiling, transposed=transposed)
    with simulation(seed=seed):
        if at_rest:
            with weights_at_rest():
                got = DIRECT.matmul(a, b, None, bias, residual, "none", out, plan)
        else:
            got = DIRECT.matmul(a, b, None, bias, residual, "none", out, plan)
    wide = [None if x is None else x.double() for x in (a, b.T, bias, residual)]
    exact = reference.matmul(*wide, None, None, "none", torch.float64, False)  # type: ignore[arg-type]
    assert torch.equal(got, exact.to(out))


@settings(max_examples=30)
@given(
    m=st.integers(1, 40),
    n=st.integers(1, 50),
    k=st.sampled_from([1, 31, 32, 100, 128, 256, 300, 2100]),
    activation=st.sampled_from(["none", "silu"]),
    has_bias=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_int4_equals_the_dequantised_weight(
    m: int, n: int, k: int, activation: str, has_bias: bool, seed: int
) -> None:
    """Products of the values that `unpack` says, in float32."""
    generator = torch.Generator().manual_seed(seed)
    a, weight = (torch.randn(s, generator=generator) for s in ((m, k), (n, k)))
    a = inside(a.bfloat16(), 2)
    packed = int4_words.pack(weight)
    bias = torch.randn(n, generator=generator).bfloat16() if has_bias else None
    with simulation(seed=seed):
        got = FORWARD.matmul(
            *(a, packed["weight"].T, bias, None, None, packed["scale"]),
            *(activation, torch.float32, False),
        )
    dense = int4_words.unpack(packed["weight"], packed["scale"], k).double()
    wide_bias = None if bias is None else bias.double()
    exact = reference.matmul(
        *(a.double(), dense.T, wide_bias, None, None, None, activation, torch.float64, False)
    )
    total = a.double().abs() @ dense.abs().T + 1
    assert bool(((got.double() - exact).abs() <= 1e-5 * total).all())
