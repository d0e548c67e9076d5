"""Linear layers for few rows in portable Triton: the weight is read once, as fast as memory gives it.

A program takes some output features and all of the inner dimension; products are summed in float32 in
registers and reduced once at the end. Its first weights are on their way before the kernel ahead has
written x. More rows than a few are the vendor's matrix product, through torch.
"""
# mypy: disable-error-code="no-untyped-def"

from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from rooftile.kernels import Kernel
from rooftile.kernels.triton.pointwise import early, overlap, refusal, where

MOST_ROWS = 4
TILE_ELEMENTS = 4096  # of the weight, that a program has on the way at once
WANTED_PROGRAMS = 264  # two for each multiprocessor of the largest GPUs


@triton.jit
def _finish(total, bias, out, n, out_features, has_bias: tl.constexpr):
    y = tl.sum(total, 1)
    if has_bias:
        y += tl.load(bias + n, mask=n < out_features, other=0.0).to(tl.float32)
    tl.store(out + n, y.to(out.dtype.element_ty), mask=n < out_features)


@triton.jit
def few_rows_kernel(
    x,
    weight,
    bias,
    out,
    x_stride,
    weight_stride,
    out_features,
    in_features,
    rows: tl.constexpr,
    tile_out: tl.constexpr,
    tile_in: tl.constexpr,
    has_bias: tl.constexpr,
    overlapped: tl.constexpr,
):
    """Program: tile_out output features."""
    n = tl.program_id(0) * tile_out + tl.arange(0, tile_out)
    k = tl.arange(0, tile_in)
    exists = (n < out_features)[:, None]
    weight += n[:, None].to(tl.int64) * weight_stride + k[None, :]
    following = tl.load(weight, mask=exists, other=0.0)
    early(overlapped)
    # As a matrix of equal rows x has the layout of the weight, which a vector would be copied into.
    x += n[:, None] * 0 + k[None, :]
    total0 = tl.zeros([tile_out, tile_in], tl.float32)
    total1, total2, total3 = total0, total0, total0
    for start in range(0, in_features, tile_in):
        w = following.to(tl.float32)
        more = exists & (start + tile_in < in_features)
        following = tl.load(weight + start + tile_in, mask=more, other=0.0)
        total0 += w * tl.load(x + start).to(tl.float32)
        if rows > 1:
            total1 += w * tl.load(x + x_stride + start).to(tl.float32)
        if rows > 2:
            total2 += w * tl.load(x + 2 * x_stride + start).to(tl.float32)
        if rows > 3:
            total3 += w * tl.load(x + 3 * x_stride + start).to(tl.float32)
    _finish(total0, bias, out, n, out_features, has_bias)
    if rows > 1:
        _finish(total1, bias, out + out_features, n, out_features, has_bias)
    if rows > 2:
        _finish(total2, bias, out + 2 * out_features, n, out_features, has_bias)
    if rows > 3:
        _finish(total3, bias, out + 3 * out_features, n, out_features, has_bias)


def linear(
    x: Tensor,  # [..., in_features]
    weight: list[Tensor],  # one of [out_features, in_features]
    format: str,
    out_features: int,
    bias: Tensor | None,  # [out_features]
) -> Tensor:
    (matrix,) = weight
    in_features = x.shape[-1]
    rows = x.numel() // max(in_features, 1)
    tiles = _tiles(rows, out_features, in_features)
    if tiles is None or matrix.stride(1) != 1:
        return F.linear(x, matrix, bias)
    out = torch.empty((*x.shape[:-1], out_features), dtype=x.dtype, device=x.device)
    x = x.reshape(rows, in_features)
    x = x if x.stride(1) == 1 else x.contiguous()
    tile_out, tile_in = tiles
    with where(x):
        few_rows_kernel[(triton.cdiv(out_features, tile_out),)](
            *(x, matrix, out if bias is None else bias, out, x.stride(0), matrix.stride(0)),
            *(out_features, in_features),
            rows=rows,
            tile_out=tile_out,
            tile_in=tile_in,
            has_bias=bias is not None,
            **overlap(x),
        )
    return out


def _tiles(rows: int, out_features: int, in_features: int) -> tuple[int, int] | None:
    """Output features and inner dimension of a tile, or `None` where the vendor's product is taken."""
    if not 0 < rows <= MOST_ROWS or in_features % 128:
        return None
    elements = TILE_ELEMENTS if rows == 1 else TILE_ELEMENTS // 2
    tile_out = 16
    while tile_out > 2 and out_features < WANTED_PROGRAMS * tile_out:
        tile_out //= 2
    tile_in = min(elements // tile_out, in_features & -in_features)
    return tile_out, tile_in


def supports(call: Any) -> str | None:
    if call.format != "dense":
        return f"it reads dense weights, not {call.format!r}"
    return refusal(call)


KERNELS = {"linear": Kernel(linear, supports, efficiency=0.6)}
