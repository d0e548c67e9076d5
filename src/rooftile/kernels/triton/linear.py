"""Linear layers for few rows in portable Triton: the weight is read once, as fast as memory gives it.

A program takes some output features and all of the inner dimension; products are summed in float32 in
registers and reduced once at the end. In an engine its first weights are on their way before the
kernel ahead has written x (`weights_at_rest`). The norm before a layer is computed by every program for itself, from rows that its caches
hold, and a gate multiplies two features of the same program. More rows than a few are the vendor's
matrix product, through torch.
"""
# mypy: disable-error-code="no-untyped-def"

from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from rooftile.kernels import Kernel
from rooftile.kernels.triton.activation import gated, gated_activation
from rooftile.kernels.triton.activation import supports as gate_supports
from rooftile.kernels.triton.norm import rms_norm
from rooftile.kernels.triton.pointwise import early, overlap, where
from rooftile.kernels.triton.refusal import refusal
from rooftile.kernels.weights_at_rest import are_weights_at_rest

MOST_ROWS = 4
TILE_ELEMENTS = 4096  # of the weight, that a program has on the way at once
# Programs of a launch, so that each of 132 multiprocessors has enough weights on the way; a norm is
# computed by each of them, so there are fewer then.
WANTED_PROGRAMS, WANTED_WITH_NORM = 924, 264
MOST_NORM_TILE = 2048  # of a row, read at once for its norm: each read takes a trip to memory


@triton.jit
def _summed(x, residual, at, mask, has_residual: tl.constexpr):
    """float32 of x + residual, rounded to x's dtype."""
    s = tl.load(x + at, mask=mask, other=0.0)
    if has_residual:
        r = tl.load(residual + at, mask=mask, other=0.0)
        s = (s.to(tl.float32) + r.to(tl.float32)).to(s.dtype)
    return s.to(tl.float32)


@triton.jit
def _scale_of_row(
    x, residual, stream, eps, in_features, has_residual: tl.constexpr, tile: tl.constexpr
):
    """1 / rms of a row. The first program also writes the stream."""
    lane = tl.arange(0, tile)
    square = tl.zeros([tile], tl.float32)
    for start in range(0, in_features, tile):
        inside = start + lane < in_features
        s = _summed(x, residual, start + lane, inside, has_residual)
        square += s * s
        if tl.program_id(0) == 0:
            tl.store(stream + start + lane, s.to(stream.dtype.element_ty), mask=inside)
    return tl.rsqrt(tl.sum(square) / in_features + eps)


@triton.jit
def _inputs(
    x, residual, norm, at, scale, offset, has_norm: tl.constexpr, has_residual: tl.constexpr
):
    """What the weights at these places are multiplied by, float32."""
    if has_norm:
        s = _summed(x, residual, at, at >= 0, has_residual)
        w = tl.load(norm + at).to(tl.float32) + offset
        return (s * scale * w).to(x.dtype.element_ty).to(tl.float32)
    return tl.load(x + at).to(tl.float32)


@triton.jit
def _finish(
    total, gate_total, bias, out, n, out_features, has_bias: tl.constexpr, gate: tl.constexpr
):
    y = tl.sum(total, 1)
    inside = n < out_features
    if has_bias:
        y += tl.load(bias + n, mask=inside, other=0.0).to(tl.float32)
    if gate != "":
        value = tl.sum(gate_total, 1)
        if has_bias:
            value += tl.load(bias + out_features + n, mask=inside, other=0.0).to(tl.float32)
        dtype = out.dtype.element_ty
        # Rounded as the product by itself is.
        y = gated(y.to(dtype).to(tl.float32), value.to(dtype).to(tl.float32), gate == "silu")
    tl.store(out + n, y.to(out.dtype.element_ty), mask=inside)


