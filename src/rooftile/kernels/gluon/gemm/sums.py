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
_MOST_LOADS = 32  # of 16 bytes that a thread has on their way
_FEW_ROWS = 4 * 132  # pieces of 128 columns, that warps take one by one


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
    warps: gl.constexpr,
    together: gl.constexpr,  # parts that are on their way at a time
    out_unit: gl.constexpr,  # elements of a result that can be stored at a time
    activation: gl.constexpr,
    has_bias: gl.constexpr,
    has_residual: gl.constexpr,
):
    let_dependents_start()
    await_kernels_before()
    # Every thread adds up elements of its own: a sum across warps would pass through shared memory.
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [warps, 1], [1, 0])
    tile = gl.program_id(0)
    tile_m = tile // tiles_n
    row = gl.expand_dims(tile_m * rows + gl.arange(0, rows, gl.SliceLayout(1, layout)), 1)
    column = (tile - tile_m * tiles_n) * columns + gl.arange(0, columns, gl.SliceLayout(0, layout))
    column = gl.expand_dims(column, 0)
    wide_row = row.to(gl.int64)
    at = parts + wide_row * stride + column
    at = gl.max_contiguous(gl.multiple_of(at, [1, 16]), [1, 4])
    inside = (row < m) & (column < stride // 4 * 4)
    total = gl.zeros([rows, columns], gl.float32, layout)
    step = gl.cast(part_rows, gl.int64) * stride // 4 * 4
    for i in range(0, count, together):
        loaded = ()
        for j in gl.static_range(together):
            there = inside & (i + j < count)
            loaded = loaded + (gl.load(at + (i + j) * step, mask=there, other=0.0),)  # type: ignore  # noqa: RUF005
        for j in gl.static_range(together):
            total += loaded[j]
    if has_bias:
        total += gl.load(bias + column, mask=column < n, other=0.0).to(gl.float32)
    total = activate(total, activation)
    inside = (row < m) & (column < n // out_unit * out_unit)
    if has_residual:
        residual_at = residual + wide_row * residual_stride + column
        total += gl.load(residual_at, mask=inside, other=0.0).to(gl.float32)
    out_at = out + wide_row * out_stride + column
    size: gl.constexpr = out_unit * out.dtype.element_ty.itemsize
    out_at = gl.max_contiguous(gl.multiple_of(out_at, [1, size]), [1, out_unit])
    gl.store(out_at, total.to(out.dtype.element_ty), mask=inside)


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
    warps, rows_of_cta = (1, 1) if m * tiles_n <= _FEW_ROWS else (4, 8)
    loads = rows_of_cta // warps  # of a thread for each part
    together = min(1 << (count - 1).bit_length(), _MOST_LOADS // loads)
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
            ("warps", warps),
            ("together", together),
            ("out_unit", gcd(n, out_stride, 4)),
            ("activation", activation),
            ("has_bias", dtypes[1] is not None),
            ("has_residual", dtypes[2] is not None),
        ),
        warps=warps,
        dependent=True,
    )
