"""Root-mean-square norm in portable Triton: one read of a row, its residual add included.

Rows may lie on two strides (heads of tokens within a wider product). Short rows are taken several a
program, so that norms of single heads fill a warp.
"""
# mypy: disable-error-code="no-untyped-def"

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from rooftile.kernels import Kernel
from rooftile.kernels.triton.pointwise import early, overlap, rows_of, where
from rooftile.kernels.triton.refusal import refusal

TILE_ELEMENTS = 2048  # of a program that takes several short rows
MAX_HIDDEN = 16384  # a row stays in registers


@triton.jit
def rms_norm_kernel(
    x,
    residual,
    weight,
    out,
    stream,
    rows,
    inner,
    outer_stride,
    inner_stride,
    eps,
    weight_offset,
    hidden,
    tile_rows: tl.constexpr,
    tile: tl.constexpr,
    has_residual: tl.constexpr,
    has_weight: tl.constexpr,
    overlapped: tl.constexpr,
):
    """Program: tile_rows rows."""
    early(overlapped)
    row = (tl.program_id(0) * tile_rows + tl.arange(0, tile_rows)).to(tl.int64)
    column = tl.arange(0, tile)
    inside = (row < rows)[:, None] & (column < hidden)[None, :]
    at = (row // inner) * outer_stride + (row % inner) * inner_stride
    total = tl.load(x + at[:, None] + column[None, :], mask=inside, other=0.0).to(tl.float32)
    dense = row[:, None] * hidden + column[None, :]
    if has_residual:
        total += tl.load(residual + dense, mask=inside, other=0.0).to(tl.float32)
    # The stream that later layers add to is kept in x's dtype, and it is what gets normalised.
    kept = total.to(stream.dtype.element_ty)
    tl.store(stream + dense, kept, mask=inside)
    y = kept.to(tl.float32)
    y = y * tl.rsqrt(tl.sum(y * y, 1) / hidden + eps)[:, None]
    if has_weight:
        scale = tl.load(weight + column, mask=column < hidden, other=0.0).to(tl.float32)
        y = y * (scale + weight_offset)[None, :]
    tl.store(out + dense, y.to(out.dtype.element_ty), mask=inside)


def rms_norm(
    x: Tensor,  # [..., hidden]
    weight: Tensor | None,  # [hidden]
    residual: Tensor | None,  # [..., hidden]
    eps: float,
    weight_offset: float,
) -> tuple[Tensor, Tensor]:
    hidden = x.shape[-1]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    stream = torch.empty_like(out)
    if out.numel() == 0:
        return out, stream
    x, inner, outer_stride, inner_stride = rows_of(x)
    rows = out.numel() // hidden
    tile = triton.next_power_of_2(hidden)
    tile_rows = max(1, min(TILE_ELEMENTS // tile, triton.next_power_of_2(rows)))
    with where(x):
        rms_norm_kernel[(triton.cdiv(rows, tile_rows),)](
            *(x, out if residual is None else residual.contiguous()),
            *(out if weight is None else weight.contiguous(), out, stream),
            *(rows, inner, outer_stride, inner_stride, eps, float(weight_offset), hidden),
            tile_rows=tile_rows,
            tile=tile,
            has_residual=residual is not None,
            has_weight=weight is not None,
            num_warps=4 if tile <= 2048 else 8,
            **overlap(x),
        )
    return out, stream


def supports(call: Any) -> str | None:
    if call.hidden > MAX_HIDDEN:
        return f"a row has {call.hidden} values; it takes up to {MAX_HIDDEN}"
    return refusal(call)


KERNELS = {"rms_norm": Kernel(rms_norm, supports, efficiency=0.8)}