@triton.jit
def few_rows_kernel(
    x,
    residual,
    norm,
    weight,
    bias,
    out,
    stream,
    x_stride,
    weight_stride,
    out_features,  # after the gate
    in_features,
    eps,
    offset,
    rows: tl.constexpr,
    tile_out: tl.constexpr,
    tile_in: tl.constexpr,
    norm_tile: tl.constexpr,
    has_bias: tl.constexpr,
    has_norm: tl.constexpr,
    has_residual: tl.constexpr,
    gate: tl.constexpr,  # "": none; weight then has twice as many rows: gates, then values
    ahead: tl.constexpr,  # weights may be read before the kernels before have finished
    overlapped: tl.constexpr,
):
    """Program: tile_out output features."""
    n = tl.program_id(0) * tile_out + tl.arange(0, tile_out)
    k = tl.arange(0, tile_in)
    exists = (n < out_features)[:, None]
    weight += n[:, None].to(tl.int64) * weight_stride + k[None, :]
    second = weight_stride.to(tl.int64) * out_features
    if not ahead:
        early(overlapped)
    following = tl.load(weight, mask=exists, other=0.0)
    following_value = following
    if gate != "":
        following_value = tl.load(weight + second, mask=exists, other=0.0)
    if ahead:
        early(overlapped)
    scale0, scale1, scale2, scale3 = 1.0, 1.0, 1.0, 1.0
    if has_norm:
        scale0 = _scale_of_row(x, residual, stream, eps, in_features, has_residual, norm_tile)
        if rows > 1:
            scale1 = _scale_of_row(
                x + x_stride, residual + in_features, stream + in_features, eps, in_features,
                has_residual, norm_tile,
            )  # fmt: skip
        if rows > 2:
            scale2 = _scale_of_row(
                x + 2 * x_stride, residual + 2 * in_features, stream + 2 * in_features, eps,
                in_features, has_residual, norm_tile,
            )  # fmt: skip
        if rows > 3:
            scale3 = _scale_of_row(
                x + 3 * x_stride, residual + 3 * in_features, stream + 3 * in_features, eps,
                in_features, has_residual, norm_tile,
            )  # fmt: skip
    # As a matrix of equal rows x has the layout of the weight, which a vector would be copied into.
    place = n[:, None] * 0 + k[None, :]
    total0 = tl.zeros([tile_out, tile_in], tl.float32)
    total1, total2, total3 = total0, total0, total0
    value0, value1, value2, value3 = total0, total0, total0, total0
    for start in range(0, in_features, tile_in):
        w = following.to(tl.float32)
        v = following_value.to(tl.float32)
        more = exists & (start + tile_in < in_features)
        following = tl.load(weight + start + tile_in, mask=more, other=0.0)
        if gate != "":
            following_value = tl.load(weight + second + start + tile_in, mask=more, other=0.0)
        at = place + start
        a = _inputs(x, residual, norm, at, scale0, offset, has_norm, has_residual)
        total0 += w * a
        if gate != "":
            value0 += v * a
        if rows > 1:
            a = _inputs(
                x + x_stride, residual + in_features, norm, at, scale1, offset, has_norm,
                has_residual,
            )  # fmt: skip
            total1 += w * a
            if gate != "":
                value1 += v * a
        if rows > 2:
            a = _inputs(
                x + 2 * x_stride, residual + 2 * in_features, norm, at, scale2, offset, has_norm,
                has_residual,
            )  # fmt: skip
            total2 += w * a
            if gate != "":
                value2 += v * a
        if rows > 3:
            a = _inputs(
                x + 3 * x_stride, residual + 3 * in_features, norm, at, scale3, offset, has_norm,
                has_residual,
            )  # fmt: skip
            total3 += w * a
            if gate != "":
                value3 += v * a
    _finish(total0, value0, bias, out, n, out_features, has_bias, gate)
    if rows > 1:
        _finish(total1, value1, bias, out + out_features, n, out_features, has_bias, gate)
    if rows > 2:
        _finish(total2, value2, bias, out + 2 * out_features, n, out_features, has_bias, gate)
    if rows > 3:
        _finish(total3, value3, bias, out + 3 * out_features, n, out_features, has_bias, gate)


