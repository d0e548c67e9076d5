"""Matrix products with their epilogues in plain PyTorch, accumulated in float32 or wider."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from rooftile.kernels import Kernel, anything
from rooftile.kernels.reference import int4_words
from rooftile.kernels.reference.precision import widen

_GATE = "_and_mul"
ACTIVATIONS = ("none", *(x + end for end in ("", _GATE) for x in ("silu", "gelu", "gelu_tanh")))


def is_gated(activation: str) -> bool:
    """Whether the first half of the columns is a gate for the second."""
    return activation.endswith(_GATE)


def matmul(
    a: Tensor,  # [m, k]
    b: Tensor,  # [k, n], or words of int4 codes, [k / 8, n]
    bias: Tensor | None,  # [n]
    residual: Tensor | None,  # [m, n] or [m, n / 2]
    scale_a: Tensor | None,  # [] or [m]
    scale_b: Tensor | None,  # [] or [n]; of codes: [n, k / 32]
    activation: str,
    out_dtype: torch.dtype,
    batch_invariant: bool,
) -> Tensor:
    if b.dtype == torch.int32:
        assert scale_b is not None
        b, scale_b = int4_words.unpack(b.T, scale_b, a.shape[1]).T.to(a.dtype), None
    y = widen(a) @ widen(b)
    return finish(y, bias, residual, scale_a, scale_b, activation).to(out_dtype)


def finish(
    y: Tensor,  # [m, n] float32 or wider: a @ b
    bias: Tensor | None,
    residual: Tensor | None,
    scale_a: Tensor | None,
    scale_b: Tensor | None,
    activation: str,
) -> Tensor:
    """What follows a product, in y's precision."""
    if scale_a is not None:
        y = y * (scale_a[:, None] if scale_a.dim() else scale_a)
    if scale_b is not None:
        y = y * scale_b
    if bias is not None:
        y = y + bias
    y = activate(y, activation)
    return y if residual is None else y + residual


def activate(x: Tensor, activation: str) -> Tensor:
    if activation == "none":
        return x
    if is_gated(activation):
        gate, value = x.chunk(2, -1)
        return activate(gate, activation.removesuffix(_GATE)) * value
    if activation == "silu":
        return F.silu(x)
    return F.gelu(x, approximate="tanh" if activation == "gelu_tanh" else "none")


def activation_backward(grad: Tensor, x: Tensor, activation: str) -> Tensor:
    """Gradient at x [m, n] of `activate(x)`, given that of its result."""
    if is_gated(activation):
        inner = activation.removesuffix(_GATE)
        gate, value = x.chunk(2, -1)
        grad_gate = activation_backward(grad * value, gate, inner)
        return torch.cat([grad_gate, grad * activate(gate, inner)], -1)
    if activation == "silu":
        return torch.ops.aten.silu_backward(grad, x)
    tanh = "tanh" if activation == "gelu_tanh" else "none"
    return torch.ops.aten.gelu_backward(grad, x, approximate=tanh)


# Less than any other family predicts for the smallest product.
KERNELS = {"matmul": Kernel(matmul, anything, efficiency=1e-9)}
