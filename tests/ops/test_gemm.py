"""matmul against a float64 oracle: values, exact integers, gradients, contracts, refusals."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rooftile.ops.gemm import MATMUL, MatmulCall, matmul, matmul_call
from tests.ops.accuracy import assert_rows_close, dtype_for, kernels_to_test, opcheck

KERNELS = kernels_to_test(MATMUL)
ACTIVATIONS = [None, "silu", "gelu", "gelu_tanh", "silu_and_mul", "gelu_and_mul",
               "gelu_tanh_and_mul"]  # fmt: skip
FP8 = torch.float8_e4m3fn


def oracle(
    a: Tensor, b: Tensor, bias: Tensor | None, activation: str | None, residual: Tensor | None
) -> Tensor:
    y = a.double() @ b.double()
    if bias is not None:
        y = y + bias.double()
    if activation is not None:
        gate, value = (y.chunk(2, -1)) if activation.endswith("_and_mul") else (y, 1.0)
        name = activation.removesuffix("_and_mul")
        if name == "silu":
            gate = gate / (1 + torch.exp(-gate))
        elif name == "gelu":
            gate = gate * 0.5 * (1 + torch.erf(gate / math.sqrt(2)))
        else:
            inner = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)
            gate = 0.5 * gate * (1 + torch.tanh(inner))
        y = gate * value
    return y if residual is None else y + residual.double()


def laid_out(x: Tensor, layout: str) -> Tensor:
    """The same matrix by rows, by columns, or inside a wider one whose rest is NaN."""
    if layout == "column":
        return x.T.contiguous().T
    if layout == "inside":
        wide = torch.full((x.shape[0], x.shape[1] + 5), torch.nan, dtype=x.dtype)
        wide[:, 2:-3] = x
        return wide[:, 2:-3]
    return x


@pytest.mark.parametrize("kernel", KERNELS)
@given(
    leading=st.sampled_from([(), (2,), (0,), (2, 3)]),
    m=st.integers(0, 40),
    n=st.integers(0, 40),
    k=st.integers(0, 90),
    dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16]),
    out_dtype=st.sampled_from([None, None, torch.float32, torch.bfloat16]),
    layouts=st.tuples(*[st.sampled_from(["row", "column", "inside"])] * 2),
    activation=st.sampled_from([None, *ACTIVATIONS]),
    has_bias=st.booleans(),
    has_residual=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_equals_the_oracle(
    kernel: str,
    leading: tuple[int, ...],
    m: int,
    n: int,
    k: int,
    dtype: torch.dtype,
    out_dtype: torch.dtype | None,
    layouts: tuple[str, str],
    activation: str | None,
    has_bias: bool,
    has_residual: bool,
    seed: int,
) -> None:
    dtype = dtype_for(kernel, dtype)
    generator = torch.Generator().manual_seed(seed)
    gated = activation is not None and activation.endswith("_and_mul")
    n = 2 * n if gated else n

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    a = draw(*leading, m, k)
    if not leading:
        a = laid_out(a, layouts[0])
    b = laid_out(draw(k, n), layouts[1]) / max(k, 1) ** 0.5
    bias = draw(n) if has_bias else None
    residual = draw(*leading, m, n // 2 if gated else n) if has_residual else None
    out = matmul(a, b, bias, activation, out_dtype, residual, kernel=kernel)
    expected = oracle(a, b, bias, activation, residual)
    assert out.dtype == (out_dtype or dtype)
    # The vendor's products are rounded to the inputs' dtype before what follows them.
    coarsest = max(torch.finfo(t).eps for t in (dtype, out.dtype))
    rounded = next(t for t in (dtype, out.dtype) if torch.finfo(t).eps == coarsest)
    assert_rows_close(out, expected, rounded, scale=2.0)


@pytest.mark.parametrize("kernel", KERNELS)
@given(
    m=st.integers(1, 70),
    n=st.integers(1, 70),
    k=st.integers(1, 400),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    seed=st.integers(0, 2**32),
)
def test_integers_come_out_exactly(
    kernel: str, m: int, n: int, k: int, dtype: torch.dtype, seed: int
) -> None:
    """Sums of small integers are exact in float32, so that no slice of k can get lost unseen."""
    generator = torch.Generator().manual_seed(seed)
    a = torch.randint(1, 4, (m, k), generator=generator)
    b = torch.randint(1, 4, (k, n), generator=generator)
    out = matmul(a.to(dtype), b.to(dtype), kernel=kernel)
    assert torch.equal(out, (a @ b).to(dtype))


def test_fp8_with_scales() -> None:
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(*s, generator=generator).to(FP8) for s in ((2, 9, 48), (48, 32)))
    rows, columns = (torch.rand(s, generator=generator) + 0.5 for s in ((2, 9), (32,)))
    for scale_a in (rows, torch.tensor(0.25)):
        for scale_b in (columns, torch.tensor(3.0)):
            out = matmul(a, b, scale_a=scale_a, scale_b=scale_b)
            left = a.double() * (scale_a[..., None] if scale_a.dim() else scale_a)
            assert out.dtype == torch.bfloat16
            assert_rows_close(out, left @ (b.double() * scale_b), torch.bfloat16)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gradients(activation: str | None) -> None:
    gated = activation is not None and activation.endswith("_and_mul")
    shapes = ((2, 3, 5), (5, 4), (4,), (2, 3, 2 if gated else 4))
    inputs = [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in shapes]

    def run(a: Tensor, b: Tensor, bias: Tensor, residual: Tensor) -> Tensor:
        return matmul(a, b, bias, activation, residual=residual)

    assert torch.autograd.gradcheck(run, inputs)
    half = [torch.randn(s).bfloat16().requires_grad_() for s in shapes]
    wide = [x.detach().double().requires_grad_() for x in half]
    out = run(*half)
    grad = torch.randn(out.shape).bfloat16()
    out.backward(grad)
    oracle(wide[0], wide[1], wide[2], activation, wide[3]).backward(grad.double())
    for x, exact in zip(half, wide, strict=True):
        assert x.grad.dtype == torch.bfloat16
        assert_rows_close(x.grad, exact.grad, torch.bfloat16, scale=4.0)


def test_float32_gradients_of_a_bfloat16_product() -> None:
    a, b = torch.randn(4, 8).bfloat16().requires_grad_(), torch.randn(8, 6).bfloat16()
    out = matmul(a, b, out_dtype=torch.float32)
    out.sum().backward()
    assert_rows_close(a.grad, b.double().sum(1).expand(4, 8), torch.bfloat16)


@pytest.mark.parametrize("activation", [None, "gelu", "silu_and_mul"])
def test_opcheck_and_compile(activation: str | None) -> None:
    a, b, bias = torch.randn(4, 8, requires_grad=True), torch.randn(8, 6), torch.randn(6)
    rest: tuple[Any, ...] = (None, None, None, activation or "none", torch.float32, False)
    opcheck(MATMUL, a, b, bias, *rest)
    compiled = torch.compile(matmul, fullgraph=True, backend="aot_eager", dynamic=True)
    assert torch.equal(compiled(a, b, bias, activation), matmul(a, b, bias, activation))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("size", [1, 64, 8192])
def test_the_vendor_comes_before_the_reference(device: str, size: int) -> None:
    call = MatmulCall(
        *(device, torch.bfloat16, torch.bfloat16, size, size, size, "row", "column"),
        *("none", False, False, False),
    )
    shares = [MATMUL.kernel(family).efficiency_of(call) for family in ("torch", "reference")]
    assert 1 > shares[0] > 100 * shares[1] > 0


def test_a_matrix_of_one_row_or_column_lies_as_kernels_want_it() -> None:
    for k, n in ((1, 6), (6, 1), (1, 1)):
        call = matmul_call(torch.randn(3, k), torch.randn(n, k).T)
        assert (call.a_layout, call.b_layout) == ("row", "column")
    assert matmul_call(torch.randn(3, 4), torch.randn(4, 5)).b_layout == "row"
    assert matmul_call(torch.randn(4, 3).T, torch.randn(4, 10)[:, ::2]).b_layout == "strided"


def test_a_batch_invariant_product_goes_to_a_kernel_that_promises_it() -> None:
    a, b = torch.randn(3, 8), torch.randn(8, 5)
    out = matmul(a, b, batch_invariant=True)
    assert torch.allclose(out, a @ b, atol=1e-5)
    with pytest.raises(NotImplementedError, match="no order of sums"):
        matmul(a, b, batch_invariant=True, kernel="torch")


def test_refusals_name_the_value_and_the_remedy() -> None:
    a, b = torch.randn(3, 8), torch.randn(8, 5)
    with pytest.raises(ValueError, match=r"a has shape \[3, 8\] and b \[5, 8\]; expected"):
        matmul(a, b.T)
    with pytest.raises(ValueError, match="activation is 'relu'; choose None or one of 'silu'"):
        matmul(a, b, activation="relu")
    with pytest.raises(ValueError, match="b has 5 columns; 'silu_and_mul' needs an even number"):
        matmul(a, b, activation="silu_and_mul")
    with pytest.raises(ValueError, match=r"bias has shape \[4\]; expected \[n\] = \[5\]"):
        matmul(a, b, torch.randn(4))
    with pytest.raises(ValueError, match=r"residual has shape \[3, 4\]; expected .* = \[3, 5\]"):
        matmul(a, b, residual=torch.randn(3, 4))
    with pytest.raises(ValueError, match="out_dtype is torch.int32; choose"):
        matmul(a, b, out_dtype=torch.int32)
    with pytest.raises(ValueError, match=r"b is torch.float16 but a is torch.float32; convert"):
        matmul(a, b.half())
    with pytest.raises(ValueError, match="scale_a is given, scale_b is not given; give both"):
        matmul(a.to(FP8), b.to(FP8), scale_a=torch.ones(()))
    with pytest.raises(ValueError, match="scale_a is given, scale_b is given; give both"):
        matmul(a, b, scale_a=torch.ones(()), scale_b=torch.ones(()))
    one = torch.ones(())
    with pytest.raises(ValueError, match="scale_b is torch.float64; convert it to torch.float32"):
        matmul(a.to(FP8), b.to(FP8), scale_a=one, scale_b=one.double())
    with pytest.raises(ValueError, match="kernel='cpu' does not exist"):
        matmul(a, b, kernel="cpu")
