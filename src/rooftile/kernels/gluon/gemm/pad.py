"""Copies of matrices whose rows the copy engine cannot address, with rows that it can.

A row has to begin on a multiple of 16 bytes, and is read fastest on one of 128. Reading and writing
a matrix once more costs far less than to load it element by element in the product. Both operands
are copied by one launch, under the end of which the product starts.
"""
# mypy: disable-error-code="no-untyped-def"

from functools import lru_cache

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from rooftile.kernels.gluon.launch import Launch
from rooftile.kernels.gluon.tile.dependent import await_kernels_before, let_dependents_start
from rooftile.planning.stream_k_cost import LINE_BYTES

_UNITS_OF_A_CTA = 2048  # in flight at a time: 16 a thread
_MOST_COLUMNS = 1024
_UNITS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}
_NUMBERS = ["rows", "columns", "stride", "copy_stride"]


@gluon.jit
def _copy(
    x, copy, cta, rows, columns, stride, copy_stride, block_rows: gl.constexpr,
    block_columns: gl.constexpr,
):  # fmt: skip
    """copy = x, a few rows a CTA. Neighbours along a row go to neighbouring threads, so that a warp
    reads and writes one piece wherever it begins."""
    L: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [1, 4], [1, 0])
    row = cta * block_rows + gl.arange(0, block_rows, gl.SliceLayout(1, L))
    column = gl.arange(0, block_columns, gl.SliceLayout(0, L))
    wide_row = gl.expand_dims(row.to(gl.int64), 1)
    inside_rows = gl.expand_dims(row < rows, 1)
    for start in range(0, columns, block_columns):
        at = gl.expand_dims(start + column, 0)
        inside = inside_rows & (at < columns)
        values = gl.load(x + wide_row * stride + at, mask=inside)
        gl.store(copy + wide_row * copy_stride + at, values, mask=inside)


@gluon.jit(
    do_not_specialize=[
        *("x", "copy", "other", "other_copy", "ctas", *_NUMBERS),
        *(f"other_{number}" for number in _NUMBERS),
    ]
)
def copy_kernel(
    x,  # pointer, [rows, columns]
    copy,  # pointer, the same
    other,  # pointers, as x and copy: what the CTAs from number `ctas` on copy
    other_copy,
    ctas,
    rows,
    columns,
    stride,
    copy_stride,
    other_rows,
    other_columns,
    other_stride,
    other_copy_stride,
    block_rows: gl.constexpr,
    block_columns: gl.constexpr,
    other_block_rows: gl.constexpr,
    other_block_columns: gl.constexpr,
):
    let_dependents_start()
    await_kernels_before()
    cta = gl.program_id(0)
    if cta < ctas:
        _copy(x, copy, cta, rows, columns, stride, copy_stride, block_rows, block_columns)
    else:
        _copy(
            other, other_copy, cta - ctas, other_rows, other_columns, other_stride,
            other_copy_stride, other_block_rows, other_block_columns,
        )  # fmt: skip


def padded(*matrices: Tensor) -> tuple[Tensor, ...]:  # one or two of [rows, columns]
    """Copies whose rows begin on multiples of 128 bytes."""
    copies = tuple(_new(x) for x in matrices)
    plain = [(x, copy) for x, copy in zip(matrices, copies, strict=True) if x.stride(1) == 1]
    for x, copy in zip(matrices, copies, strict=True):
        if x.stride(1) != 1:
            copy.copy_(x)
    if plain:
        _copy_rows(*plain)
    return copies


def _copy_rows(*pairs: tuple[Tensor, Tensor]) -> None:
    """Of each pair the first to the second, in the largest units that both consist of."""
    arguments, shapes = [], []
    for x, copy in pairs:
        rows, columns = x.shape
        size = x.element_size()
        strides = (x.stride(0) * size, copy.stride(0) * size)
        places = (x.data_ptr(), copy.data_ptr(), columns * size, *strides)
        unit = next(u for u in _UNITS if all(n % u == 0 for n in places))
        x, copy = x.view(_UNITS[unit]), copy.view(_UNITS[unit])
        arguments += [x, copy]
        shapes.append((rows, columns * size // unit, x.stride(0), copy.stride(0)))
    dtypes = tuple(x.dtype for x in arguments)
    launch = _launch(arguments[0].device, dtypes, tuple(shapes))
    launch((), (*arguments, *arguments)[:4])


def _new(x: Tensor) -> Tensor:
    rows, columns = x.shape
    line = LINE_BYTES // x.element_size()
    return x.new_empty((rows, -(-columns // line) * line))[:, :columns]


@lru_cache(maxsize=1024)
def _launch(
    device: torch.device,
    dtypes: tuple[torch.dtype, ...],
    shapes: tuple[
        tuple[int, int, int, int], ...
    ],  # rows, columns, strides of a matrix and its copy
) -> Launch:
    ctas, blocks = [], []
    for rows, columns, *_ in shapes:
        block_columns = min(max(1 << (columns - 1).bit_length(), 32), _MOST_COLUMNS)
        blocks.append((_UNITS_OF_A_CTA // block_columns, block_columns))
        ctas.append(-(-rows // blocks[-1][0]))
    first, other = shapes[0], shapes[-1]
    return Launch(
        copy_kernel,
        sum(ctas),
        device,
        dtypes,
        (),
        (ctas[0], *first, *other),
        (
            ("block_rows", blocks[0][0]),
            ("block_columns", blocks[0][1]),
            ("other_block_rows", blocks[-1][0]),
            ("other_block_columns", blocks[-1][1]),
        ),
        dependent=True,
    )
