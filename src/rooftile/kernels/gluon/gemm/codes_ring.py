"""The product of one row of activations with an int4 weight, whose codes and scales the copy engine brings.

There are as many CTAs as multiprocessors and no more, so that every one has its share of the weight, a
CTA of the next kernel fits beside it, and launching takes little. As much of the share as the ring holds
is on its way before the activations are there; then the activations become an operand
(codes_digits.py), once for all tiles of the CTA.
"""
# mypy: disable-error-code="no-untyped-def"

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from rooftile.kernels.gluon.gemm.codes import WORDS, bits
from rooftile.kernels.gluon.gemm.codes_digits import (
    as_left,
    as_right,
    fetch_row,
    multiply,
    products_of_zero,
    scale_box,
    scales_of,
    totals_layout,
)
from rooftile.kernels.gluon.gemm.epilogue import activate
from rooftile.kernels.gluon.tile.dependent import await_kernels_before, let_dependents_start
from rooftile.kernels.triton_version import tma_load


@gluon.constexpr_function
def _boxes_layout(blocks, warps_k, tile):
    """Of words [blocks of all warps, tile, WORDS] on their way to a left operand."""
    return gl.DistributedLinearLayout(
        reg_bases=bits(3, 4, 2) + bits(3, tile, 1, 8) + bits(3, blocks, 0),
        lane_bases=bits(3, 16, 2, 4) + bits(3, 8, 1),
        warp_bases=bits(3, blocks * warps_k, 0, blocks),
        block_bases=[],
        shape=[blocks * warps_k, tile, 16],
    )


@gluon.jit
def _fetch(
    words_desc, scales_desc, words, scales, full, slot, step, steps, tiles: gl.constexpr,
    warps_k: gl.constexpr, blocks: gl.constexpr, tile: gl.constexpr,
):  # fmt: skip
    """Asks for a step's words and scales, if there is such a step: part step // tiles of k, where the
    CTA goes through k once; else all of k."""
    part = step // tiles if tiles else 0
    number = step % tiles if tiles else step
    boxes: gl.constexpr = scale_box(warps_k, blocks)[1]
    width: gl.constexpr = scale_box(warps_k, blocks)[0]
    size: gl.constexpr = words_desc.block_type.nbytes + boxes * scales_desc.block_type.nbytes
    inside = step < steps
    row0 = (gl.program_id(0) + number * gl.num_programs(0)) * tile
    mbarrier.expect(full.index(slot), size, pred=inside)
    at = (part * (warps_k * blocks), row0, 0)
    tma_load(words_desc, at, full.index(slot), words.index(slot), inside)
    for box in gl.static_range(boxes):
        scales_at = (row0, part * (2 * warps_k * blocks) + box * width)
        tma_load(scales_desc, scales_at, full.index(slot), scales.index(slot * boxes + box), inside)


@gluon.jit
def _operands(words, scales, slot, warps_k: gl.constexpr, blocks: gl.constexpr, tile: gl.constexpr):
    """A step's codes as a left operand, and its scales."""
    word = words.index(slot).load(_boxes_layout(blocks, warps_k, tile))
    left = as_left(word.reshape([warps_k, blocks, tile, 4, 4]), warps_k, blocks, tile)
    boxes: gl.constexpr = scale_box(warps_k, blocks)[1]
    shape: gl.constexpr = [words.shape[0], boxes * tile, scales.shape[2]]
    of_slot = scales._reinterpret(gl.int32, shape, scales.layout).index(slot)
    return left, scales_of(of_slot, warps_k, blocks, tile)


