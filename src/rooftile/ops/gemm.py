"""Matrix products with what follows them: bias, activation, gate, residual (Stream-K on a GPU)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rooftile.kernels.reference.gemm import ACTIVATIONS, activation_backward, is_gated
from rooftile.ops.check import (
    check_device,
    check_flags,
    check_float,
    check_same,
    check_shape,
    check_tensors,
    refuse_gradient,
    require,
)
from rooftile.ops.operator import Operator
from rooftile.ops.packed_weight import check_packed
from rooftile.types import PackedWeight

FP8 = torch.float8_e4m3fn


@dataclass(frozen=True)
class MatmulCall:
    """The properties that choose a kernel. Unlike those of other operators they hold the sizes:
    which kernel is fastest depends on them, and they are known without waiting for a device.
    """

    device: str
    dtype: torch.dtype
    out_dtype: torch.dtype
    m: int
    n: int
    k: int
    a_layout: str  # "row", "column" or "strided": which dimension is contiguous
    b_layout: str  # or "int4_words": codes of the packed format of this name
    activation: str
    has_bias: bool
    has_residual: bool
    batch_invariant: bool


def matmul(
    a: Tensor,  # [..., m, k]
    # [k, n], any strides: the transpose of a weight [n, k] is read where it lies
    b: Tensor | PackedWeight,
    bias: Tensor | None = None,  # [n]
    activation: str | None = None,
    out_dtype: torch.dtype | None = None,
    residual: Tensor | None = None,  # [..., m, n], or [..., m, n / 2] with a gate
    *,
    scale_a: Tensor | None = None,  # [] or [..., m] float32, of an fp8 a
    scale_b: Tensor | None = None,  # [] or [n] float32, of an fp8 b
    batch_invariant: bool = False,
    kernel: str = "auto",
) -> Tensor:
    """activation(scale_a scale_b (a @ b) + bias) + residual -> [..., m, n], rounded once.

    activation: None, "silu", "gelu" (error function) or "gelu_tanh"; or one of those with
        "_and_mul": the first n / 2 columns are a gate, activated and multiplied with the others,
        so the result is [..., m, n / 2].
    out_dtype: a's dtype where left out, bfloat16 where a is fp8. Sums are float32 or wider.
    b: a weight that `pack(weight, "int4_words")` made (ops/packed_weight.py) is a matrix, too: [k, n] with its
        (in_features, out_features). Its values are dequantised in registers.
    scale_a, scale_b: of a whole matrix or of its rows (of a) and columns (of b); both matrices are
        float8_e4m3fn where scales are given, and only then.
    batch_invariant: the order of each sum depends on n and k alone, so that a row's bits do not
        depend on how many others there are. "auto" then takes a kernel that promises this.

    Differentiable in a, b, bias and residual, but not for fp8 or packed weights.

    Args:
        a: [..., m, k]
        b: [k, n], any strides: the transpose of a weight [n, k] is read where it lies
        bias: [n]
        residual: [..., m, n], or [..., m, n / 2] with a gate
        scale_a: [] or [..., m] float32, of an fp8 a
        scale_b: [] or [n] float32, of an fp8 b

    Raises:
        ValueError: shapes, dtypes, devices or an activation that do not fit.
        NotImplementedError: a gradient is asked of fp8 or a packed weight, or no kernel can run the
            call.
    """
    name = "matmul"
    chosen = "none" if activation is None else activation
    require(
        chosen in ACTIVATIONS,
        lambda: (
            f"{name}: activation is {activation!r}; choose None or one of "
            f"{', '.join(repr(x) for x in ACTIVATIONS if x != 'none')}"
        ),
    )
    check_tensors(name, a=a)
    packed = isinstance(b, PackedWeight)
    if isinstance(b, PackedWeight):
        shape = [b.shape[1], b.shape[0]]
        b, scale_b = _codes(name, b, scale_a, scale_b)
    else:
        check_tensors(name, b=b)
        shape = list(b.shape)
    require(
        a.dim() >= 2 and len(shape) == 2 and a.shape[-1] == shape[0],
        lambda: (
            f"{name}: a has shape {list(a.shape)} and b {shape}; expected [..., m, k] and [k, n]"
        ),
    )
    check_device(name, a=a, b=b, bias=bias, residual=residual, scale_a=scale_a, scale_b=scale_b)
    *leading, m, _ = a.shape
    n = b.shape[1]
    require(
        not is_gated(chosen) or n % 2 == 0,
        lambda: f"{name}: b has {n} columns; {chosen!r} needs an even number, gate and value",
    )
    out_columns = n // 2 if is_gated(chosen) else n
    fp8 = False
    if packed:
        check_float(name, a=a)
    else:
        fp8 = _check_dtypes(name, a, b, scale_a, scale_b)
    out_dtype = out_dtype or (torch.bfloat16 if fp8 else a.dtype)
    require(
        out_dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64),
        lambda: (
            f"{name}: out_dtype is {out_dtype}; choose a floating-point type of 16 bits or more"
        ),
    )
    check_float(name, bias=bias, residual=residual)
    if bias is not None:
        check_shape(name, "bias", bias, (n,), "[n]")
    if residual is not None:
        check_shape(name, "residual", residual, (*leading, m, out_columns), "[..., m, columns]")
        residual = residual.flatten(0, -2)
    if scale_a is not None and scale_a.dim():
        check_shape(name, "scale_a", scale_a, (*leading, m), "[..., m]")
        scale_a = scale_a.flatten()
    if scale_b is not None and scale_b.dim() and not packed:
        check_shape(name, "scale_b", scale_b, (n,), "[n]")
    refuse_gradient(name, scale_a=scale_a, scale_b=scale_b)
    check_flags(name, batch_invariant=batch_invariant)
    out = MATMUL.handle(
        *(a.flatten(0, -2), b, bias, residual, scale_a, scale_b),
        *(chosen, out_dtype, batch_invariant, kernel),
    )
    return out.reshape(*leading, m, out_columns)


def _codes(
    name: str, b: PackedWeight, scale_a: Tensor | None, scale_b: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Words [k / 8, n] and scales of a packed weight."""
    require(
        b.format == "int4_words",
        lambda: f"{name}: b has format {b.format!r}; pack it as 'int4_words', or give a tensor",
    )
    require(
        scale_a is None and scale_b is None,
        lambda: f"{name}: scales are given with a packed weight, which has its own; leave them out",
    )
    check_packed(name, "b", b)
    return b.tensors["weight"].T, b.tensors["scale"]


