"""A product of a handful of rows whose k no two CTAs share: weights by the copy engine, sums by warps.

    sums[j, i] = sum over k of weight[j, k] x[i, k]          result[i, j] = activation(sums + bias) + ...

A CTA has a few rows of the weight and all of k; its warps share both and add their sums in shared
memory at the end. The weight, dense or int4 codes with their scales (codes.py), comes through a ring
that is filled before the kernels ahead have ended, so that often all of it lies there when the
activations do; these are read straight into registers. Nothing of a product passes through memory but
its operands and its result: a launch ends as soon as it can, which is what decoding waits for.
"""
# mypy: disable-error-code="no-untyped-def"

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from rooftile.kernels.gluon.gemm.codes import BLOCK, WORDS, dequantised, words_layout
from rooftile.kernels.gluon.gemm.direct import WIDTH, product_layout
from rooftile.kernels.gluon.gemm.epilogue import activate
from rooftile.kernels.gluon.tile.dependent import await_kernels_before, let_dependents_start
from rooftile.kernels.gluon.tile.maps import prefetch_maps
from rooftile.kernels.triton_version import tma_load

GROUPS = gl.constexpr(4)  # of a block of codes: scales
LINE_PAIRS = gl.constexpr(32)  # of a line of the caches


@gluon.constexpr_function
def _bits(begin, end, axis):
    """Bases begin, 2 begin, .. below end, along an axis of two."""
    found = []
    while begin < end:
        found.append([begin, 0] if axis == 0 else [0, begin])
        begin *= 2
    return found


@gluon.constexpr_function
def _shared_layout(tile, columns, unit, lanes, warps_x, warps_k):
    """Of [tile, columns] as it is read from shared memory: a thread's `unit` elements in a row, those of
    `lanes` threads after each other, as left operands of the tensor core lie; warps_k warps share the
    columns, warps_x the rows. lanes 1: all four threads of a row read the same."""
    share = columns // warps_k
    apart = [[0, 0], [0, 0]] if lanes == 1 else _bits(unit, unit * lanes, 1)
    return gl.DistributedLinearLayout(
        reg_bases=_bits(1, unit, 1)
        + _bits(unit * lanes, share, 1)
        + _bits(8, 16, 0)
        + _bits(16 * warps_x, tile, 0),
        lane_bases=apart + _bits(1, 8, 0),
        warp_bases=_bits(16, 16 * warps_x, 0) + _bits(share, columns, 1),
        block_bases=[],
        shape=[tile, columns],
    )


