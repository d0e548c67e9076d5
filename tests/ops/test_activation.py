"""Gated activations against a float64 oracle: values, gradients, contracts, refusals."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rooftile.ops.activation import (
    GATED_ACTIVATION,
    GATED_ACTIVATION_BACKWARD,
    ActivationCall,
    gelu_and_mul,
    silu_and_mul,
)
from tests.ops.accuracy import assert_rows_close, dtype_for, kernels_to_test, opcheck

FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    "silu": silu_and_mul,
    "gelu": gelu_and_mul,
    "gelu_tanh": partial(gelu_and_mul, approximate="tanh"),
}
KERNELS = kernels_to_test(GATED_ACTIVATION)


def skip_unless_possible(kernel: str, name: str) -> None:
    if GATED_ACTIVATION.refusal(ActivationCall("cpu", torch.float32, name), kernel) is not None:
        pytest.skip("not for this kernel")


def oracle(x: Tensor, name: str) -> Tensor:
    size = x.shape[-1] // 2
    gate, value = x.double()[..., :size], x.double()[..., size:]
    if name == "silu":
        return gate / (1 + torch.exp(-gate)) * value
    if name == "gelu":
        return gate * 0.5 * torch.erfc(-gate / math.sqrt(2)) * value
    # (1 + tanh(inner)) / 2 is a sigmoid, which keeps the left tail, as erfc does above.
    inner = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)
    return gate * torch.sigmoid(2 * inner) * value


def cancelled(kernel: str, name: str, x: Tensor) -> float:
    """PyTorch's gelu adds 1 to erf or tanh: what cancels in the left tail has been this large.
    Our kernels keep the tail."""
    if kernel != "torch" or name == "silu" or x.numel() == 0:
        return 0.0
    gate, value = x.double().chunk(2, -1)
    return float((gate * value).abs().max())


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("name", FUNCTIONS)
@given(
    rows=st.sampled_from([(), (0,), (1,), (5,), (2, 3)]),
    size=st.integers(0, 90),
    dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16]),
    scale=st.sampled_from([0.1, 1.0, 20.0]),
    seed=st.integers(0, 2**32),
)
def test_equals_the_oracle(
    kernel: str,
    name: str,
    rows: tuple[int, ...],
    size: int,
    dtype: torch.dtype,
    scale: float,
    seed: int,
) -> None:
    skip_unless_possible(kernel, name)
    dtype = dtype_for(kernel, dtype)
    generator = torch.Generator().manual_seed(seed)
    wide = torch.full((*rows, 2 * size + 3), torch.nan, dtype=dtype)
    wide[..., 1 : 2 * size + 1] = scale * torch.randn(*rows, 2 * size, generator=generator)
    x = wide[..., 1 : 2 * size + 1]
    out = FUNCTIONS[name](x, kernel=kernel)
    assert out.dtype == dtype
    assert out.shape == (*rows, size)
    assert_rows_close(out, oracle(x, name), dtype, scale=1 + cancelled(kernel, name, x))


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_rounds_once(kernel: str, name: str) -> None:
    """Each element of a half-precision result is the exact result, rounded."""
    skip_unless_possible(kernel, name)
    x = torch.randn(64, 256).to(dtype_for(kernel, torch.bfloat16))
    exact = FUNCTIONS[name](x.double(), kernel="reference").float()
    out = FUNCTIONS[name](x, kernel=kernel).float()
    limits = torch.finfo(x.dtype)
    allowed = limits.eps / 2 * exact.abs() * (1 + 1e-4) + limits.smallest_normal * limits.eps
    allowed += torch.finfo(torch.float32).eps * cancelled(kernel, name, x)
    assert bool(((out - exact).abs() <= allowed).all())


@pytest.mark.parametrize("name", FUNCTIONS)
def test_gradients(name: str) -> None:
    x = 3 * torch.randn(4, 10, dtype=torch.float64)
    assert torch.autograd.gradcheck(FUNCTIONS[name], (x.requires_grad_(),))
    half = torch.randn(6, 64).bfloat16().requires_grad_()
    wide = half.detach().double().requires_grad_()
    grad = torch.randn(6, 32).bfloat16()
    FUNCTIONS[name](half).backward(grad)
    oracle(wide, name).backward(grad.double())
    assert_rows_close(half.grad, wide.grad, torch.bfloat16)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_opcheck_and_compile(name: str) -> None:
    x = torch.randn(4, 8, requires_grad=True)
    opcheck(GATED_ACTIVATION, x, name)
    opcheck(GATED_ACTIVATION_BACKWARD, torch.randn(4, 4), x.detach(), name)
    compiled = torch.compile(FUNCTIONS[name], fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), FUNCTIONS[name](x))


def test_refusals_name_the_value_and_the_remedy() -> None:
    with pytest.raises(ValueError, match=r"silu_and_mul: x has shape \[2, 7\]; .* must be even"):
        silu_and_mul(torch.randn(2, 7))
    with pytest.raises(ValueError, match=r"gelu_and_mul: x has shape \[\]"):
        gelu_and_mul(torch.tensor(1.0))
    with pytest.raises(ValueError, match="approximate is 'erf'; choose 'none' or 'tanh'"):
        gelu_and_mul(torch.randn(2, 8), "erf")
    with pytest.raises(ValueError, match="x has dtype torch.int64; convert"):
        silu_and_mul(torch.ones(2, 8, dtype=torch.long))
    with pytest.raises(ValueError, match="kernel='gluon' does not exist"):
        silu_and_mul(torch.randn(2, 8), kernel="gluon")
