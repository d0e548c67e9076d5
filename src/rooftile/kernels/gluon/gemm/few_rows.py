"""A product of few rows (decoding): weights that are streamed once, at the speed of memory.

    sums[j, i] = sum over k of weight[j, k] x[i, k]          result[i, j] = activation(sums + bias) + ...

The weight is the left operand, so that its rows fill the matrix unit's 64 and the right operand has no
more columns than there are rows of activations. A CTA has one tile of the weight's rows and one part of
k. It keeps few registers and less than half of a multiprocessor's shared memory: so the CTAs of the
next launch start beside those of this one, and fill their rings with weights while this one waits for
its activations, adds its parts and ends (programmatic dependent launch). Memory is then never idle,
and little of a product is left to be read when its activations are there.

Parts of a tile are stored as float32; the CTA that comes last adds them, in the order of k whoever it
is. Nobody waits for anybody, so launches on any number of streams end.
"""
# mypy: disable-error-code="no-untyped-def"

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from rooftile.kernels.gluon.gemm import few_plan
from rooftile.kernels.gluon.gemm.epilogue import activate
from rooftile.kernels.gluon.tile.dependent import await_kernels_before, let_dependents_start
from rooftile.kernels.gluon.tile.divisor import Divisor
from rooftile.kernels.gluon.tile.maps import prefetch_maps
from rooftile.kernels.gluon.tile.mma import columns_of, multiply, rows_of, wait
from rooftile.kernels.triton_version import tma_load

BOX_K = gl.constexpr(few_plan.BOX_K)
_REGISTERS = 64  # of a thread, for parts that are on their way


@gluon.constexpr_function
def _sums_layout(rows, warps):
    """Of sums [tile, rows]: a warpgroup multiplies 64 of the tile at a time."""
    return gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[warps, 1], instr_shape=[16, rows, 16]
    )


