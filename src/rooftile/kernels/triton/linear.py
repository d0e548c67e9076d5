"""Linear layers for few rows in portable Triton: the weight is read once, as fast as memory gives it.

A program takes some output features and all of the inner dimension; products are summed in float32 in
registers and reduced once at the end. In an engine its first weights are on their way before the
kernel ahead has written x (`weights_at_rest`), some into registers, more into L2. The norm before a
layer is a factor of its result: each program sums the row's squares beside its products. A gate
multiplies two features of the same program. More rows than a few are the vendor's matrix product,
through torch.
"""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda

from rooftile.kernels import Kernel
from rooftile.kernels.triton.activation import gated, gated_activation
from rooftile.kernels.triton.activation import supports as gate_supports
from rooftile.kernels.triton.norm import rms_norm
from rooftile.kernels.triton.pointwise import overlap, where
from rooftile.kernels.triton.refusal import refusal
from rooftile.kernels.weights_at_rest import are_weights_at_rest

MOST_ROWS = 4
LARGE = 64 << 20  # bytes of a weight that is read best by programs of one output feature
MOST_JOINED = 16 << 20  # bytes of a weight whose programs compute the norm before it by themselves


class Tiles(NamedTuple):
    """What a program takes at once, and what is on its way before it may read x."""

    out: int  # output features; of each half where there is a gate
    inner: int  # of the inner dimension; 16 bytes a thread, so that all features share its inputs
    depth: int  # tiles that are on their way: 1, 2 or 4


@triton.jit
def _weights(
    tile, second, exists, start, k, in_features,
    gate: tl.constexpr, ragged: tl.constexpr,
):  # fmt: skip
    """The tile of the weight from `start` on, and that of the values where there is a gate."""
    # They are read once, so they leave the caches first.
    more = exists & (start + k < in_features) if ragged else exists & (start < in_features)
    w = tl.load(tile + start, mask=more, other=0.0, eviction_policy="evict_first")
    v = w
    if gate != "":
        v = tl.load(tile + second + start, mask=more, other=0.0, eviction_policy="evict_first")
    return w, v


@triton.jit
def _inputs(
    x, residual, stream, norm, at, inside, has_norm: tl.constexpr, has_residual: tl.constexpr
):
    """What the weights at these places of a row are multiplied by, and the row's values, float32. The
    first program also writes the stream: x + residual, rounded.
    """
    s = tl.load(x + at, mask=inside, other=0.0)
    if has_residual:
        r = tl.load(residual + at, mask=inside, other=0.0)
        s = (s.to(tl.float32) + r.to(tl.float32)).to(s.dtype)
    a = s.to(tl.float32)
    if has_norm:
        if tl.program_id(0) == 0:
            tl.store(stream + at, s, mask=inside)
        return a * norm, a
    return a, a


@triton.jit
def _finish(
    total, gate_total, square, bias, out, n, out_features, in_features, eps,
    has_bias: tl.constexpr, has_norm: tl.constexpr, gate: tl.constexpr,
):  # fmt: skip
    y = tl.sum(total, 1)
    value = tl.sum(gate_total, 1)
    inside = n < out_features
    dtype = out.dtype.element_ty
    if has_norm:
        scale = tl.rsqrt(tl.sum(square) / in_features + eps)
        y *= scale
        value *= scale
    if has_bias:
        y += tl.load(bias + n, mask=inside, other=0.0).to(tl.float32)
    if gate != "":
        if has_bias:
            value += tl.load(bias + out_features + n, mask=inside, other=0.0).to(tl.float32)
        # Rounded as the product by itself is.
        y = gated(y.to(dtype).to(tl.float32), value.to(dtype).to(tl.float32), gate == "silu")
    tl.store(out + n, y.to(dtype), mask=inside)


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
    depth: tl.constexpr,  # tiles on their way: 1, 2 or 4
    ragged: tl.constexpr,  # tile_in does not divide in_features
    has_bias: tl.constexpr,
    has_norm: tl.constexpr,
    has_residual: tl.constexpr,
    gate: tl.constexpr,  # "": none; weight then has twice as many rows: gates, then values
    ahead: tl.constexpr,  # weights may be read before the kernels before have finished
    overlapped: tl.constexpr,
):
    """Program: tile_out output features."""
    program = tl.program_id(0)
    n = program * tile_out + tl.arange(0, tile_out)
    k = tl.arange(0, tile_in)[None, :]
    exists = (n < out_features)[:, None]
    tile = weight + n[:, None].to(tl.int64) * weight_stride + k
    second = weight_stride.to(tl.int64) * out_features
    if overlapped:
        cuda.gdc_launch_dependents()
        if not ahead:
            cuda.gdc_wait()
    w0, v0 = _weights(tile, second, exists, 0, k, in_features, gate, ragged)
    w1, v1, w2, v2, w3, v3 = w0, v0, w0, v0, w0, v0
    if depth > 1:
        w1, v1 = _weights(tile, second, exists, tile_in, k, in_features, gate, ragged)
    if depth > 2:
        w2, v2 = _weights(tile, second, exists, 2 * tile_in, k, in_features, gate, ragged)
        w3, v3 = _weights(tile, second, exists, 3 * tile_in, k, in_features, gate, ragged)
    if overlapped and ahead:
        cuda.gdc_wait()
    total0 = tl.zeros([tile_out, tile_in], tl.float32)
    total1, total2, total3 = total0, total0, total0
    value0, value1, value2, value3 = total0, total0, total0, total0
    square0 = tl.zeros([1, tile_in], tl.float32)
    square1, square2, square3 = square0, square0, square0
    for start in range(0, in_features, tile_in):
        w, v = w0, v0
        w0, v0, w1, v1, w2, v2 = w1, v1, w2, v2, w3, v3
        coming = start + depth * tile_in
        w3, v3 = _weights(tile, second, exists, coming, k, in_features, gate, ragged)
        if depth == 1:
            w0, v0 = w3, v3
        if depth == 2:
            w1, v1 = w3, v3
        w, v = w.to(tl.float32), v.to(tl.float32)
        at = start + k
        inside = at < in_features if ragged else at >= 0
        g = 1.0
        if has_norm:
            g = tl.load(norm + at, mask=inside, other=0.0).to(tl.float32) + offset
        a, s = _inputs(x, residual, stream, g, at, inside, has_norm, has_residual)
        total0 += w * a
        if has_norm:
            square0 += s * s
        if gate != "":
            value0 += v * a
        if rows > 1:
            a, s = _inputs(
                x + x_stride, residual + in_features, stream + in_features, g, at, inside,
                has_norm, has_residual,
            )  # fmt: skip
            total1 += w * a
            if has_norm:
                square1 += s * s
            if gate != "":
                value1 += v * a
        if rows > 2:
            a, s = _inputs(
                x + 2 * x_stride, residual + 2 * in_features, stream + 2 * in_features, g, at,
                inside, has_norm, has_residual,
            )  # fmt: skip
            total2 += w * a
            if has_norm:
                square2 += s * s
            if gate != "":
                value2 += v * a
        if rows > 3:
            a, s = _inputs(
                x + 3 * x_stride, residual + 3 * in_features, stream + 3 * in_features, g, at,
                inside, has_norm, has_residual,
            )  # fmt: skip
            total3 += w * a
            if has_norm:
                square3 += s * s
            if gate != "":
                value3 += v * a
    _finish(
        total0, value0, square0, bias, out, n, out_features, in_features, eps,
        has_bias, has_norm, gate,
    )  # fmt: skip
    if rows > 1:
        _finish(
            total1, value1, square1, bias, out + out_features, n, out_features, in_features, eps,
            has_bias, has_norm, gate,
        )  # fmt: skip
    if rows > 2:
        _finish(
            total2, value2, square2, bias, out + 2 * out_features, n, out_features, in_features,
            eps, has_bias, has_norm, gate,
        )  # fmt: skip
    if rows > 3:
        _finish(
            total3, value3, square3, bias, out + 3 * out_features, n, out_features, in_features,
            eps, has_bias, has_norm, gate,
        )  # fmt: skip


