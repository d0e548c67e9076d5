"""Products with int4 weights, whose operands go from memory to registers: no copy engine, no barriers, no
roles.

    out[y, x] = sum over k of weight[x, k] rows[y, k]

The weight is the left operand, so that its rows fill the tensor core's sixteen and eight columns are
enough for one row of activations. The warps of a CTA share k: every warp multiplies the whole tile over
slices of its own, and the sums are added at the end, so no other CTA takes part. What costs time in a
small product is latency, and this one waits for memory once or twice in all.

Activations must have k as their contiguous dimension. A thread reads eight elements along k at a time:
the tensor core may take k in any order as long as both operands do the same. Rows that begin on no
multiple of 16 bytes are read in smaller units, a warp along a row, and turned around in shared memory.
"""
# mypy: disable-error-code="no-untyped-def"

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from rooftile.kernels.gluon.gemm.codes import along, dequantised, fetch_codes, sums_layout
from rooftile.kernels.gluon.gemm.epilogue import activate
from rooftile.kernels.gluon.tile.dependent import await_kernels_before, let_dependents_start

WIDTH = gl.constexpr(8)  # elements along k that a thread reads at a time


@gluon.constexpr_function
def _load_layout(warps_k, unit, tile_k):
    """Of activations of which 16 bytes cannot be read at a time: a warp reads along rows."""
    lanes = min(32, tile_k // unit)
    return gl.BlockedLayout([1, unit, 1], [1, lanes, 32 // lanes], [warps_k, 1, 1], [1, 2, 0])


@gluon.jit
def _activations(
    matrix, stride, rows, row0, k, k0, tile: gl.constexpr, tile_k: gl.constexpr,
    warps_k: gl.constexpr, unit: gl.constexpr, even: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """Steps k0 .. along k of all warps: [warps_k, tile_k, tile].

    Rows beyond the matrix repeat its last one; what becomes of them is not stored.
    """
    warp = along(warps_k, 0, 3, layout)
    step = along(tile_k, 1, 3, layout)
    row = along(tile, 2, 3, layout)
    wide_row = gl.minimum(row0 + row, rows - 1).to(gl.int64)
    at = k0 + warp * tile_k + step
    bytes: gl.constexpr = unit * matrix.dtype.element_ty.itemsize
    pointers = matrix + wide_row * stride + at
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
    x,  # pointer, the weight [x_rows, k] as int32 words of int4 codes: see codes.py
    y,  # pointer, activations [y_rows, k]
    out,  # pointer, [y_rows, x_rows]
    bias,  # pointer, [x_rows]
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
    y_unit: gl.constexpr,  # elements of activations that can be read at a time
    even: gl.constexpr,  # k is a multiple of warps_k tile_k
    activation: gl.constexpr,
    has_bias: gl.constexpr,
    has_residual: gl.constexpr,
    early: gl.constexpr,  # codes are fetched a step before they are multiplied
    ahead: gl.constexpr,  # the first of them before the kernels before have ended
):
    """A CTA: one tile. Launched with warps_k warps."""
    sums: gl.constexpr = sums_layout(warps_k)
    left: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=sums, k_width=WIDTH)
    right: gl.constexpr = gl.DotOperandLayout(operand_index=1, parent=sums, k_width=WIDTH)
    y_layout: gl.constexpr = right if y_unit == WIDTH else _load_layout(warps_k, y_unit, tile_k)
    tile = gl.program_id(0)
    tile_of_y = tile // tiles_x
    x0 = (tile - tile_of_y * tiles_x) * tile_x
    y0 = tile_of_y * tile_y
    let_dependents_start()
    if not ahead:
        await_kernels_before()
    acc = gl.zeros([warps_k, tile_x, tile_y], gl.float32, sums)
    if early:
        word, scale = fetch_codes(x, scales, x_stride, x_rows, x0, k, 0, tile_x, tile_k, warps_k)
    if ahead:
        await_kernels_before()
    for k0 in range(0, k, warps_k * tile_k):
        if not early:
            word, scale = fetch_codes(
                x, scales, x_stride, x_rows, x0, k, k0, tile_x, tile_k, warps_k
            )
        b = _activations(
            y, y_stride, y_rows, y0, k, k0, tile_y, tile_k, warps_k, y_unit, even, y_layout
        )
        following = k0 + warps_k * tile_k
        if early:
            next_word, next_scale = fetch_codes(
                x, scales, x_stride, x_rows, x0, k, following, tile_x, tile_k, warps_k
            )
        a = dequantised(word, scale, left)
        if early:
            word = next_word
            scale = next_scale
        acc = mma_v2(gl.convert_layout(a, left), gl.convert_layout(b, right), acc)
    total = gl.sum(acc, 0)
    of: gl.constexpr = gl.SliceLayout(0, sums)
    column = gl.expand_dims(x0 + gl.arange(0, tile_x, gl.SliceLayout(1, of)), 1)
    row = gl.expand_dims(y0 + gl.arange(0, tile_y, gl.SliceLayout(0, of)), 0)
    inside = (column < x_rows) & (row < y_rows)
    if has_bias:
        total += gl.load(bias + column, mask=column < x_rows, other=0.0).to(gl.float32)
    wide_row = row.to(gl.int64)
    total = activate(total, activation)
    if has_residual:
        residual_at = wide_row * residual_stride + column
        total += gl.load(residual + residual_at, mask=inside, other=0.0).to(gl.float32)
    gl.store(out + (wide_row * out_stride + column), total.to(out.dtype.element_ty), mask=inside)