def linear(
    x: Tensor,  # [..., in_features]
    weight: list[Tensor],  # one of [out_features, in_features]
    format: str,
    out_features: int,
    bias: Tensor | None,  # [out_features]
) -> Tensor:
    (matrix,) = weight
    if _tiles(_rows(x), out_features, x.shape[-1], "") is None or matrix.stride(1) != 1:
        return F.linear(x, matrix, bias)
    return _few_rows(x, matrix, bias)[0]


def normed_linear(
    x: Tensor,  # [..., in_features]
    residual: Tensor | None,  # [..., in_features]
    norm_weight: Tensor,  # [in_features]
    eps: float,
    weight_offset: float,
    weight: Tensor,  # [out_features, in_features]
    bias: Tensor | None,  # [out_features]
    activation: str,
) -> tuple[Tensor, Tensor]:
    out_features = weight.shape[0] // (2 if activation else 1)
    few = _tiles(_rows(x), out_features, x.shape[-1], activation) is not None
    if few and weight.stride(1) == 1:
        return _few_rows(x, weight, bias, residual, norm_weight, eps, weight_offset, activation)
    y, stream = rms_norm(x, norm_weight, residual, eps, weight_offset)
    y = F.linear(y, weight, bias)
    return (gated_activation(y, activation) if activation else y), stream


def _rows(x: Tensor) -> int:
    return x.numel() // max(x.shape[-1], 1)


def _few_rows(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None = None,
    norm_weight: Tensor | None = None,
    eps: float = 0.0,
    weight_offset: float = 0.0,
    activation: str = "",
) -> tuple[Tensor, Tensor]:
    """The result, and the residual stream (x itself where there is no norm)."""
    rows, in_features = _rows(x), x.shape[-1]
    out_features = weight.shape[0] // (2 if activation else 1)
    wanted = WANTED_PROGRAMS if norm_weight is None else WANTED_WITH_NORM
    tiles = _tiles(rows, out_features, in_features, activation, wanted)
    assert tiles is not None
    out = torch.empty((*x.shape[:-1], out_features), dtype=x.dtype, device=x.device)
    stream = x if norm_weight is None else torch.empty(x.shape, dtype=x.dtype, device=x.device)
    flat = x.reshape(rows, in_features)
    flat = flat if flat.stride(1) == 1 else flat.contiguous()
    tile_out, tile_in = tiles
    with where(x):
        few_rows_kernel[(triton.cdiv(out_features, tile_out),)](
            *(flat, out if residual is None else residual.contiguous()),
            *(out if norm_weight is None else norm_weight, weight),
            *(out if bias is None else bias, out, stream, flat.stride(0), weight.stride(0)),
            *(out_features, in_features, eps, float(weight_offset)),
            rows=rows,
            tile_out=tile_out,
            tile_in=tile_in,
            norm_tile=min(MOST_NORM_TILE, triton.next_power_of_2(in_features)),
            has_bias=bias is not None,
            has_norm=norm_weight is not None,
            has_residual=residual is not None,
            gate=activation,
            ahead=are_weights_at_rest(),
            **overlap(x),
        )
    return out, stream


def _tiles(
    rows: int,
    out_features: int,
    in_features: int,
    activation: str,
    wanted: int = WANTED_PROGRAMS,
) -> tuple[int, int] | None:
    """Output features and inner dimension of a tile, or `None` where the vendor's product is taken."""
    if not 0 < rows <= MOST_ROWS or in_features % 128:
        return None
    # Sums of rows and gates are in registers, as many as there are elements for each.
    elements = TILE_ELEMENTS // (1 if rows == 1 else 2) // (2 if activation and rows != 2 else 1)
    tile_out = 16
    while tile_out > 2 and out_features < wanted * tile_out:
        tile_out //= 2
    return tile_out, min(elements // tile_out, in_features & -in_features)


def supports(call: Any) -> str | None:
    if call.format != "dense":
        return f"it reads dense weights, not {call.format!r}"
    return refusal(call)


def normed_supports(call: Any) -> str | None:
    return gate_supports(call)


KERNELS = {"linear": Kernel(linear, supports, efficiency=0.6)}
NORMED = {"normed_linear": Kernel(normed_linear, normed_supports, efficiency=0.6)}
