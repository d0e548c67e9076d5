"""What one row of activations needs to be multiplied with an int4 weight.

The tensor core has eight columns, and one row needs one. So the eight columns of the right operand
are the same row with all but one group in eight set to 0: a step of up to 256 along k leaves the sums
of its groups beside each other, and a product by a scale for each of them takes the place of one for
every code.
"""
# mypy: disable-error-code="no-untyped-def"

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from rooftile.kernels.gluon.gemm import codes_plan
from rooftile.kernels.gluon.gemm.codes import GROUP, along, bits, in_pairs, sums_layout
from rooftile.kernels.gluon.gemm.epilogue import activate

TILE = gl.constexpr(codes_plan.TILE)  # rows of the weight
COLUMNS = gl.constexpr(8)
_WIDTH = gl.constexpr(8)  # elements along k that a thread reads at a time


@gluon.constexpr_function
def _row_layout(warps_k, step_k):
    """Of activations [warps_k, step_k, COLUMNS]: as a right operand, but eight along k a thread."""
    return gl.DistributedLinearLayout(
        reg_bases=bits(3, 8, 1) + bits(3, step_k, 1, 32),
        lane_bases=bits(3, 32, 1, 8) + bits(3, 8, 2),
        warp_bases=bits(3, warps_k, 0),
        block_bases=[],
        shape=[warps_k, step_k, 8],
    )


@gluon.jit
def fetch_row(
    row, k, k0, warps_k: gl.constexpr, step_k: gl.constexpr, even: gl.constexpr,
):  # fmt: skip
    """Steps k0 .. of all warps, [warps_k, step_k, COLUMNS]: in a column one group, and 0.

    row: pointer, on a multiple of 16 bytes. even: k is a multiple of all warps' steps, else of 8.
    """
    layout: gl.constexpr = _row_layout(warps_k, step_k)
    column = along(COLUMNS, 2, layout)
    step = along(step_k, 1, layout)
    at = k0 + along(warps_k, 0, layout) * step_k + step
    first = column * GROUP  # compared so that the compiler sees eight alike along k
    mine = (step >= first) & (step < first + GROUP)
    if not even:
        mine = mine & (at < k // _WIDTH * _WIDTH)
    pointers = row + 0 * column + at
    pointers = gl.max_contiguous(gl.multiple_of(pointers, [1, 16, 1]), [1, _WIDTH, 1])
    return gl.load(pointers, mask=mine, other=0.0)


@gluon.jit
def as_operand(x, warps_k: gl.constexpr):
    """What `fetch_row` read as a right operand."""
    sums: gl.constexpr = sums_layout(warps_k)
    return in_pairs(x, gl.DotOperandLayout(operand_index=1, parent=sums, k_width=2))


@gluon.jit
def fetch_scales(
    scales, stride, rows, row0, k, k0, warps_k: gl.constexpr, step_k: gl.constexpr,
):  # fmt: skip
    """Of the same steps, [warps_k, TILE, COLUMNS]; 0 beyond k."""
    layout: gl.constexpr = sums_layout(warps_k)
    row = gl.minimum(row0 + along(TILE, 1, layout), rows - 1).to(gl.int64)
    group = along(warps_k, 0, layout) * (step_k // GROUP) + along(COLUMNS, 2, layout)
    pointers = scales + row * stride + (k0 // GROUP + group)
    pointers = gl.max_contiguous(gl.multiple_of(pointers, [1, 1, 4]), [1, 1, 2])
    inside = (k0 + group // 4 * 4 * GROUP < k) & (row >= 0)
    return gl.load(pointers, mask=inside, other=0.0)


@gluon.jit
def store_sums(
    acc, out, bias, residual, row0, n, warps_k: gl.constexpr,
    activation: gl.constexpr, has_bias: gl.constexpr, has_residual: gl.constexpr,
):  # fmt: skip
    """The sums of acc [warps_k, TILE, COLUMNS], and what follows, to columns row0 .. of the result [n]."""
    sums: gl.constexpr = sums_layout(warps_k)
    total = gl.sum(gl.sum(acc, 2), 0)
    at = row0 + gl.arange(0, TILE, gl.SliceLayout(0, gl.SliceLayout(2, sums)))
    inside = at < n
    if has_bias:
        total += gl.load(bias + at, mask=inside, other=0.0).to(gl.float32)
    total = activate(total, activation)
    if has_residual:
        total += gl.load(residual + at, mask=inside, other=0.0).to(gl.float32)
    gl.store(out + at, total.to(out.dtype.element_ty), mask=inside)