def linear(
    x: Tensor,  # [..., in_features]
    weight: list[Tensor],  # one of [out_features, in_features]
    format: str,
    out_features: int,
    bias: Tensor | None,  # [out_features]
) -> Tensor:
    (matrix,) = weight
    if not _is_small(_rows(x), x.shape[-1]) or matrix.stride(1) != 1:
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
    few = _is_small(_rows(x), x.shape[-1]) and weight.stride(1) == 1
    if few and _joins_norm(weight):
        return _few_rows(x, weight, bias, residual, norm_weight, eps, weight_offset, activation)
    y, stream = rms_norm(x, norm_weight, residual, eps, weight_offset)
    if few:
        return _few_rows(y, weight, bias, activation=activation)[0], stream
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
    tiles = _tiles(rows, out_features, weight, activation, norm_weight is not None)
    out = torch.empty((*x.shape[:-1], out_features), dtype=x.dtype, device=x.device)
    stream = x if norm_weight is None else torch.empty(x.shape, dtype=x.dtype, device=x.device)
    flat = x.reshape(rows, in_features)
    flat = flat if flat.stride(1) == 1 else flat.contiguous()
    with where(x):
        few_rows_kernel[(triton.cdiv(out_features, tiles.out),)](
            *(flat, out if residual is None else residual.contiguous()),
            *(out if norm_weight is None else norm_weight, weight),
            *(out if bias is None else bias, out, stream, flat.stride(0), weight.stride(0)),
            *(out_features, in_features, eps, float(weight_offset)),
            rows=rows,
            tile_out=tiles.out,
            tile_in=tiles.inner,
            depth=tiles.depth,
            ragged=in_features % tiles.inner != 0,
            has_bias=bias is not None,
            has_norm=norm_weight is not None,
            has_residual=residual is not None,
            gate=activation,
            ahead=are_weights_at_rest(),
            num_warps=tiles.inner * weight.element_size() // 512,  # 16 bytes a thread
            **overlap(x),
        )
    return out, stream


def _is_small(rows: int, in_features: int) -> bool:
    """Whether this kernel takes a product; the vendor's takes the others."""
    return 0 < rows <= MOST_ROWS and in_features > 0 and in_features % 16 == 0


def _joins_norm(weight: Tensor) -> bool:
    """Whether each program computes the norm before it; else it is a launch of its own."""
    return weight.nbytes <= MOST_JOINED


def _tiles(rows: int, out_features: int, weight: Tensor, activation: str, has_norm: bool) -> Tiles:
    inner = 128 * 16 // weight.element_size()  # of four warps
    if rows == 1 and not has_norm:
        # Few registers, so that a multiprocessor takes as many programs as it can.
        return Tiles(1 if weight.nbytes >= LARGE else 2, inner, 1)
    # Sums of rows and gates are in registers.
    return Tiles(4 // (2 if rows > 2 else 1) // (2 if activation else 1), inner, 1)


def supports(call: Any) -> str | None:
    if call.format != "dense":
        return f"it reads dense weights, not {call.format!r}"
    return refusal(call)


def normed_supports(call: Any) -> str | None:
    return gate_supports(call)


KERNELS = {"linear": Kernel(linear, supports, efficiency=0.6)}
NORMED = {"normed_linear": Kernel(normed_linear, normed_supports, efficiency=0.6)}