@gluon.jit
def _step(
    words_desc, scales_desc, words, scales, full, slot, phase, step, steps, right, zero, unit,
    tiles: gl.constexpr, whole: gl.constexpr, warps_k: gl.constexpr, blocks: gl.constexpr,
    tile: gl.constexpr,
):  # fmt: skip
    """Its part of the result: `multiply`; and slot and phase of the next one."""
    stages: gl.constexpr = words.shape[0]
    mbarrier.wait(full.index(slot), phase)
    left, scale = _operands(words, scales, slot, warps_k, blocks, tile)
    if not whole:
        gl.thread_barrier()
        _fetch(
            words_desc, scales_desc, words, scales, full, slot, step + stages, steps, tiles,
            warps_k, blocks, tile,
        )  # fmt: skip
    x = multiply(left, scale, right, zero, unit, warps_k, blocks, tile)
    if whole:
        slot += 1
    else:
        turn = slot == stages - 1
        slot = gl.where(turn, 0, slot + 1)
        phase = gl.where(turn, phase ^ 1, phase)
    return x, slot, phase


@gluon.jit
def _no_sums(tiles: gl.constexpr, warps_k: gl.constexpr, tile: gl.constexpr):
    layout: gl.constexpr = totals_layout(warps_k, tile)
    sums = ()
    for _ in gl.static_range(tiles):
        sums += (gl.zeros([warps_k, tile, 2, 2], gl.float32, layout),)  # type: ignore[assignment]
    return sums


