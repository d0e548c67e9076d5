"""A product whose operands go from memory to registers: no copy engine, no barriers, no roles.

    acc[x, y] = sum over k of x[x, k] y[y, k]

For few rows (decoding) x is the weight, so that its rows fill the tensor core's sixteen and y's eight
columns are enough for one row of activations; for small products x and y may be a and b. The warps of
a CTA share k: every warp multiplies the whole tile over slices of its own, and the sums are added at
the end, so no other CTA takes part. What costs time in a small product is latency, and this one waits
for memory once or twice in all.

Both operands must have k as their contiguous dimension. A thread reads eight elements along k at a
time: the tensor core may take k in any order as long as both operands do the same. Rows that begin on
no multiple of 16 bytes are read in smaller units, a warp along a row, and turned around in shared
memory. Weights may be int4 (codes.py).
"""
# mypy: disable-error-code="no-untyped-def"

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from rooftile.kernels.gluon.gemm.codes import dequantised, fetch_codes
from rooftile.kernels.gluon.gemm.epilogue import activate
from rooftile.kernels.gluon.tile.dependent import await_kernels_before, let_dependents_start

WIDTH = gl.constexpr(8)  # elements along k that a thread reads at a time


@gluon.constexpr_function
def _product_layout(warps_k, warps_x, warps_y):
    """Of sums [warps along k, rows of x, rows of y]."""
    return gl.NVMMADistributedLayout(
        version=[2, 0], warps_per_cta=[warps_k, warps_x, warps_y], instr_shape=[1, 16, 8]
    )


