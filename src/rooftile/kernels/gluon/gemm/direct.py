"""A product of int4 weights whose operands go from memory to registers: no copy engine, no barriers.

    acc[j, i] = sum over k of weight[j, k] x[i, k]

The weight is the left operand, so that its rows fill the tensor core's sixteen and the right operand's
eight columns are enough for one row of activations. The warps of a CTA share k: every warp multiplies
the whole tile over slices of its own, and the sums are added at the end, so no other CTA takes part.

CTAs take tiles in turn and fetch their next codes, be they of the next tile, before they multiply those
that they have. Where weights are at rest the first are fetched before the kernels ahead have ended.

A thread reads eight elements along k at a time: the tensor core may take k in any order as long as both
operands do the same. Rows of activations that begin on no multiple of 16 bytes are read in smaller
units, a warp along a row, and turned around in shared memory.
"""
# mypy: disable-error-code="no-untyped-def"

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from rooftile.kernels.gluon.gemm.codes import code_rows, dequantised, fetch_codes
from rooftile.kernels.gluon.gemm.epilogue import activate
from rooftile.kernels.gluon.tile.dependent import await_kernels_before, let_dependents_start

WIDTH = gl.constexpr(8)  # elements along k that a thread reads at a time


@gluon.constexpr_function
def _product_layout(warps_k):
    """Of sums [warps along k, rows of the weight, rows of x]."""
    return gl.NVMMADistributedLayout(
        version=[2, 0], warps_per_cta=[warps_k, 1, 1], instr_shape=[1, 16, 8]
    )


@gluon.constexpr_function
def _load_layout(warps_k, unit, tile_k):
    """Of x where 16 bytes cannot be read at a time: a warp reads along rows."""
    lanes = min(32, tile_k // unit)
    return gl.BlockedLayout([1, unit, 1], [1, lanes, 32 // lanes], [warps_k, 1, 1], [1, 2, 0])


@gluon.jit
def _activations(
    x, stride, rows, row0, k, k0, tile: gl.constexpr, tile_k: gl.constexpr, warps_k: gl.constexpr,
    unit: gl.constexpr, even: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """Steps k0 .. along k of all warps: [warps_k, tile_k, tile].

    Rows beyond the matrix repeat its last one; what becomes of them is not stored.
    """
    warp = gl.arange(0, warps_k, gl.SliceLayout(1, gl.SliceLayout(2, layout)))
    step = gl.arange(0, tile_k, gl.SliceLayout(0, gl.SliceLayout(2, layout)))
    row = gl.arange(0, tile, gl.SliceLayout(0, gl.SliceLayout(1, layout)))
    warp = gl.expand_dims(gl.expand_dims(warp, 1), 2)
    step = gl.expand_dims(gl.expand_dims(step, 0), 2)
    row = gl.expand_dims(gl.expand_dims(row, 0), 1)
    wide_row = gl.minimum(row0 + row, rows - 1).to(gl.int64)
    at = k0 + warp * tile_k + step
    bytes: gl.constexpr = unit * x.dtype.element_ty.itemsize
    pointers = x + wide_row * stride + at
    pointers = gl.max_contiguous(gl.multiple_of(pointers, [1, bytes, 1]), [1, unit, 1])
    if even:
        return gl.load(pointers)
    else:
        end = k // unit * unit  # k, which is a multiple: so that the compiler knows
        return gl.load(pointers, mask=(at < end) & (wide_row >= 0), other=0.0)


@gluon.jit(
    do_not_specialize=[
        *("words", "x", "out", "bias", "residual", "scales", "stride", "x_stride", "n", "m", "k"),
        *("tiles", "all_tiles", "out_stride", "residual_stride"),
    ]
)
def direct_kernel(
    words,  # pointer to int32, [n, stride]: see codes.py
    x,  # pointer to bfloat16, [m, k]
    out,  # pointer, [m, n]
    bias,  # pointer, [n]
    residual,  # pointer, [m, n]
    scales,  # pointer to bfloat16, [n, stride / 4]
    stride,
    x_stride,
    n,
    m,
    k,
    tiles,  # of the weight's rows
    all_tiles,  # of the result
    out_stride,
    residual_stride,
    tile: gl.constexpr,  # rows of the weight
    rows: gl.constexpr,  # of x
    tile_k: gl.constexpr,  # of a warp at a time
    warps_k: gl.constexpr,
    unit: gl.constexpr,  # elements of a row of x that can be read at a time
    even: gl.constexpr,  # k is a multiple of warps_k tile_k
    activation: gl.constexpr,
    has_bias: gl.constexpr,
    has_residual: gl.constexpr,
    in_turn: gl.constexpr,  # there are more tiles than CTAs
    ahead: gl.constexpr,  # weights are at rest: kernels/weights_at_rest.py
):
    """Launched with warps_k warps."""
    sums: gl.constexpr = _product_layout(warps_k)
    left: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=sums, k_width=WIDTH)
    right: gl.constexpr = gl.DotOperandLayout(operand_index=1, parent=sums, k_width=WIDTH)
    layout: gl.constexpr = right if unit == WIDTH else _load_layout(warps_k, unit, tile_k)
    of: gl.constexpr = gl.SliceLayout(0, sums)
    step: gl.constexpr = warps_k * tile_k
    this = gl.program_id(0)
    let_dependents_start()
    if not ahead:
        await_kernels_before()
    row0 = (this - this // tiles * tiles) * tile
    word_row, scale_row = code_rows(stride, n, row0, tile, tile_k, warps_k)
    word, scale = fetch_codes(words, scales, word_row, scale_row, k, 0, tile, tile_k, warps_k)
    if ahead:
        await_kernels_before()
    while this < all_tiles:
        x0 = this // tiles * rows
        following = this + gl.num_programs(0)
        # Beyond the last tile come the weight's last rows, for nobody.
        row_after = (following - following // tiles * tiles) * tile
        if in_turn:
            word_after, scale_after = code_rows(stride, n, row_after, tile, tile_k, warps_k)
        acc = gl.zeros([warps_k, tile, rows], gl.float32, sums)
        for k0 in range(0, k, step):
            b = _activations(x, x_stride, m, x0, k, k0, rows, tile_k, warps_k, unit, even, layout)
            k_after = k0 + step
            word_from = word_row
            scale_from = scale_row
            if in_turn:
                ends = k_after >= k
                k_after = gl.where(ends, 0, k_after)
                word_from = gl.where(ends, word_after, word_row)
                scale_from = gl.where(ends, scale_after, scale_row)
            next_word, next_scale = fetch_codes(
                words, scales, word_from, scale_from, k, k_after, tile, tile_k, warps_k
            )
            acc = mma_v2(dequantised(word, scale, left), gl.convert_layout(b, right), acc)
            word = next_word
            scale = next_scale
        total = gl.sum(acc, 0)
        j = gl.expand_dims(row0 + gl.arange(0, tile, gl.SliceLayout(1, of)), 1)
        i = gl.expand_dims(x0 + gl.arange(0, rows, gl.SliceLayout(0, of)), 0)
        if has_bias:
            total += gl.load(bias + j, mask=j < n, other=0.0).to(gl.float32)
        total = activate(total, activation)
        inside = (j < n) & (i < m)
        wide = i.to(gl.int64)
        if has_residual:
            at = residual + wide * residual_stride + j
            total += gl.load(at, mask=inside, other=0.0).to(gl.float32)
        gl.store(out + wide * out_stride + j, total.to(out.dtype.element_ty), mask=inside)
        this = following
        row0 = row_after
        if in_turn:
            word_row = word_after
            scale_row = scale_after