@gluon.jit(
    do_not_specialize=[
        *("row", "out", "bias", "residual", "n", "k", "all_tiles", "parts"),
    ]
)
def codes_ring_kernel(
    words_desc,  # boxes [blocks warps_k, tile, WORDS] of [blocks, n, WORDS]: see codes.py
    scales_desc,  # boxes [tile, words] of [n, words] int32, each of two scales
    row,  # pointer, activations [k], on a multiple of 16 bytes
    out,  # pointer, [n]
    bias,  # pointer, [n]
    residual,  # pointer, [n]
    n,
    k,  # a multiple of 8
    all_tiles,
    parts,  # of k
    warps_k: gl.constexpr,
    blocks: gl.constexpr,  # of a warp at a time
    stages: gl.constexpr,
    tile: gl.constexpr,  # rows of the weight, 8 or 16
    tiles: gl.constexpr,  # of a CTA at most, where k has parts or codes are made operands early; else 0
    once: gl.constexpr,  # parts of k, if all codes are made operands before the activations are there; else 0
    room: gl.constexpr,  # for the sums of so many tiles
    whole: gl.constexpr,  # all steps are in the ring at one time
    ahead: gl.constexpr,  # weights are at rest: kernels/weights_at_rest.py
    activation: gl.constexpr,
    has_bias: gl.constexpr,
    has_residual: gl.constexpr,
):
    """A CTA: every so many-th tile. Launched with warps_k warps, which share k."""
    boxes: gl.constexpr = scale_box(warps_k, blocks)[1]
    width: gl.constexpr = scale_box(warps_k, blocks)[0]
    me = gl.program_id(0)
    let_dependents_start()
    words = gl.allocate_shared_memory(
        gl.int32, [stages, blocks * warps_k, tile, WORDS], words_desc.layout
    )
    scales = gl.allocate_shared_memory(gl.int32, [stages * boxes, tile, width], scales_desc.layout)
    sums = gl.allocate_shared_memory(
        gl.float32, [room, warps_k, tile], gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    )
    full = gl.allocate_shared_memory(gl.int64, [stages, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(stages):
        mbarrier.init(full.index(s), count=1)
    fence_async_shared()
    if not ahead:
        await_kernels_before()
    mine = (all_tiles - me + gl.num_programs(0) - 1) // gl.num_programs(0)
    steps = parts * tiles if tiles else mine
    for s in gl.static_range(stages):
        _fetch(
            words_desc, scales_desc, words, scales, full, s, s, steps, tiles, warps_k, blocks, tile
        )
    if once:
        lefts = ()
        all_scales = ()
        for t in gl.static_range(stages):
            mbarrier.wait(full.index(t), 0)
        for t in gl.static_range(stages):
            left, scale = _operands(words, scales, t, warps_k, blocks, tile)
            lefts += (left,)  # type: ignore[assignment]
            all_scales += (scale,)  # type: ignore[assignment]
    if ahead:
        await_kernels_before()
    slot = 0 * me
    phase = 0 * me
    x = fetch_row(row, k, 0, warps_k, blocks)
    if once:
        y = _no_sums(tiles, warps_k, tile)
        for part in gl.static_range(once):
            if part + 1 < once:
                following = fetch_row(row, k, (part + 1) * (blocks * warps_k), warps_k, blocks)
            right, unit = as_right(x, warps_k, blocks)
            zero = products_of_zero(right, warps_k, blocks)
            added = ()
            for t in gl.static_range(tiles):
                added += (
                    y[t]
                    + multiply(
                        lefts[part * tiles + t],
                        all_scales[part * tiles + t],
                        right,
                        zero,
                        unit,
                        warps_k,
                        blocks,
                        tile,
                    ),
                )  # type: ignore[assignment]
            y = added
            if part + 1 < once:
                x = following
        for t in gl.static_range(tiles):
            sums.index(t).store(gl.sum(gl.sum(y[t], 3), 2))
    elif tiles:
        acc = _no_sums(tiles, warps_k, tile)
        step = 0 * me
        for part in range(0, parts):
            right, unit = as_right(x, warps_k, blocks)
            zero = products_of_zero(right, warps_k, blocks)
            x = fetch_row(row, k, (part + 1) * (blocks * warps_k), warps_k, blocks)
            added = ()
            for t in gl.static_range(tiles):
                y, slot, phase = _step(
                    words_desc, scales_desc, words, scales, full, slot, phase, step, steps, right,
                    zero, unit, tiles, whole, warps_k, blocks, tile,
                )  # fmt: skip
                added += (acc[t] + y,)  # type: ignore[assignment]
                step += 1
            acc = added
        for t in gl.static_range(tiles):
            sums.index(t).store(gl.sum(gl.sum(acc[t], 3), 2))
    else:
        right, unit = as_right(x, warps_k, blocks)
        zero = products_of_zero(right, warps_k, blocks)
        for t in range(0, mine):
            y, slot, phase = _step(
                words_desc, scales_desc, words, scales, full, slot, phase, t, steps, right,
                zero, unit, tiles, whole, warps_k, blocks, tile,
            )  # fmt: skip
            sums.index(t).store(gl.sum(gl.sum(y, 3), 2))
    gl.thread_barrier()
    _finish(sums, out, bias, residual, n, activation, has_bias, has_residual)


@gluon.jit
def _finish(
    sums, out, bias, residual, n, activation: gl.constexpr, has_bias: gl.constexpr,
    has_residual: gl.constexpr,
):  # fmt: skip
    """The sums of all warps, and what follows, to the result [n]."""
    room: gl.constexpr = sums.shape[0]
    warps_k: gl.constexpr = sums.shape[1]
    tile: gl.constexpr = sums.shape[2]
    L: gl.constexpr = gl.BlockedLayout(
        [1, warps_k, 1], [32 // tile, 1, tile], [warps_k, 1, 1], [2, 1, 0]
    )
    of: gl.constexpr = gl.SliceLayout(1, L)
    sums = sums._reinterpret(
        gl.float32, [room, warps_k, tile], gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    )
    total = gl.sum(sums.load(L), 1)
    number = gl.expand_dims(gl.arange(0, room, gl.SliceLayout(1, of)), 1)
    within = gl.expand_dims(gl.arange(0, tile, gl.SliceLayout(0, of)), 0)
    at = (gl.program_id(0) + number * gl.num_programs(0)) * tile + within
    inside = at < n
    if has_bias:
        total += gl.load(bias + at, mask=inside, other=0.0).to(gl.float32)
    total = activate(total, activation)
    if has_residual:
        total += gl.load(residual + at, mask=inside, other=0.0).to(gl.float32)
    gl.store(out + at, total.to(out.dtype.element_ty), mask=inside)
