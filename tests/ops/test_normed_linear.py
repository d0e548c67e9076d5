"""normed_linear against float64, and against the operators that it stands for."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rooftile.ops.activation import gelu_and_mul, silu_and_mul
from rooftile.ops.norm import rms_norm
from rooftile.ops.normed_linear import NORMED_LINEAR
from tests.ops.accuracy import dtype_for, kernels_to_test, opcheck

KERNELS = kernels_to_test(NORMED_LINEAR)


def check(
    kernel: str, rows: int, sizes: tuple[int, int], activation: str, residual: bool, bias: bool,
    dtype: torch.dtype, seed: int, device: str = "cpu",
) -> None:  # fmt: skip
    g = torch.Generator().manual_seed(seed)
    out_features, in_features = sizes

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g).to(dtype).to(device)

    x = random(rows, in_features + 8)[:, :in_features]
    stream = random(rows, in_features) if residual else None
    norm = random(in_features)
    matrix = random(out_features * (2 if activation else 1), in_features) / 8
    b = random(matrix.shape[0]) if bias else None
    out, new = NORMED_LINEAR.handle(x, stream, norm, 1e-5, 1.0, matrix, b, activation, kernel)

    kept = x if stream is None else x + stream
    assert torch.equal(new, kept)
    y = rms_norm(kept.double(), norm.double(), 1e-5, weight_offset=1.0).to(dtype).double()
    exact = y @ matrix.double().T + (0 if b is None else b.double())
    total = y.abs() @ matrix.double().abs().T + 1
    # Halves of roundings of the norm may turn the other way.
    allowed = torch.finfo(dtype).eps * (exact.abs() + 0.1 * total) + 1e-6 * total
    if activation:
        gate, value = exact.chunk(2, -1)
        slack = [t.chunk(2, -1) for t in (allowed, exact)]
        exact = silu_and_mul(exact) if activation == "silu" else gelu_and_mul(exact, "tanh")
        (gate_off, value_off), _ = slack
        allowed = 1.2 * gate_off * (value.abs() + value_off) + (gate.abs() + 1) * value_off
        allowed = allowed + torch.finfo(dtype).eps * exact.abs()
    assert out.dtype == dtype
    assert out.shape == (rows, out_features)
    assert bool(((out.double() - exact).abs() <= allowed).all())


@pytest.mark.parametrize("kernel", KERNELS)
@settings(max_examples=25)
@given(
    rows=st.integers(1, 6),
    sizes=st.sampled_from([(5, 128), (40, 384), (64, 100), (70, 1280)]),
    activation=st.sampled_from(["", "silu", "gelu_tanh"]),
    residual=st.booleans(),
    bias=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    seed=st.integers(0, 2**31),
)
def test_equals_the_operators_in_turn(
    kernel: str, rows: int, sizes: tuple[int, int], activation: str, residual: bool, bias: bool,
    dtype: torch.dtype, seed: int,
) -> None:  # fmt: skip
    check(kernel, rows, sizes, activation, residual, bias, dtype_for(kernel, dtype), seed)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5])
def test_on_a_gpu(dtype: torch.dtype, rows: int) -> None:
    for sizes in ((4096, 1024), (300, 4096), (7, 3072)):
        for activation in ("", "silu"):
            check("triton", rows, sizes, activation, True, False, dtype, rows, "cuda")
    check("triton", rows, (512, 2048), "gelu_tanh", False, True, dtype, rows, "cuda")


def test_opcheck() -> None:
    arguments = (torch.randn(3, 8), torch.randn(3, 8), torch.ones(8), 1e-5, 0.0, torch.randn(6, 8))
    for activation in ("", "silu"):
        opcheck(
            NORMED_LINEAR,
            *arguments,
            None,
            activation,
            test_utils=("test_schema", "test_faketensor"),
        )
