"""Linear layers for few rows in portable Triton: the weight is read once, as fast as memory gives it.

A program takes some output features and all of the inner dimension; products are summed in float32 in
registers and reduced once at the end. In an engine its first weights are on their way before the
kernel ahead has written x (`weights_at_rest`). A gate multiplies two features of the same program.
Small weights of one row have a kernel of their own, which computes the norm before them as well
(one_row.py). More rows than a few are the vendor's matrix product, through torch.
"""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda

from rooftile.kernels import Kernel
from rooftile.kernels.triton import few
from rooftile.kernels.triton.activation import gated, gated_activation
from rooftile.kernels.triton.activation import supports as gate_supports
from rooftile.kernels.triton.norm import rms_norm
from rooftile.kernels.triton.one_row import keeps_row, one_row
from rooftile.kernels.triton.pointwise import overlap, where
from rooftile.kernels.triton.refusal import refusal
from rooftile.kernels.weights_at_rest import are_weights_at_rest


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
def _finish(
    total, gate_total, bias, out, n, out_features, has_bias: tl.constexpr, gate: tl.constexpr
):
    y = tl.sum(total, 1)
    inside = n < out_features
    dtype = out.dtype.element_ty
    if has_bias:
        y += tl.load(bias + n, mask=inside, other=0.0).to(tl.float32)
    if gate != "":
        value = tl.sum(gate_total, 1)
        if has_bias:
            value += tl.load(bias + out_features + n, mask=inside, other=0.0).to(tl.float32)
        # Rounded as the product by itself is.
        y = gated(y.to(dtype).to(tl.float32), value.to(dtype).to(tl.float32), gate == "silu")
    tl.store(out + n, y.to(dtype), mask=inside)


@triton.jit
def few_rows_kernel(
    x,
    weight,
    bias,
    out,
    x_stride,
    weight_stride,
    out_features,  # after the gate
    in_features,
    rows: tl.constexpr,
    tile_out: tl.constexpr,
    tile_in: tl.constexpr,
    ragged: tl.constexpr,  # tile_in does not divide in_features
    has_bias: tl.constexpr,
    gate: tl.constexpr,  # "": none; weight then has twice as many rows: gates, then values
    ahead: tl.constexpr,  # weights may be read before the kernels before have finished
    overlapped: tl.constexpr,
):
    """Program: tile_out output features."""
    n = tl.program_id(0) * tile_out + tl.arange(0, tile_out)
    k = tl.arange(0, tile_in)[None, :]
    exists = (n < out_features)[:, None]
    tile = weight + n[:, None].to(tl.int64) * weight_stride + k
    second = weight_stride.to(tl.int64) * out_features
    if overlapped:
        cuda.gdc_launch_dependents()
        if not ahead:
            cuda.gdc_wait()
    w, v = _weights(tile, second, exists, 0, k, in_features, gate, ragged)
    if overlapped and ahead:
        cuda.gdc_wait()
    total0 = tl.zeros([tile_out, tile_in], tl.float32)
    total1, total2, total3 = total0, total0, total0
    value0, value1, value2, value3 = total0, total0, total0, total0
    for start in range(0, in_features, tile_in):
        next_w, next_v = _weights(
            tile, second, exists, start + tile_in, k, in_features, gate, ragged
        )
        w, v = w.to(tl.float32), v.to(tl.float32)
        at = start + k
        inside = at < in_features if ragged else at >= 0
        a = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        total0 += w * a
        if gate != "":
            value0 += v * a
        if rows > 1:
            a = tl.load(x + x_stride + at, mask=inside, other=0.0).to(tl.float32)
            total1 += w * a
            if gate != "":
                value1 += v * a
        if rows > 2:
            a = tl.load(x + 2 * x_stride + at, mask=inside, other=0.0).to(tl.float32)
            total2 += w * a
            if gate != "":
                value2 += v * a
        if rows > 3:
            a = tl.load(x + 3 * x_stride + at, mask=inside, other=0.0).to(tl.float32)
            total3 += w * a
            if gate != "":
                value3 += v * a
        w, v = next_w, next_v
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
    if few.takes(_rows(x), x.shape[-1]) and matrix.stride(1) == 1:
        return few_rows(x, matrix, bias)
    return F.linear(x, matrix, bias)


def few_rows(
    x: Tensor,  # [..., in_features], as few as few.py: takes allows
    weight: Tensor,  # [out_features, in_features], in_features contiguous
    bias: Tensor | None,  # [out_features]
) -> Tensor:
    """The product by the faster of the kernels here."""
    if keeps_row(x, weight):
        return one_row(x, weight, bias)[0]
    return _few_rows(x, weight, bias)


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
    if not activation and keeps_row(x, weight):
        return one_row(x, weight, bias, residual, norm_weight, eps, weight_offset)
    y, stream = rms_norm(x, norm_weight, residual, eps, weight_offset)
    if few.takes(_rows(x), x.shape[-1]) and weight.stride(1) == 1:
        return _few_rows(y, weight, bias, activation), stream
    y = F.linear(y, weight, bias)
    return (gated_activation(y, activation) if activation else y), stream


def _rows(x: Tensor) -> int:
    return x.numel() // max(x.shape[-1], 1)


def _few_rows(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str = "") -> Tensor:
    rows, in_features = _rows(x), x.shape[-1]
    out_features = weight.shape[0] // (2 if activation else 1)
    out = torch.empty((*x.shape[:-1], out_features), dtype=x.dtype, device=x.device)
    flat = x.reshape(rows, in_features)
    flat = flat if flat.stride(1) == 1 else flat.contiguous()
    tile_out = _features_of(rows, activation)
    tile_in = (
        128 * 16 // weight.element_size()
    )  # of four warps, so that all features share its inputs
    with where(x):
        few_rows_kernel[(triton.cdiv(out_features, tile_out),)](
            *(flat, weight, out if bias is None else bias, out, flat.stride(0), weight.stride(0)),
            *(out_features, in_features),
            rows=rows,
            tile_out=tile_out,
            tile_in=tile_in,
            ragged=in_features % tile_in != 0,
            has_bias=bias is not None,
            gate=activation,
            ahead=are_weights_at_rest(),
            **overlap(x),
        )
    return out


def _features_of(rows: int, activation: str) -> int:
    """Output features of a program. With one its registers are few, so that a multiprocessor runs as
    many as it can; sums of several rows want more of them.
    """
    return 1 if rows == 1 else 4 // (2 if rows > 2 else 1) // (2 if activation else 1)


def supports(call: Any) -> str | None:
    if call.format != "dense":
        return f"it reads dense weights, not {call.format!r}"
    return refusal(call)


def normed_supports(call: Any) -> str | None:
    return gate_supports(call)


KERNELS = {"linear": Kernel(linear, supports, efficiency=0.6)}
NORMED = {"normed_linear": Kernel(normed_linear, normed_supports, efficiency=0.6)}
