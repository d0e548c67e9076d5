"""rms_norm against a float64 oracle: values, fused residual, gradients, contracts, refusals."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rooftile.ops.norm import RMS_NORM, rms_norm
from tests.ops.accuracy import assert_rows_close, dtype_for, kernels_to_test, opcheck

KERNELS = kernels_to_test(RMS_NORM)


def oracle(x: Tensor, weight: Tensor | None, eps: float, offset: float) -> Tensor:
    x = x.double()
    y = x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps)
    return y if weight is None else y * (weight.double() + offset)


@pytest.mark.parametrize("kernel", KERNELS)
@given(
    rows=st.integers(0, 9),
    hidden=st.integers(1, 130),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    has_weight=st.booleans(),
    has_residual=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_equals_the_oracle(
    kernel: str,
    rows: int,
    hidden: int,
    dtype: torch.dtype,
    has_weight: bool,
    has_residual: bool,
    seed: int,
) -> None:
    dtype = dtype_for(kernel, dtype)
    generator = torch.Generator().manual_seed(seed)
    # A slice of a wider tensor: rows are not contiguous.
    x = torch.randn(rows, hidden + 3, generator=generator).to(dtype)[:, :hidden]
    residual = torch.randn(rows, hidden, generator=generator).to(dtype) if has_residual else None
    weight = torch.randn(hidden, generator=generator).to(dtype) if has_weight else None
    result = rms_norm(x, weight, 1e-5, residual=residual, kernel=kernel)
    out, stream = (result, x) if residual is None else result
    expected_stream = x if residual is None else x + residual
    assert torch.equal(stream, expected_stream)
    assert out.dtype == dtype
    assert_rows_close(out, oracle(expected_stream, weight, 1e-5, 0.0), dtype)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weight_offset(kernel: str, dtype: torch.dtype) -> None:
    dtype = dtype_for(kernel, dtype)
    # Weights so small that weight + 1 rounded to bfloat16 would lose them.
    x, weight = torch.randn(5, 16).to(dtype), (torch.randn(16) * 1e-3).to(dtype)
    out = rms_norm(x, weight, 1e-6, weight_offset=1.0, kernel=kernel)
    assert out.dtype == dtype
    assert_rows_close(
        out, oracle(x, weight, 1e-6, 1.0), dtype, scale=0.25 if dtype == torch.bfloat16 else 1.0
    )
    assert torch.equal(
        rms_norm(x, None, weight_offset=1.0, kernel=kernel), rms_norm(x, None, kernel=kernel)
    )


@pytest.mark.parametrize("has_residual", [False, True])
def test_gradients(has_residual: bool) -> None:
    tensors = [
        torch.randn(3, 7, dtype=torch.float64, requires_grad=True),
        torch.randn(7, dtype=torch.float64, requires_grad=True),
    ]
    if has_residual:
        tensors.append(torch.randn(3, 7, dtype=torch.float64, requires_grad=True))

    def call(x: Tensor, weight: Tensor, residual: Tensor | None = None) -> object:
        return rms_norm(x, weight, 1e-6, residual=residual, weight_offset=0.5)

    assert torch.autograd.gradcheck(call, tuple(tensors))


def test_opcheck_and_compile() -> None:
    x, weight = torch.randn(4, 8, requires_grad=True), torch.randn(8, requires_grad=True)
    opcheck(RMS_NORM, x, weight, None, 1e-6, 0.0)
    opcheck(RMS_NORM, x, weight, torch.randn(4, 8), 1e-6, 0.0)
    compiled = torch.compile(rms_norm, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x, weight), rms_norm(x, weight))


def test_refusals_name_the_value_and_the_remedy() -> None:
    x = torch.randn(2, 8)
    with pytest.raises(ValueError, match=r"weight has shape \[7\]; expected \[hidden\] = \[8\]"):
        rms_norm(x, torch.ones(7))
    with pytest.raises(ValueError, match="residual is torch.float64 but x is torch.float32"):
        rms_norm(x, None, residual=x.double())
    with pytest.raises(ValueError, match="x has dtype torch.int64; convert"):
        rms_norm(torch.ones(2, 8, dtype=torch.long), None)
    with pytest.raises(ValueError, match="eps is -1"):
        rms_norm(x, None, -1.0)
    with pytest.raises(ValueError, match="kernel='gluon' does not exist"):
        rms_norm(x, None, kernel="gluon")
