"""The sum of the parts of a product that was split along k, and what follows it.

Parts that one launch stores and another adds need no flags, and every multiprocessor adds some: where
a tile has many parts that takes less than the time in which one CTA adds them all (fixup.py).
"""
# mypy: disable-error-code="no-untyped-def"

from functools import lru_cache
from math import gcd

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from rooftile.kernels.gluon.gemm.epilogue import activate
from rooftile.kernels.gluon.launch import Launch
from rooftile.kernels.gluon.tile.dependent import await_kernels_before, let_dependents_start

_COLUMNS = 128  # of a CTA
_MOST_TOGETHER = 32  # parts that a CTA reads at a time, each of its four warps a quarter
_MOST_VALUES = 32  # parts times rows of a CTA: its threads' registers
_CTAS = 4 * 132  # enough of them to hide each other's waiting


@gluon.jit(
    do_not_specialize=[
        *("parts", "out", "bias", "residual", "m", "n", "count", "part_rows", "stride"),
        *("out_stride", "residual_stride", "tiles_n"),
    ]
)
def sum_kernel(
    parts,  # pointer to float32, [count, part_rows, stride], stride a multiple of 4
    out,  # pointer, [m, n]
    bias,  # pointer, [n]
    residual,  # pointer, [m, n]
    m,
    n,
    count,
    part_rows,
    stride,
    out_stride,
    residual_stride,
    tiles_n,
    rows: gl.constexpr,  # of a CTA
    columns: gl.constexpr,
    together: gl.constexpr,  # parts that are read at a time
    out_unit: gl.constexpr,  # elements of a result that can be stored at a time
    activation: gl.constexpr,
    has_bias: gl.constexpr,
    has_residual: gl.constexpr,
):
    let_dependents_start()
    await_kernels_before()
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [4, 1], [1, 0])
    tile = gl.program_id(0)
    tile_m = tile // tiles_n
    at = gl.arange(0, rows * columns, gl.SliceLayout(0, layout))
    row = tile_m * rows + at // columns
    column = (tile - tile_m * tiles_n) * columns + at % columns
    part = gl.arange(0, together, gl.SliceLayout(1, layout))
    step = gl.cast(part_rows, gl.int64) * stride // 4 * 4
    # Rows and parts are whole groups of four elements, and four columns are never of two rows.
    within = gl.multiple_of(row.to(gl.int64) * stride + column, 4)
    place = parts + gl.expand_dims(part.to(gl.int64) * step, 1) + gl.expand_dims(within, 0)
    place = gl.max_contiguous(gl.multiple_of(place, [1, 16]), [1, 4])
    inside = gl.expand_dims((row < m) & (column < stride // 4 * 4), 0)
    total = gl.zeros([rows * columns], gl.float32, gl.SliceLayout(0, layout))
    for i in range(0, count, together):
        there = inside & gl.expand_dims(i + part < count, 1)
        total += gl.sum(gl.load(place + i * step, mask=there, other=0.0), 0)
    if has_bias:
        total += gl.load(bias + column, mask=column < n, other=0.0).to(gl.float32)
    total = activate(total, activation)
    wide_row = row.to(gl.int64)
    stored = (row < m) & (column < n // out_unit * out_unit)
    if has_residual:
        residual_at = residual + wide_row * residual_stride + column
        total += gl.load(residual_at, mask=stored, other=0.0).to(gl.float32)
    size: gl.constexpr = out_unit * out.dtype.element_ty.itemsize
    out_at = gl.multiple_of(out + wide_row * out_stride + column, size)
    gl.store(gl.max_contiguous(out_at, out_unit), total.to(out.dtype.element_ty), mask=stored)


def add_parts(
    parts: Tensor,  # [count, rows >= m, columns >= n] float32, columns a multiple of 4
    out: Tensor,  # [m, n]
    bias: Tensor | None,  # [n]
    residual: Tensor | None,  # [m, n]
    activation: str,
) -> None:
    """out = activation(sum of parts + bias) + residual, in the order of the parts."""
    launch = _launch(
        out.device,
        tuple(None if x is None else x.dtype for x in (out, bias, residual)),
        (*out.shape, *parts.shape),
        out.stride(0),
        0 if residual is None else residual.stride(0),
        activation,
    )
    others = (out if x is None else x for x in (bias, residual))
    launch((), (parts, out, *others))


@lru_cache(maxsize=4096)
def _launch(
    device: torch.device,
    dtypes: tuple[torch.dtype | None, ...],  # of out, bias, residual
    sizes: tuple[int, ...],  # m, n; parts, their rows and columns
    out_stride: int,
    residual_stride: int,
    activation: str,
) -> Launch:
    m, n, count, rows, columns = sizes
    tiles_n = -(-n // _COLUMNS)
    together = min(max(1 << (count - 1).bit_length(), 4), _MOST_TOGETHER)
    rows_of_cta = 1
    while (
        2 * rows_of_cta * together <= _MOST_VALUES and m * tiles_n >= 2 * rows_of_cta * _CTAS
    ):  # fmt: skip
        rows_of_cta *= 2
    return Launch(
        sum_kernel,
        -(-m // rows_of_cta) * tiles_n,
        device,
        dtypes,
        (),
        (m, n, count, rows, columns, out_stride, residual_stride, tiles_n),
        (
            ("rows", rows_of_cta),
            ("columns", _COLUMNS),
            ("together", together),
            ("out_unit", gcd(n, out_stride, 4)),
            ("activation", activation),
            ("has_bias", dtypes[1] is not None),
            ("has_residual", dtypes[2] is not None),
        ),
        dependent=True,
    )
