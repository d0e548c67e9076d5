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
from rooftile.kernels.gluon.tile.shift import VECTOR, VECTOR_BYTES, shifted
from rooftile.planning.stream_k_cost import LINE_BYTES

_WARPS = 4
_VECTORS_OF_A_CTA = 2 * 32 * _WARPS  # two a thread
_MOST_COLUMNS = 64  # vectors of a row
_UNIT = torch.int16  # in which kernels count
_NUMBERS = ["begin", "rows", "row_bytes", "stride", "copy_stride", "column_blocks"]


@gluon.jit
def _copy(
    x, copy, cta, begin, rows, row_bytes, stride, copy_stride, column_blocks,
    block_rows: gl.constexpr, block_columns: gl.constexpr, warps: gl.constexpr,
):  # fmt: skip
    """copy = x, a piece of some rows a CTA. Neighbours along a row go to neighbouring threads, so that
    a warp reads and writes one piece wherever it begins."""
    lanes: gl.constexpr = min(32, block_columns)
    L: gl.constexpr = gl.BlockedLayout([1, VECTOR], [32 // lanes, lanes], [warps, 1], [1, 0])
    row_block = cta // column_blocks
    column0 = (cta - row_block * column_blocks) * (block_columns * VECTOR)
    row = row_block * block_rows + gl.arange(0, block_rows, gl.SliceLayout(1, L))
    row = gl.expand_dims(row, 1)
    column = column0 + gl.arange(0, block_columns * VECTOR, gl.SliceLayout(0, L))
    column = gl.expand_dims(column, 0)
    wide_row = row.to(gl.int64)
    start = begin + wide_row * stride
    shift = start & 15
    at = x + ((start - shift) // 2 + column)
    at = gl.max_contiguous(gl.multiple_of(at, [1, 16]), [1, VECTOR])
    next_at = gl.max_contiguous(gl.multiple_of(at + VECTOR, [1, 16]), [1, VECTOR])
    first = column // VECTOR * 16  # byte of the row that a vector of the copy begins with
    inside = (row < rows) & (first < row_bytes)
    low = gl.load(at, mask=inside, other=0)
    high = gl.load(next_at, mask=inside & (first + 16 < row_bytes + shift), other=0)
    values = shifted(low, high, shift.to(gl.int32) + 0 * column)
    to = copy + (wide_row * copy_stride + column)
    to = gl.max_contiguous(gl.multiple_of(to, [1, 16]), [1, VECTOR])
    gl.store(to, values, mask=inside)


@gluon.jit(
    do_not_specialize=[
        *("x", "copy", "other", "other_copy", "ctas", *_NUMBERS),
        *(f"other_{number}" for number in _NUMBERS),
    ]
)
def copy_kernel(
    x,  # pointer to int16, on a multiple of 16 bytes, from byte `begin` on [rows, row_bytes]
    copy,  # pointer to int16, the same from byte 0 on
    other,  # pointers, as x and copy: what the CTAs from number `ctas` on copy
    other_copy,
    ctas,
    begin,
    rows,
    row_bytes,
    stride,  # of x in bytes
    copy_stride,  # in elements, a multiple of 8
    column_blocks,  # pieces of a row
    other_begin,
    other_rows,
    other_row_bytes,
    other_stride,
    other_copy_stride,
    other_column_blocks,
    block_rows: gl.constexpr,
    block_columns: gl.constexpr,  # vectors
    other_block_rows: gl.constexpr,
    other_block_columns: gl.constexpr,
    warps: gl.constexpr,
):
    let_dependents_start()
    await_kernels_before()
    cta = gl.program_id(0)
    if cta < ctas:
        _copy(
            x, copy, cta, begin, rows, row_bytes, stride, copy_stride, column_blocks, block_rows,
            block_columns, warps,
        )  # fmt: skip
    else:
        _copy(
            other, other_copy, cta - ctas, other_begin, other_rows, other_row_bytes, other_stride,
            other_copy_stride, other_column_blocks, other_block_rows, other_block_columns, warps,
        )  # fmt: skip


def padded(*matrices: Tensor) -> tuple[Tensor, ...]:  # one or two of [rows, columns]
    """Copies whose rows begin on multiples of 128 bytes. What follows a row in its last vector of 16
    bytes is not defined."""
    copies = tuple(_new(x) for x in matrices)
    plain = []
    for x, copy in zip(matrices, copies, strict=True):
        if (
            x.numel() > 1
            and x.stride(1) == 1
            and _begin(x) <= x.storage_offset() * x.element_size()
        ):
            plain.append((x, copy))
        else:
            copy[:, : x.shape[1]].copy_(x)
    if plain:
        _copy_rows(*plain)
    return tuple(copy[:, : x.shape[1]] for x, copy in zip(matrices, copies, strict=True))


def _copy_rows(*pairs: tuple[Tensor, Tensor]) -> None:
    """Of each pair the first to the second."""
    arguments: list[Tensor] = []
    shapes = []
    for x, copy in pairs:
        rows, columns = x.shape
        size = x.element_size()
        arguments += [_vectors(x), copy.view(_UNIT)]
        stride = x.stride(0) * size if rows > 1 else 0
        copy_stride = copy.stride(0) * size // _UNIT.itemsize
        shapes.append((_begin(x), rows, columns * size, stride, copy_stride))
    launch = _launch(arguments[0].device, tuple(shapes))
    launch((), (*arguments, *arguments)[:4])


def _begin(x: Tensor) -> int:
    """Bytes by which x begins later than a vector."""
    return x.data_ptr() % VECTOR_BYTES


def _vectors(x: Tensor) -> Tensor:  # of [rows, columns], columns contiguous
    """The whole vectors that x lies in, as far as its storage goes, in units."""
    size, begin = x.element_size(), _begin(x)
    offset = x.storage_offset() * size - begin
    reach = begin + ((x.shape[0] - 1) * x.stride(0) + x.shape[1]) * size
    there = min(-(-reach // VECTOR_BYTES) * VECTOR_BYTES, x.untyped_storage().nbytes() - offset)
    whole = there // _UNIT.itemsize * _UNIT.itemsize
    return x.as_strided((whole // size,), (1,), offset // size).view(_UNIT)


def _new(x: Tensor) -> Tensor:
    rows, columns = x.shape
    line = LINE_BYTES // x.element_size()
    return x.new_empty((rows, -(-columns // line) * line))


@lru_cache(maxsize=1024)
def _launch(
    device: torch.device,
    # First byte, rows, their bytes, stride in bytes, stride of the copy in units, of each matrix.
    shapes: tuple[tuple[int, int, int, int, int], ...],
) -> Launch:
    ctas, blocks, numbers = [], [], []
    for begin, rows, row_bytes, stride, copy_stride in shapes:
        vectors = -(-row_bytes // VECTOR_BYTES)
        block_columns = min(max(1 << (vectors - 1).bit_length(), 4), _MOST_COLUMNS)
        block_rows = _VECTORS_OF_A_CTA // block_columns
        column_blocks = -(-vectors // block_columns)
        blocks.append((block_rows, block_columns))
        ctas.append(-(-rows // block_rows) * column_blocks)
        numbers.append((begin, rows, row_bytes, stride, copy_stride, column_blocks))
    return Launch(
        copy_kernel,
        sum(ctas),
        device,
        (),
        (),
        (ctas[0], *numbers[0], *numbers[-1]),
        (
            ("block_rows", blocks[0][0]),
            ("block_columns", blocks[0][1]),
            ("other_block_rows", blocks[-1][0]),
            ("other_block_columns", blocks[-1][1]),
            ("warps", _WARPS),
        ),
        warps=_WARPS,
        dependent=True,
    )