def _check_dtypes(
    name: str, a: Tensor, b: Tensor, scale_a: Tensor | None, scale_b: Tensor | None
) -> bool:
    """Whether the matrices are fp8."""
    fp8 = a.dtype == FP8 or b.dtype == FP8
    require(
        fp8 == (scale_a is not None) == (scale_b is not None),
        lambda: (
            f"{name}: a is {a.dtype} and b {b.dtype}, scale_a is "
            f"{'given' if scale_a is not None else 'not given'}, scale_b is "
            f"{'given' if scale_b is not None else 'not given'}; give both scales with {FP8} matrices, "
            f"none with others"
        ),
    )
    if not fp8:
        check_float(name, a=a)
    check_same(name, a=a, b=b)
    for label, scale in (("scale_a", scale_a), ("scale_b", scale_b)):
        require(
            scale is None or scale.dtype == torch.float32,
            lambda label=label, scale=scale: (
                f"{name}: {label} is {scale.dtype}; "  # type: ignore[misc]
                f"convert it to torch.float32"
            ),
        )
    return fp8


def _layout(x: Tensor, preferred: str) -> str:
    """preferred: of a matrix that lies either way, since it has one row or column."""
    rows, columns = x.shape
    found = []
    if x.stride(1) == 1 or columns == 1:
        found.append("row")
    if x.stride(0) == 1 or rows == 1:
        found.append("column")
    if not found:
        return "strided"
    return preferred if preferred in found else found[0]


def _call(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    scale_a: Tensor | None,
    scale_b: Tensor | None,
    activation: str,
    out_dtype: torch.dtype,
    batch_invariant: bool,
) -> MatmulCall:
    return MatmulCall(
        a.device.type,
        a.dtype,
        out_dtype,
        a.shape[0],
        b.shape[1],
        a.shape[1],
        _layout(a, "row"),
        "int4_words" if b.dtype == torch.int32 else _layout(b, "column"),
        activation,
        bias is not None,
        residual is not None,
        batch_invariant,
    )


def matmul_call(a: Tensor, b: Tensor) -> MatmulCall:
    """The call of a plain product, for those who ask which kernel runs it."""
    return _call(a, b, None, None, None, None, "none", a.dtype, False)


def _fake(a: Tensor, b: Tensor, *rest: Any) -> Tensor:
    *_, activation, out_dtype, _ = rest
    columns = b.shape[1] // 2 if is_gated(activation) else b.shape[1]
    return a.new_empty((a.shape[0], columns), dtype=out_dtype)


MATMUL = Operator(
    "matmul",
    "(Tensor a, Tensor b, Tensor? bias, Tensor? residual, Tensor? scale_a, Tensor? scale_b, "
    "str activation, ScalarType out_dtype, bool batch_invariant) -> Tensor",
    module="gemm",
    families=("gluon", "triton", "torch", "reference"),
    call=_call,
    fake=_fake,
)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    a, b, bias, residual, scale_a, _, ctx.activation, *_ = inputs
    ctx.is_quantised = scale_a is not None or b.dtype == torch.int32
    ctx.bias_dtype = None if bias is None else bias.dtype
    ctx.residual_dtype = None if residual is None else residual.dtype
    ctx.save_for_backward(a, b, *(() if bias is None else (bias,)))


def _backward(ctx: Any, grad_out: Tensor) -> tuple[Any, ...]:
    if ctx.is_quantised:
        raise NotImplementedError(
            "matmul: a product of fp8 or a packed weight has no gradient; call it under "
            "torch.no_grad()"
        )
    a, b, *bias = ctx.saved_tensors
    needs_a, needs_b, needs_bias, needs_residual, *_ = ctx.needs_input_grad
    grad = grad_out
    if ctx.activation != "none":
        wide = torch.float64 if a.dtype == torch.float64 else torch.float32
        before = MATMUL.handle(
            a, b, bias[0] if bias else None, None, None, None, "none", wide, False, "auto"
        )
        grad = activation_backward(grad_out.to(wide), before, ctx.activation)
    narrow = grad.to(a.dtype)
    return (
        narrow @ b.T if needs_a else None,
        a.T @ narrow if needs_b else None,
        grad.sum(0).to(ctx.bias_dtype) if needs_bias and bias else None,
        grad_out.to(ctx.residual_dtype) if needs_residual and ctx.residual_dtype else None,
        *(None,) * 6,
    )


MATMUL.register_autograd(_backward, _setup_context)
