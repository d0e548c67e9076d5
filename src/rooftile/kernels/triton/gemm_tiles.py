"""Products of whole tiles whose loads the compiler pipelines (cp.async): for few tiles and a short k.

A launch of the Stream-K kernel costs more than such a product takes: barriers, roles, tensor maps.
Here a program loads its operands where they lie, rows of no multiple of 16 bytes in smaller pieces,
multiplies and stores. Both operands must have k as their contiguous dimension.
"""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from functools import lru_cache
from math import gcd

import torch
import triton
import triton.language as tl
from torch import Tensor

from rooftile.kernels.gluon.gemm.tile_plan import UNIT, TilePlan, row_unit
from rooftile.kernels.gluon.launch import Launch
from rooftile.kernels.triton.gemm import activate
from rooftile.kernels.triton.pointwise import early, overlap


@triton.jit(
    do_not_specialize=[
        *("a", "b", "out", "bias", "residual", "m", "n", "k", "a_stride", "b_stride", "out_stride"),
        *("residual_stride", "tiles_n"),
    ]
)
def tiles_kernel(
    a,  # [m, k]
    b,  # [n, k]
    out,  # [m, n]
    bias,  # [n]
    residual,  # [m, n]
    m,
    n,
    k,
    a_stride,
    b_stride,
    out_stride,
    residual_stride,
    tiles_n,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
    block_k: tl.constexpr,
    a_unit: tl.constexpr,  # elements that can be loaded at a time
    b_unit: tl.constexpr,
    out_unit: tl.constexpr,
    even: tl.constexpr,  # k is a multiple of block_k
    activation: tl.constexpr,
    has_bias: tl.constexpr,
    has_residual: tl.constexpr,
    overlapped: tl.constexpr,
):
    """Program: one tile."""
    early(overlapped)
    tile = tl.program_id(0)
    tile_m = tile // tiles_n
    rows = tile_m * block_m + tl.arange(0, block_m)
    columns = (tile - tile_m * tiles_n) * block_n + tl.arange(0, block_n)
    steps = tl.arange(0, block_k)
    a += rows.to(tl.int64)[:, None] * a_stride + steps[None, :]
    b += columns.to(tl.int64)[None, :] * b_stride + steps[:, None]
    # Not the last row over and over: a line that many programs ask for at a time is slow.
    a_rows = (rows < m)[:, None]
    b_rows = (columns < n)[None, :]
    size: tl.constexpr = a.dtype.element_ty.primitive_bitwidth // 8
    a_end = k // a_unit * a_unit  # k, which is a multiple: so that the compiler knows
    b_end = k // b_unit * b_unit
    acc = tl.zeros([block_m, block_n], tl.float32)
    for start in tl.range(0, k, block_k):
        a_at = tl.max_contiguous(tl.multiple_of(a + start, [1, a_unit * size]), [1, a_unit])
        b_at = tl.max_contiguous(tl.multiple_of(b + start, [b_unit * size, 1]), [b_unit, 1])
        if even:
            x = tl.load(a_at, mask=a_rows, other=0.0)
            y = tl.load(b_at, mask=b_rows, other=0.0)
        else:
            x = tl.load(a_at, mask=a_rows & ((start + steps)[None, :] < a_end), other=0.0)
            y = tl.load(b_at, mask=b_rows & ((start + steps)[:, None] < b_end), other=0.0)
        acc = tl.dot(x, y, acc)
    if has_bias:
        acc += tl.load(bias + columns, mask=columns < n, other=0.0).to(tl.float32)[None, :]
    acc = activate(acc, activation)
    wide_rows = rows.to(tl.int64)[:, None]
    inside = (rows < m)[:, None] & (columns < n // out_unit * out_unit)[None, :]
    if has_residual:
        at = residual + wide_rows * residual_stride + columns[None, :]
        acc += tl.load(at, mask=inside, other=0.0).to(tl.float32)
    at = out + wide_rows * out_stride + columns[None, :]
    out_size: tl.constexpr = out_unit * (out.dtype.element_ty.primitive_bitwidth // 8)
    at = tl.max_contiguous(tl.multiple_of(at, [1, out_size]), [1, out_unit])
    tl.store(at, acc.to(out.dtype.element_ty), mask=inside)


def matmul(
    a: Tensor,  # [m, k], k contiguous
    b: Tensor,  # [n, k], k contiguous
    bias: Tensor | None,  # [n]
    residual: Tensor | None,  # [m, n]
    activation: str,
    out_dtype: torch.dtype,
    plan: TilePlan,
) -> Tensor:
    (m, k), n = a.shape, b.shape[0]
    out = a.new_empty((m, n), dtype=out_dtype)
    if residual is not None and residual.stride(1) != 1:
        residual = residual.contiguous()
    launch = _launch(
        plan,
        a.device,
        tuple(None if x is None else x.dtype for x in (a, out, bias, residual)),
        (m, n, k),
        (a.stride(0), b.stride(0), n, 0 if residual is None else residual.stride(0)),
        (row_unit(a), row_unit(b), gcd(n, UNIT)),
        activation,
        overlap(a)["overlapped"],
    )
    pointers = (
        *(a, b, out, out if bias is None else bias.contiguous()),
        out if residual is None else residual,
    )
    launch((), pointers)
    return out


@lru_cache(maxsize=4096)
def _launch(
    plan: TilePlan,
    device: torch.device,
    dtypes: tuple[torch.dtype | None, ...],  # of a, out, bias, residual
    sizes: tuple[int, int, int],
    strides: tuple[int, int, int, int],  # of a, b, out, residual
    units: tuple[int, int, int],  # of a, b, out
    activation: str,
    overlapped: bool,
) -> Launch:
    m, n, k = sizes
    tiles_n = -(-n // plan.block_n)
    constants = (
        ("block_m", plan.block_m),
        ("block_n", plan.block_n),
        ("block_k", plan.block_k),
        ("a_unit", units[0]),
        ("b_unit", units[1]),
        ("out_unit", units[2] if units[2] == UNIT else min(units[2], 2)),
        ("even", k % plan.block_k == 0),
        ("activation", activation),
        ("has_bias", dtypes[2] is not None),
        ("has_residual", dtypes[3] is not None),
        ("overlapped", overlapped),
    )
    return Launch(
        tiles_kernel,
        -(-m // plan.block_m) * tiles_n,
        device,
        dtypes,
        (),
        (*sizes, *strides, tiles_n),
        constants,
        warps=plan.warps,
        dependent=overlapped,
        stages=plan.stages,
    )