@gluon.jit
def _by_warps(x, warps_k: gl.constexpr):
    """x [tile, columns] as [warps_k, tile, columns / warps_k]."""
    tile: gl.constexpr = x.shape[0]
    columns: gl.constexpr = x.shape[1]
    return x.reshape([tile, warps_k, columns // warps_k]).permute(1, 0, 2)


@gluon.jit
def _values(
    weights, scales, stage, tile: gl.constexpr, step_k: gl.constexpr, warps_x: gl.constexpr,
    warps_k: gl.constexpr, codes: gl.constexpr, left: gl.constexpr,
):  # fmt: skip
    """The weight's values of a stage, [warps_k, tile, step_k / warps_k]."""
    if codes:
        blocks: gl.constexpr = step_k // warps_k // BLOCK
        all_blocks: gl.constexpr = step_k // BLOCK
        flat: gl.constexpr = _shared_layout(tile, all_blocks * WORDS, 4, 4, warps_x, warps_k)
        few: gl.constexpr = _shared_layout(tile, all_blocks * GROUPS, 4, 1, warps_x, warps_k)
        layout: gl.constexpr = words_layout(tile, blocks, warps_k, warps_x)
        word = _by_warps(weights.index(stage).load(flat), warps_k)
        word = word.reshape([warps_k, tile, blocks, 4, 4])
        word = gl.convert_layout(word, layout, assert_trivial=True)
        scale = _by_warps(scales.index(stage).load(few), warps_k)
        scale = scale.reshape([warps_k, tile, blocks, GROUPS])
        scale = gl.convert_layout(scale, gl.SliceLayout(3, layout), assert_trivial=True)
        return dequantised(word, gl.expand_dims(scale, 3), left)
    else:
        dense: gl.constexpr = _shared_layout(tile, step_k, WIDTH, 4, warps_x, warps_k)
        x = _by_warps(weights.index(stage).load(dense), warps_k)
        return gl.convert_layout(x, left, assert_trivial=True)


@gluon.constexpr_function
def _pairs_layout(rows, tile_k, warps_x, warps_k):
    """Of pairs along k [warps_k, tile_k / 2, rows]: as right operands of the tensor core lie."""

    def bits(begin, end, axis):
        found = []
        while begin < end:
            basis = [0, 0, 0]
            basis[axis] = begin
            found.append(basis)
            begin *= 2
        return found

    return gl.DistributedLinearLayout(
        reg_bases=bits(1, 4, 1) + bits(16, tile_k // 2, 1) + bits(8, rows, 2),
        lane_bases=bits(4, 16, 1) + bits(1, 8, 2),
        warp_bases=[[0, 0, 0] for _ in bits(1, warps_x, 0)] + bits(1, warps_k, 0),
        block_bases=[],
        shape=[warps_k, tile_k // 2, rows],
    )


@gluon.jit
def _fetch(
    x, x_stride, m, x0, k, k0, rows: gl.constexpr, tile_k: gl.constexpr, warps_x: gl.constexpr,
    warps_k: gl.constexpr, even: gl.constexpr,
):  # fmt: skip
    """Pairs of x from k0 on. Carried around a loop, single elements would be taken apart.

    Rows beyond the matrix repeat its last one; what becomes of them is not stored.
    """
    layout: gl.constexpr = _pairs_layout(rows, tile_k, warps_x, warps_k)
    warp = gl.arange(0, warps_k, gl.SliceLayout(1, gl.SliceLayout(2, layout)))
    pair = gl.arange(0, tile_k // 2, gl.SliceLayout(0, gl.SliceLayout(2, layout)))
    row = gl.arange(0, rows, gl.SliceLayout(0, gl.SliceLayout(1, layout)))
    warp = gl.expand_dims(gl.expand_dims(warp, 1), 2)
    pair = gl.expand_dims(gl.expand_dims(pair, 0), 2)
    row = gl.expand_dims(gl.expand_dims(row, 0), 1)
    wide_row = gl.minimum(x0 + row, m - 1).to(gl.int64)
    at = k0 // 2 + warp * (tile_k // 2) + pair
    pointers = x + wide_row * (x_stride // 2) + at
    pointers = gl.max_contiguous(gl.multiple_of(pointers, [1, 16, 1]), [1, 4, 1])
    if even:
        return gl.load(pointers)
    else:
        end = k // 8 * 4  # k, which is a multiple of 8: so that the compiler knows
        return gl.load(pointers, mask=(at < end) & (wide_row >= 0), other=0)


@gluon.jit
def _fetch_lines(x, x_stride, m, x0, k, rows: gl.constexpr, warps: gl.constexpr):
    """Starts bringing the rows of x from x0 on to the first cache, so that no step waits for the second."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [warps], [0])
    for row in range(x0, gl.minimum(x0 + rows, m)):
        base = x + gl.cast(row, gl.int64) * (x_stride // 2)
        for first in range(0, k // 2, LINE_PAIRS * 32 * warps):
            pair = first + gl.arange(0, 32 * warps, layout) * LINE_PAIRS
            gl.inline_asm_elementwise(
                "prefetch.global.L1 [$1]; mov.b32 $0, 0;",
                "=r,l",
                [base + gl.minimum(pair, k // 2 - 1)],
                dtype=gl.int32,
                is_pure=False,
                pack=1,
            )


@gluon.jit
def _elements(pairs, dtype: gl.constexpr, right: gl.constexpr):
    """Pairs [warps_k, tile_k / 2, rows] as [warps_k, tile_k, rows]."""
    low, high = gl.inline_asm_elementwise(
        "mov.b32 {$0, $1}, $2;",
        "=h,=h,r",
        [pairs],
        dtype=(gl.int16, gl.int16),
        is_pure=True,
        pack=1,
    )
    x = gl.join(low, high).to(dtype, bitcast=True).permute(0, 1, 3, 2)
    x = x.reshape([pairs.shape[0], pairs.shape[1] * 2, pairs.shape[2]])
    return gl.convert_layout(x, right, assert_trivial=True)


@gluon.jit
def _fill(
    weight_desc, scale_desc, weights, scales, full, stage, row0, step, step_k: gl.constexpr,
    codes: gl.constexpr, pred,
):  # fmt: skip
    barrier = full.index(stage)
    if codes:
        size: gl.constexpr = weight_desc.block_type.nbytes + scale_desc.block_type.nbytes
        mbarrier.expect(barrier, size, pred=pred)
        at = (row0, step * (step_k // BLOCK * WORDS))
        tma_load(weight_desc, at, barrier, weights.index(stage), pred)
        at = (row0, step * (step_k // BLOCK * GROUPS))
        tma_load(scale_desc, at, barrier, scales.index(stage), pred)
    else:
        mbarrier.expect(barrier, weight_desc.block_type.nbytes, pred=pred)
        tma_load(weight_desc, (row0, step * step_k), barrier, weights.index(stage), pred)


@gluon.jit(
    do_not_specialize=[
        *("x", "out", "bias", "residual", "x_stride", "m", "n", "k", "tiles"),
        *("out_stride", "residual_stride"),
    ]
)
def row_ring_kernel(
    weight_desc,  # boxes [tile, step_k] of [n, k]; of codes [tile, step_k / 8] of [n, k / 8] words
    scale_desc,  # of codes: boxes [tile, step_k / 32] of [n, k / 32]; else None
    x,  # pointer to int32, [m, k / 2] pairs
    out,  # pointer, [m, n]
    bias,  # pointer, [n]
    residual,  # pointer, [m, n]
    x_stride,
    m,
    n,
    k,
    tiles,  # of the weight's rows
    out_stride,
    residual_stride,
    tile: gl.constexpr,  # rows of the weight
    rows: gl.constexpr,  # of x, 8 or 16
    step_k: gl.constexpr,  # of a stage
    warps_x: gl.constexpr,  # that share the tile's rows
    warps_k: gl.constexpr,  # that share a stage's k
    stages: gl.constexpr,
    even: gl.constexpr,  # k is a multiple of step_k
    whole: gl.constexpr,  # all of k is in the ring at a time
    codes: gl.constexpr,
    ahead: gl.constexpr,  # weights are at rest: kernels/weights_at_rest.py
    activation: gl.constexpr,
    has_bias: gl.constexpr,
    has_residual: gl.constexpr,
):
    """A CTA: one tile. Launched with warps_x warps_k warps."""
    let_dependents_start()
    if codes:
        prefetch_maps("row_ring_kernel", (0, 5))
    else:
        prefetch_maps("row_ring_kernel", (0,))
    sums: gl.constexpr = product_layout(warps_k, warps_x, 1)
    left: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=sums, k_width=WIDTH)
    right: gl.constexpr = gl.DotOperandLayout(operand_index=1, parent=sums, k_width=WIDTH)
    tile_k: gl.constexpr = step_k // warps_k
    dtype: gl.constexpr = gl.bfloat16 if codes else weight_desc.dtype
    cta = gl.program_id(0)
    tile_of_x = cta // tiles
    row0 = (cta - tile_of_x * tiles) * tile
    x0 = tile_of_x * rows
    steps = (k + step_k - 1) // step_k
    weights = gl.allocate_shared_memory(
        weight_desc.dtype,
        [stages] + weight_desc.block_shape,  # noqa: RUF005
        weight_desc.layout,
    )
    scales = weights
    if codes:
        scales = gl.allocate_shared_memory(
            scale_desc.dtype,
            [stages] + scale_desc.block_shape,  # noqa: RUF005
            scale_desc.layout,
        )
    full = gl.allocate_shared_memory(gl.int64, [stages, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(stages):
        mbarrier.init(full.index(s), count=1)
    fence_async_shared()
    if not ahead:
        await_kernels_before()
    for s in range(0, gl.minimum(steps, stages)):
        _fill(weight_desc, scale_desc, weights, scales, full, s, row0, s, step_k, codes, True)
    if ahead:
        await_kernels_before()
    _fetch_lines(x, x_stride, m, x0, k, rows, warps_x * warps_k)
    acc = gl.zeros([warps_k, tile, rows], gl.float32, sums)
    pairs = _fetch(x, x_stride, m, x0, k, 0, rows, tile_k, warps_x, warps_k, even)
    stage = 0 * cta
    phase = 0 * cta
    for i in range(0, steps):
        # Beyond the last step the first one is read again, and not used.
        k0 = gl.where(i + 1 < steps, (i + 1) * step_k, 0)
        following = _fetch(x, x_stride, m, x0, k, k0, rows, tile_k, warps_x, warps_k, even)
        mbarrier.wait(full.index(stage), phase)
        a = _values(weights, scales, stage, tile, step_k, warps_x, warps_k, codes, left)
        acc = mma_v2(a, _elements(pairs, dtype, right), acc)
        pairs = following
        if not whole:
            gl.thread_barrier()
            step = i + stages
            _fill(
                weight_desc, scale_desc, weights, scales, full, stage, row0, step, step_k, codes,
                step < steps,
            )  # fmt: skip
        turn = stage == stages - 1
        stage = gl.where(turn, 0, stage + 1)
        phase = gl.where(turn, phase ^ 1, phase)
    total = gl.sum(acc, 0)
    of: gl.constexpr = gl.SliceLayout(0, sums)
    j = gl.expand_dims(row0 + gl.arange(0, tile, gl.SliceLayout(1, of)), 1)
    i = gl.expand_dims(x0 + gl.arange(0, rows, gl.SliceLayout(0, of)), 0)
    if has_bias:
        total += gl.load(bias + j, mask=j < n, other=0.0).to(gl.float32)
    total = activate(total, activation)
    inside = (j < n) & (i < m)
    wide = i.to(gl.int64)
    if has_residual:
        residual_at = residual + wide * residual_stride + j
        total += gl.load(residual_at, mask=inside, other=0.0).to(gl.float32)
    gl.store(out + wide * out_stride + j, total.to(out.dtype.element_ty), mask=inside)
