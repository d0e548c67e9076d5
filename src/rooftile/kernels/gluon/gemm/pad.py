"""Copies of matrices whose rows the copy engine cannot address, with rows that it can, and back.

A row has to begin on a multiple of 16 bytes, and is read fastest on one of 128. Reading and writing a matrix once more costs far less
than to load or store it element by element in the product.
"""
# mypy: disable-error-code="no-untyped-def"

from functools import lru_cache

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from rooftile.kernels.gluon.launch import Launch

_LINE_BYTES = 128
_UNITS_OF_A_CTA = 2048  # in flight at a time: 16 a thread
_MOST_COLUMNS = 1024
_UNITS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}


@gluon.jit(do_not_specialize=["x", "copy", "rows", "columns", "stride", "copy_stride"])
def copy_kernel(
    x,  # pointer, [rows, columns]
    copy,  # pointer, the same
    rows,
    columns,
    stride,
    copy_stride,
    block_rows: gl.constexpr,
    block_columns: gl.constexpr,
):
    """copy = x, a few rows a CTA. Neighbours along a row go to neighbouring threads, so that a warp
    reads and writes one piece wherever it begins."""
    L: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [1, 4], [1, 0])
    row = gl.program_id(0) * block_rows + gl.arange(0, block_rows, gl.SliceLayout(1, L))
    column = gl.arange(0, block_columns, gl.SliceLayout(0, L))
    wide_row = gl.expand_dims(row.to(gl.int64), 1)
    inside_rows = gl.expand_dims(row < rows, 1)
    for start in range(0, columns, block_columns):
        at = gl.expand_dims(start + column, 0)
        inside = inside_rows & (at < columns)
        values = gl.load(x + wide_row * stride + at, mask=inside)
        gl.store(copy + wide_row * copy_stride + at, values, mask=inside)


def padded(x: Tensor) -> Tensor:  # [rows, columns]
    """A copy of x whose rows begin on multiples of 128 bytes."""
    copy = _new(x)
    copy_rows(x, copy)
    return copy


def addressable_rows(x: Tensor) -> Tensor:  # [rows, columns], new
    """x itself where its rows begin on multiples of 16 bytes, else a place for such a copy."""
    return x if x.shape[1] * x.element_size() % 16 == 0 else _new(x)


def copy_rows(x: Tensor, copy: Tensor) -> None:  # both [rows, columns]
    """copy = x, in the largest units that both consist of."""
    rows, columns = x.shape
    if x.stride(1) != 1:
        copy.copy_(x)
        return
    size = x.element_size()
    strides = (x.stride(0) * size, copy.stride(0) * size)
    places = (x.data_ptr(), copy.data_ptr(), columns * size, *strides)
    unit = next(u for u in _UNITS if all(n % u == 0 for n in places))
    x, copy = x.view(_UNITS[unit]), copy.view(_UNITS[unit])
    units = columns * size // unit
    _launch(x.device, x.dtype, rows, units, x.stride(0), copy.stride(0))((), (x, copy))


def _new(x: Tensor) -> Tensor:
    rows, columns = x.shape
    line = _LINE_BYTES // x.element_size()
    return x.new_empty((rows, -(-columns // line) * line))[:, :columns]


@lru_cache(maxsize=1024)
def _launch(
    device: torch.device, dtype: torch.dtype, rows: int, columns: int, stride: int, copy_stride: int
) -> Launch:
    block_columns = min(max(1 << (columns - 1).bit_length(), 32), _MOST_COLUMNS)
    block_rows = _UNITS_OF_A_CTA // block_columns
    return Launch(
        copy_kernel,
        -(-rows // block_rows),
        device,
        dtype,
        (),
        (rows, columns, stride, copy_stride),
        (("block_rows", block_rows), ("block_columns", block_columns)),
    )
