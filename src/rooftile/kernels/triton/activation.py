"""Gated activations in portable Triton: gate and value are read once."""
# mypy: disable-error-code="no-untyped-def"

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from rooftile.kernels import Kernel
from rooftile.kernels.triton.grid import grid_of, second_id
from rooftile.kernels.triton.pointwise import early, overlap, where
from rooftile.kernels.triton.refusal import refusal

TILE = 1024


@triton.jit
def gated(gate, value, is_silu: tl.constexpr):
    """activation(gate) * value in float32: silu, or gelu by tanh."""
    if is_silu:  # noqa: SIM108  (a branch at compile time)
        slope = gate
    else:
        # gelu's 1 + tanh(u) is 2 sigmoid(2 u), which keeps the left tail.
        slope = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    return gate / (1.0 + tl.exp(-slope)) * value


@triton.jit
def gated_kernel(
    x,
    out,
    size,
    row_stride,
    tile: tl.constexpr,
    is_silu: tl.constexpr,
    overlapped: tl.constexpr,
):
    """Program (row, tile of columns)."""
    early(overlapped)
    row = tl.program_id(0).to(tl.int64)
    column = second_id() * tile + tl.arange(0, tile)
    inside = column < size
    gate = tl.load(x + row * row_stride + column, mask=inside, other=0.0).to(tl.float32)
    value = tl.load(x + row * row_stride + size + column, mask=inside, other=0.0).to(tl.float32)
    y = gated(gate, value, is_silu)
    tl.store(out + row * size + column, y.to(out.dtype.element_ty), mask=inside)


def gated_activation(x: Tensor, activation: str) -> Tensor:  # [..., 2 * size] -> [..., size]
    size = x.shape[-1] // 2
    out = torch.empty((*x.shape[:-1], size), dtype=x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    x = x if x.dim() == 2 and x.stride(1) == 1 else x.contiguous()
    rows = out.numel() // size
    with where(x):
        gated_kernel[grid_of(rows, triton.cdiv(size, TILE))](
            *(x, out, size, x.stride(0) if x.dim() == 2 else 2 * size),
            tile=TILE,
            is_silu=activation == "silu",
            **overlap(x),
        )
    return out


def supports(call: Any) -> str | None:
    if call.activation == "gelu":
        return "it has no gelu by the error function"
    return refusal(call)


KERNELS = {"gated_activation": Kernel(gated_activation, supports, efficiency=0.8)}
