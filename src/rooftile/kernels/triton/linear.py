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
LINE = tl.constexpr(128)  # bytes of a cache line


class Tiles(NamedTuple):
    """What a program takes at once, and what is on its way before it may read x."""

    out: int  # output features; of each half where there is a gate
    inner: int  # of the inner dimension; 16 bytes a thread, so that all features share its inputs
    depth: int  # tiles in registers, 1 or 2
    fetched: int  # bytes of the weight that a launch asks into L2
    fetching: int  # programs that do so


@triton.jit
def _fetch(weight, first, nbytes, threads: tl.constexpr):
    """Asks for `nbytes` from byte `first` on, into L2."""
    at = weight.to(tl.int64) + first + tl.arange(0, threads) * LINE
    for start in range(0, nbytes, threads * LINE):
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; // $0", "=r,l", [at + start],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


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


@triton.jit(do_not_specialize=["fetched", "fetching"])
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
    fetched,  # bytes of the weight that each of the first programs asks into L2
    fetching,  # those programs
    rows: tl.constexpr,
    tile_out: tl.constexpr,
    tile_in: tl.constexpr,
    depth: tl.constexpr,  # tiles on their way: 1 or 2
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
    # The weights are read once: they leave the caches first.
    more = exists & (k < in_features) if ragged else exists
    w0 = tl.load(tile, mask=more, other=0.0, eviction_policy="evict_first")
    v0 = w0
    if gate != "":
        v0 = tl.load(tile + second, mask=more, other=0.0, eviction_policy="evict_first")
    w1, v1 = w0, v0
    if depth > 1:
        more = exists & (tile_in + k < in_features) if ragged else exists & (tile_in < in_features)
        w1 = tl.load(tile + tile_in, mask=more, other=0.0, eviction_policy="evict_first")
        v1 = w1
        if gate != "":
            v1 = tl.load(
                tile + second + tile_in, mask=more, other=0.0, eviction_policy="evict_first"
            )
    if overlapped and ahead:
        if program < fetching:
            size: tl.constexpr = weight.dtype.element_ty.primitive_bitwidth // 8
            _fetch(weight, program.to(tl.int64) * fetched, fetched, tile_in * size // 16)
            if gate != "":
                _fetch(
                    weight + second, program.to(tl.int64) * fetched, fetched, tile_in * size // 16
                )
        cuda.gdc_wait()
    total0 = tl.zeros([tile_out, tile_in], tl.float32)
    total1, total2, total3 = total0, total0, total0
    value0, value1, value2, value3 = total0, total0, total0, total0
    square0 = tl.zeros([1, tile_in], tl.float32)
    square1, square2, square3 = square0, square0, square0
    for start in range(0, in_features, tile_in):
        w, v = w0.to(tl.float32), v0.to(tl.float32)
        w0, v0 = w1, v1
        coming = start + depth * tile_in
        more = exists & (coming + k < in_features) if ragged else exists & (coming < in_features)
        w1 = tl.load(tile + coming, mask=more, other=0.0, eviction_policy="evict_first")
        if gate != "":
            v1 = tl.load(
                tile + second + coming, mask=more, other=0.0, eviction_policy="evict_first"
            )
        if depth == 1:
            w0, v0 = w1, v1
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
    if _is_small(_rows(x), x.shape[-1]) and weight.stride(1) == 1:
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
            *(tiles.fetched // max(tiles.fetching, 1), tiles.fetching),
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
            **overlap(x),
        )
    return out, stream


def _is_small(rows: int, in_features: int) -> bool:
    """Whether this kernel takes a product; the vendor's takes the others."""
    return 0 < rows <= MOST_ROWS and in_features > 0 and in_features % 16 == 0


def _tiles(rows: int, out_features: int, weight: Tensor, activation: str, has_norm: bool) -> Tiles:
    inner = 128 * 16 // weight.element_size()  # of four warps
    # Sums of rows and gates are in registers.
    out = 4 // (2 if rows > 2 else 1) // (2 if activation else 1)
    return Tiles(out, inner, 2, 0, 0)


def supports(call: Any) -> str | None:
    if call.format != "dense":
        return f"it reads dense weights, not {call.format!r}"
    return refusal(call)


def normed_supports(call: Any) -> str | None:
    return gate_supports(call)


KERNELS = {"linear": Kernel(linear, supports, efficiency=0.6)}
NORMED = {"normed_linear": Kernel(normed_linear, normed_supports, efficiency=0.6)}
