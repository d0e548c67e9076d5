"""The product of one row in portable Triton: programs take output features in turn, and each keeps the
whole row in its registers, so that a norm before it is computed once a program, not once a feature.
"""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda

from rooftile.kernels.triton.pointwise import overlap, where
from rooftile.kernels.weights_at_rest import are_weights_at_rest

MOST_FEATURES = 8192  # of the row: each thread keeps 32
MOST_BYTES = 64 << 20  # of the weight; larger ones are read faster by more and smaller programs
THREAD_BYTES = 64  # of an output feature's weights, that a thread has on its way
WARPS = 16  # that a multiprocessor runs at a time


@triton.jit
def one_row_kernel(
    x,
    residual,
    norm,
    weight,
    bias,
    out,
    stream,
    weight_stride,
    out_features,
    in_features,
    eps,
    offset,
    each: tl.constexpr,  # output features at once
    tile_in: tl.constexpr,  # a power of two from in_features on
    ragged: tl.constexpr,  # it is larger
    has_bias: tl.constexpr,
    has_norm: tl.constexpr,
    has_residual: tl.constexpr,
    ahead: tl.constexpr,  # weights may be read before the kernels before have finished
    overlapped: tl.constexpr,
):
    """Programs share the output features in turn; each keeps the whole row in its registers."""
    program = tl.program_id(0)
    dtype = out.dtype.element_ty
    k = tl.arange(0, tile_in)[None, :]
    inside = k < in_features if ragged else k >= 0
    feature = program * each + tl.arange(0, each)
    step = tl.num_programs(0) * each
    if overlapped:
        cuda.gdc_launch_dependents()
        if not ahead:
            cuda.gdc_wait()
    at = weight + feature[:, None].to(tl.int64) * weight_stride + k
    more = (feature < out_features)[:, None] & inside
    w = tl.load(at, mask=more, other=0.0, eviction_policy="evict_first")
    if overlapped and ahead:
        cuda.gdc_wait()
    s = tl.load(x + k, mask=inside, other=0.0)
    if has_residual:
        r = tl.load(residual + k, mask=inside, other=0.0)
        s = (s.to(tl.float32) + r.to(tl.float32)).to(dtype)
    a = s.to(tl.float32)
    if has_norm:
        if program == 0:
            tl.store(stream + k, s, mask=inside)
        g = tl.load(norm + k, mask=inside, other=0.0).to(tl.float32) + offset
        a = (a * tl.rsqrt(tl.sum(a * a) / in_features + eps) * g).to(dtype).to(tl.float32)
    for _ in range(program * each, out_features, step):
        at += step.to(tl.int64) * weight_stride
        more = (feature + step < out_features)[:, None] & inside
        following = tl.load(at, mask=more, other=0.0, eviction_policy="evict_first")
        exists = feature < out_features
        y = tl.sum(w.to(tl.float32) * a, 1)
        if has_bias:
            y += tl.load(bias + feature, mask=exists, other=0.0).to(tl.float32)
        tl.store(out + feature, y.to(dtype), mask=exists)
        w = following
        feature += step


def one_row(
    x: Tensor,  # [..., in_features], one row
    weight: Tensor,  # [out_features, in_features]
    bias: Tensor | None,  # [out_features]
    residual: Tensor | None = None,  # [..., in_features]
    norm_weight: Tensor | None = None,  # [in_features]
    eps: float = 0.0,
    weight_offset: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """The product, of the norm of x + residual where there is one; and x + residual, else x."""
    out_features, in_features = weight.shape
    out = torch.empty((*x.shape[:-1], out_features), dtype=x.dtype, device=x.device)
    stream = x if norm_weight is None else torch.empty(x.shape, dtype=x.dtype, device=x.device)
    tile_in = max(64, triton.next_power_of_2(in_features))
    warps = max(1, tile_in * weight.element_size() // (32 * THREAD_BYTES))
    each = 2 if warps >= 4 else 1
    programs = _multiprocessors(x.device) * max(1, WARPS // warps)
    unused = out  # stands for what is not read
    with where(x):
        one_row_kernel[(min(programs, triton.cdiv(out_features, each)),)](
            *(x.contiguous(), unused if residual is None else residual.contiguous()),
            *(unused if norm_weight is None else norm_weight, weight),
            *(unused if bias is None else bias, out, stream, weight.stride(0)),
            *(out_features, in_features, eps, float(weight_offset)),
            each=each,
            tile_in=tile_in,
            ragged=tile_in != in_features,
            has_bias=bias is not None,
            has_norm=norm_weight is not None,
            has_residual=residual is not None,
            ahead=are_weights_at_rest(),
            num_warps=warps,
            **overlap(x),
        )
    return out, stream


def keeps_row(x: Tensor, weight: Tensor) -> bool:
    """Whether `one_row` takes a product."""
    out_features, in_features = weight.shape
    return (
        x.numel() == in_features
        and 0 < in_features <= MOST_FEATURES
        and in_features % 16 == 0
        and out_features > 0
        and weight.nbytes < MOST_BYTES
        and weight.stride(1) == 1
    )


@cache
def _multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return 1  # in Triton's interpreter
    return torch.cuda.get_device_properties(device).multi_processor_count