@gluon.constexpr_function
def _result_layout(tile, warps):
    """Of sums [tile, rows] on their way out: eight in a row of the result a thread."""
    lanes = min(32, tile // 8)
    return gl.BlockedLayout([8, 1], [lanes, 32 // lanes], [1, warps], [0, 1])


@gluon.constexpr_function
def _together(tile, rows, warps):
    """Parts that are read at a time."""
    return max(_REGISTERS * 32 * warps // (tile * rows), 1)


@gluon.jit
def _part_addresses(part, tile: gl.constexpr, rows: gl.constexpr, layout: gl.constexpr):
    """Of a part [tile, rows], in eights of rows: each access of a warp covers 256 bytes in one piece."""
    j = gl.arange(0, tile, rows_of(layout))
    i = gl.arange(0, rows, columns_of(layout))
    of_j = (j // 8) * (8 * rows) + (j % 8) * 8
    of_i = (i // 8) * 64 + i % 8
    at = part + gl.expand_dims(of_j, 1) + gl.expand_dims(of_i, 0)
    return gl.max_contiguous(gl.multiple_of(at, [4, 8]), [1, 2]), gl.expand_dims(i, 0)


@gluon.jit
def _load_weight(
    desc, tiles, full, stage, row0, n, k0, pieces: gl.constexpr, gated: gl.constexpr, pred
):
    """With a gate, a tile's first half are rows of the gate and its second half those of the values."""
    half: gl.constexpr = desc.block_shape[0]
    for p in gl.static_range(pieces):
        box = tiles.index(stage * pieces + p)
        k = k0 + p * BOX_K
        if gated:
            tma_load(desc, (row0, k), full.index(stage), box.slice(0, half, 0), pred)
            tma_load(desc, (n + row0, k), full.index(stage), box.slice(half, half, 0), pred)
        else:
            tma_load(desc, (row0, k), full.index(stage), box, pred)


@gluon.jit
def _load_rows(desc, tiles, full, stage, k0, pieces: gl.constexpr, pred):
    for p in gl.static_range(pieces):
        tma_load(
            desc, (0, k0 + p * BOX_K), full.index(stage), tiles.index(stage * pieces + p), pred
        )


@gluon.jit
def _store_result(
    total, out, bias, residual, row0, m, n, out_stride, residual_stride, tile: gl.constexpr,
    rows: gl.constexpr, warps: gl.constexpr, activation: gl.constexpr, gated: gl.constexpr,
    has_bias: gl.constexpr, has_residual: gl.constexpr,
):  # fmt: skip
    """total [tile, rows], or of a gate and its values half each, as columns row0 .. of the result
    [m, n]; n and strides are multiples of 8."""
    columns: gl.constexpr = tile // 2 if gated else tile
    layout: gl.constexpr = _result_layout(columns, warps)
    j = gl.expand_dims(row0 + gl.arange(0, columns, rows_of(layout)), 1)
    i = gl.expand_dims(gl.arange(0, rows, columns_of(layout)), 0)
    if gated:
        total, value = total.reshape([2, columns, rows]).permute(1, 2, 0).split()
        value = gl.convert_layout(value, layout)
        if has_bias:
            value += gl.load(bias + n + j, mask=j < n, other=0.0).to(gl.float32)
    total = gl.convert_layout(total, layout)
    if has_bias:
        total += gl.load(bias + j, mask=j < n, other=0.0).to(gl.float32)
    total = activate(total, activation)
    if gated:
        total *= value
    inside = (i < m) & (j < n // 8 * 8)
    if has_residual:
        residual_at = residual + i.to(gl.int64) * residual_stride + j
        total += gl.load(residual_at, mask=inside, other=0.0).to(gl.float32)
    at = out + i.to(gl.int64) * out_stride + j
    size: gl.constexpr = 8 * out.dtype.element_ty.itemsize
    at = gl.max_contiguous(gl.multiple_of(at, [size, 1]), [8, 1])
    gl.store(at, total.to(out.dtype.element_ty), mask=inside)


@gluon.jit(
    do_not_specialize=[
        *("out", "bias", "residual", "parts", "arrivals", "m", "n", "out_stride"),
        *("residual_stride", "steps", "splits", "splits_factor", "splits_shift"),
    ]
)
def few_rows_kernel(
    weight_desc,  # boxes [tile, BOX_K] of [n, k]; with a gate [tile / 2, BOX_K] of [2 n, k]
    x_desc,  # boxes [rows, BOX_K] of [m, k]
    out,  # pointer, [m, n]
    bias,  # pointer, [n], or [2 n]
    residual,  # pointer, [m, n]
    parts,  # pointer to float32, [tiles, splits, tile, rows]
    arrivals,  # pointer to int32, [tiles]: 0 before and after
    m,
    n,
    out_stride,
    residual_stride,
    steps,  # of pieces BOX_K along k
    splits,  # parts of k; see Divisor
    splits_factor,
    splits_shift,
    tile: gl.constexpr,  # rows of the weight
    rows: gl.constexpr,  # a power of two from m on, at least 8
    pieces: gl.constexpr,  # boxes of a stage
    stages: gl.constexpr,
    warps: gl.constexpr,
    ahead: gl.constexpr,  # weights are at rest: kernels/weights_at_rest.py
    split: gl.constexpr,  # splits is more than 1
    activation: gl.constexpr,  # of the gate, if there is one
    gated: gl.constexpr,
    has_bias: gl.constexpr,
    has_residual: gl.constexpr,
):
    """A CTA: one part of k of one tile. Launched with `warps` warps, four or eight."""
    let_dependents_start()
    prefetch_maps("few_rows_kernel", (0, 5))
    sums: gl.constexpr = _sums_layout(rows, warps)
    dtype: gl.constexpr = weight_desc.dtype
    step_k: gl.constexpr = pieces * BOX_K
    cta = gl.program_id(0)
    which = cta
    first = 0 * cta
    last = steps
    if split:
        divisor = Divisor(splits, splits_factor, splits_shift)
        which = divisor.divide(cta)
        share = (cta - which * splits) * steps
        first = divisor.divide(share)
        last = divisor.divide(share + steps)
    row0 = which * (tile // 2 if gated else tile)
    count = last - first
    weights = gl.allocate_shared_memory(dtype, [stages * pieces, tile, BOX_K], weight_desc.layout)
    xs = gl.allocate_shared_memory(dtype, [stages * pieces, rows, BOX_K], x_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [stages, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(stages):
        mbarrier.init(full.index(s), count=1)
    fence_async_shared()
    boxes: gl.constexpr = 2 if gated else 1
    size: gl.constexpr = pieces * (boxes * weight_desc.block_type.nbytes + x_desc.block_type.nbytes)
    if not ahead:
        await_kernels_before()
    filled = gl.minimum(count, stages)
    for s in range(0, filled):
        mbarrier.expect(full.index(s), size)
        _load_weight(
            weight_desc, weights, full, s, row0, n, (first + s) * step_k, pieces, gated, True
        )
    if ahead:
        await_kernels_before()
    for s in range(0, filled):
        _load_rows(x_desc, xs, full, s, (first + s) * step_k, pieces, True)
    acc = gl.zeros([tile, rows], gl.float32, sums)
    stage = 0 * cta
    phase = 0 * cta
    for i in range(first, last):
        mbarrier.wait(full.index(stage), phase)
        for p in gl.static_range(pieces):
            at = stage * pieces + p
            acc = multiply(weights.index(at), xs.index(at).permute((1, 0)), acc)
        acc = wait(0, deps=[acc])
        gl.thread_barrier()
        following = i + stages
        more = following < last
        mbarrier.expect(full.index(stage), size, pred=more)
        k0 = following * step_k
        _load_weight(weight_desc, weights, full, stage, row0, n, k0, pieces, gated, more)
        _load_rows(x_desc, xs, full, stage, k0, pieces, more)
        turn = stage == stages - 1
        stage = gl.where(turn, 0, stage + 1)
        phase = gl.where(turn, phase ^ 1, phase)
    if split:
        part_size: gl.constexpr = tile * rows
        mine = parts + gl.cast(cta, gl.int64) * part_size
        at, i = _part_addresses(mine, tile, rows, sums)
        gl.store(at, acc, mask=i // 2 * 2 < m)
        gl.thread_barrier()
        before = gl.atomic_add(arrivals + which, 1, sem="acq_rel", scope="gpu")
        if before == splits - 1:
            gl.store(arrivals + which, 0)
            together: gl.constexpr = _together(tile, rows, warps)
            tile_parts = parts + gl.cast(which * splits, gl.int64) * part_size
            at, i = _part_addresses(tile_parts, tile, rows, sums)
            total = gl.zeros([tile, rows], gl.float32, sums)
            for first_part in range(0, splits, together):
                loaded = ()
                for j in gl.static_range(together):
                    there = (i // 2 * 2 < m) & (first_part + j < splits)
                    one = gl.load(at + (first_part + j) * part_size, mask=there, other=0.0)
                    loaded = loaded + (one,)  # type: ignore  # noqa: RUF005
                for j in gl.static_range(together):
                    total += loaded[j]
            _store_result(
                total, out, bias, residual, row0, m, n, out_stride, residual_stride, tile, rows,
                warps, activation, gated, has_bias, has_residual,
            )  # fmt: skip
    else:
        _store_result(
            acc, out, bias, residual, row0, m, n, out_stride, residual_stride, tile, rows, warps,
            activation, gated, has_bias, has_residual,
        )  # fmt: skip