@gluon.constexpr_function
def _load_layout(operand, warps_k, others, unit, tile_k, warps):
    """Of an operand of which 16 bytes cannot be read at a time: a warp reads along rows."""
    lanes = min(32, tile_k // unit)
    if operand == 0:
        return gl.BlockedLayout(
            [1, 1, unit], [1, 32 // lanes, lanes], [warps_k, others, 1], [2, 1, 0]
        )
    return gl.BlockedLayout([1, unit, 1], [1, lanes, 32 // lanes], [warps_k, 1, others], [1, 2, 0])


@gluon.jit
def _operand(
    matrix, stride, rows, row0, k, k0, tile: gl.constexpr, tile_k: gl.constexpr,
    warps_k: gl.constexpr, unit: gl.constexpr, even: gl.constexpr, side: gl.constexpr,
    layout: gl.constexpr,
):  # fmt: skip
    """Steps k0 .. along k of all warps: [warps_k, tile, tile_k], or on side 1 [warps_k, tile_k, tile].

    Rows beyond the matrix repeat its last one; what becomes of them is not stored.
    """
    if side == 0:
        warp = gl.arange(0, warps_k, gl.SliceLayout(1, gl.SliceLayout(2, layout)))
        row = gl.arange(0, tile, gl.SliceLayout(0, gl.SliceLayout(2, layout)))
        step = gl.arange(0, tile_k, gl.SliceLayout(0, gl.SliceLayout(1, layout)))
        row = gl.expand_dims(gl.expand_dims(row, 0), 2)
        step = gl.expand_dims(gl.expand_dims(step, 0), 1)
    else:
        warp = gl.arange(0, warps_k, gl.SliceLayout(1, gl.SliceLayout(2, layout)))
        step = gl.arange(0, tile_k, gl.SliceLayout(0, gl.SliceLayout(2, layout)))
        row = gl.arange(0, tile, gl.SliceLayout(0, gl.SliceLayout(1, layout)))
        row = gl.expand_dims(gl.expand_dims(row, 0), 1)
        step = gl.expand_dims(gl.expand_dims(step, 0), 2)
    warp = gl.expand_dims(gl.expand_dims(warp, 1), 2)
    wide_row = gl.minimum(row0 + row, rows - 1).to(gl.int64)
    at = k0 + warp * tile_k + step
    bytes: gl.constexpr = unit * matrix.dtype.element_ty.itemsize
    pointers = matrix + wide_row * stride + at
    if side == 0:
        pointers = gl.max_contiguous(gl.multiple_of(pointers, [1, 1, bytes]), [1, 1, unit])
    else:
        pointers = gl.max_contiguous(gl.multiple_of(pointers, [1, bytes, 1]), [1, unit, 1])
    if even:
        return gl.load(pointers)
    else:
        end = k // unit * unit  # k, which is a multiple: so that the compiler knows
        return gl.load(pointers, mask=(at < end) & (wide_row >= 0), other=0.0)


@gluon.jit(
    do_not_specialize=[
        *("x", "y", "out", "bias", "residual", "scales", "x_stride", "y_stride", "x_rows", "y_rows"),
        *("k", "tiles_x", "out_stride", "residual_stride"),
    ]
)  # fmt: skip
def direct_kernel(
    x,  # pointer, [x_rows, k]; int32 words of int4 codes: see codes.py
    y,  # pointer, [y_rows, k]
    out,  # pointer, [x_rows, y_rows], or [y_rows, x_rows] if transposed
    bias,  # pointer, one for each column of out
    residual,  # pointer, as out
    scales,  # pointer, of codes
    x_stride,
    y_stride,
    x_rows,
    y_rows,
    k,
    tiles_x,
    out_stride,
    residual_stride,
    tile_x: gl.constexpr,
    tile_y: gl.constexpr,
    tile_k: gl.constexpr,  # of a warp at a time
    warps_k: gl.constexpr,
    warps_x: gl.constexpr,
    warps_y: gl.constexpr,
    x_unit: gl.constexpr,  # elements that can be read at a time
    y_unit: gl.constexpr,
    out_unit: gl.constexpr,
    even: gl.constexpr,  # k is a multiple of warps_k tile_k
    codes: gl.constexpr,
    transposed: gl.constexpr,
    activation: gl.constexpr,
    has_bias: gl.constexpr,
    has_residual: gl.constexpr,
    early: gl.constexpr,  # codes are fetched a step before they are multiplied
    ahead: gl.constexpr,  # the first of them before the kernels before have ended
):
    """A CTA: one tile. Launched with warps_k warps_x warps_y warps."""
    sums: gl.constexpr = _product_layout(warps_k, warps_x, warps_y)
    left: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=sums, k_width=WIDTH)
    right: gl.constexpr = gl.DotOperandLayout(operand_index=1, parent=sums, k_width=WIDTH)
    warps: gl.constexpr = warps_k * warps_x * warps_y
    x_layout: gl.constexpr = (
        left
        if x_unit == WIDTH
        else _load_layout(0, warps_k, warps_x * warps_y, x_unit, tile_k, warps)
    )
    y_layout: gl.constexpr = (
        right
        if y_unit == WIDTH
        else _load_layout(1, warps_k, warps_x * warps_y, y_unit, tile_k, warps)
    )
    tile = gl.program_id(0)
    tile_of_y = tile // tiles_x
    x0 = (tile - tile_of_y * tiles_x) * tile_x
    y0 = tile_of_y * tile_y
    let_dependents_start()
    if not ahead:
        await_kernels_before()
    acc = gl.zeros([warps_k, tile_x, tile_y], gl.float32, sums)
    if codes and early:
        word, scale = fetch_codes(x, scales, x_stride, x_rows, x0, k, 0, tile_x, tile_k, warps_k)
    if ahead:
        await_kernels_before()
    for k0 in range(0, k, warps_k * tile_k):
        if codes and not early:
            word, scale = fetch_codes(
                x, scales, x_stride, x_rows, x0, k, k0, tile_x, tile_k, warps_k
            )
        b = _operand(
            y, y_stride, y_rows, y0, k, k0, tile_y, tile_k, warps_k, y_unit, even, 1, y_layout
        )
        if codes:
            following = k0 + warps_k * tile_k
            if early:
                next_word, next_scale = fetch_codes(
                    x, scales, x_stride, x_rows, x0, k, following, tile_x, tile_k, warps_k
                )
            a = dequantised(word, scale, left)
            if early:
                word = next_word
                scale = next_scale
        else:
            a = _operand(
                x, x_stride, x_rows, x0, k, k0, tile_x, tile_k, warps_k, x_unit, even, 0, x_layout
            )
        acc = mma_v2(gl.convert_layout(a, left), gl.convert_layout(b, right), acc)
    total = gl.sum(acc, 0)
    of: gl.constexpr = gl.SliceLayout(0, sums)
    row = gl.expand_dims(x0 + gl.arange(0, tile_x, gl.SliceLayout(1, of)), 1)
    column = gl.expand_dims(y0 + gl.arange(0, tile_y, gl.SliceLayout(0, of)), 0)
    inside = (row < x_rows) & (column < y_rows // out_unit * out_unit)
    if transposed:
        if has_bias:
            total += gl.load(bias + row, mask=row < x_rows, other=0.0).to(gl.float32)
        wide_column = column.to(gl.int64)
        at = wide_column * out_stride + row
        residual_at = wide_column * residual_stride + row
    else:
        if has_bias:
            total += gl.load(bias + column, mask=column < y_rows, other=0.0).to(gl.float32)
        wide_row = row.to(gl.int64)
        at = wide_row * out_stride + column
        residual_at = wide_row * residual_stride + column
    total = activate(total, activation)
    if has_residual:
        total += gl.load(residual + residual_at, mask=inside, other=0.0).to(gl.float32)
    pointers = out + at
    if not transposed:
        bytes: gl.constexpr = out_unit * out.dtype.element_ty.itemsize
        pointers = gl.max_contiguous(gl.multiple_of(pointers, [1, bytes]), [1, out_unit])
    gl.store(pointers, total.to(out.dtype.element_ty), mask=inside)
