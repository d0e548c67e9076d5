"""The product of one row of activations with an int4 weight, whose codes the copy engine brings.

All of a small weight is on its way before the activations are there, whatever the registers hold.
"""
# mypy: disable-error-code="no-untyped-def"

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from rooftile.kernels.gluon.gemm.codes import BLOCK, WORDS, bits, codes_in_pairs, sums_layout
from rooftile.kernels.gluon.gemm.codes_row import (
    COLUMNS,
    TILE,
    as_operand,
    fetch_row,
    fetch_scales,
    store_sums,
)
from rooftile.kernels.gluon.tile.dependent import await_kernels_before, let_dependents_start
from rooftile.kernels.triton_version import tma_load


@gluon.constexpr_function
def _boxes_layout(blocks, warps_k):
    """Of words [blocks, rows, WORDS] on their way to a left operand: see codes.py's layout of words."""
    return gl.DistributedLinearLayout(
        reg_bases=bits(3, 4, 2) + bits(3, 16, 1, 8) + bits(3, blocks, 0),
        lane_bases=bits(3, 16, 2, 4) + bits(3, 8, 1),
        warp_bases=bits(3, blocks * warps_k, 0, blocks),
        block_bases=[],
        shape=[blocks * warps_k, 16, 16],
    )


@gluon.jit(
    do_not_specialize=[
        *("row", "out", "bias", "residual", "scales", "stride", "n", "k", "steps"),
    ]
)
def codes_ring_kernel(
    words_desc,  # boxes [blocks warps_k, TILE, WORDS] of [blocks, n, WORDS]: see codes.py
    row,  # pointer, activations [k], on a multiple of 16 bytes
    out,  # pointer, [n]
    bias,  # pointer, [n]
    residual,  # pointer, [n]
    scales,  # pointer, of codes
    stride,  # of scales
    n,
    k,  # a multiple of 8
    steps,  # of all warps
    warps_k: gl.constexpr,
    blocks: gl.constexpr,  # of a warp at a time
    stages: gl.constexpr,
    even: gl.constexpr,  # k is a multiple of all warps' steps
    whole: gl.constexpr,  # all steps are in the ring at one time
    ahead: gl.constexpr,  # weights are at rest: kernels/weights_at_rest.py
    activation: gl.constexpr,
    has_bias: gl.constexpr,
    has_residual: gl.constexpr,
):
    """A CTA: TILE rows of the weight. Launched with warps_k warps, which share k."""
    step_k: gl.constexpr = blocks * BLOCK
    step_blocks: gl.constexpr = blocks * warps_k
    sums: gl.constexpr = sums_layout(warps_k)
    left: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=sums, k_width=2)
    boxes: gl.constexpr = _boxes_layout(blocks, warps_k)
    row0 = gl.program_id(0) * TILE
    let_dependents_start()
    ring = gl.allocate_shared_memory(
        gl.int32, [stages, step_blocks, TILE, WORDS], words_desc.layout
    )
    full = gl.allocate_shared_memory(gl.int64, [stages, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(stages):
        mbarrier.init(full.index(s), count=1)
    fence_async_shared()
    if not ahead:
        await_kernels_before()
    size: gl.constexpr = words_desc.block_type.nbytes
    for s in range(0, gl.minimum(stages, steps)):
        mbarrier.expect(full.index(s), size)
        tma_load(words_desc, (s * step_blocks, row0, 0), full.index(s), ring.index(s))
    scale = fetch_scales(scales, stride, n, row0, k, 0, warps_k, step_k)
    if ahead:
        await_kernels_before()
    acc = gl.zeros([warps_k, TILE, COLUMNS], gl.float32, sums)
    zeros = gl.zeros([warps_k, TILE, COLUMNS], gl.float32, sums)
    stage = 0 * row0
    phase = 0 * row0
    for i in range(0, steps):
        k0 = i * (warps_k * step_k)
        following = k0 + warps_k * step_k
        x = fetch_row(row, k, k0, warps_k, step_k, even)
        next_scale = fetch_scales(scales, stride, n, row0, k, following, warps_k, step_k)
        mbarrier.wait(full.index(stage), phase)
        word = ring.index(stage).load(boxes)
        word = word.reshape([warps_k, blocks, TILE, 4, 4]).permute(0, 2, 1, 3, 4)
        codes = codes_in_pairs(word, left)
        acc += mma_v2(codes, as_operand(x, warps_k), zeros) * scale.to(gl.float32)
        scale = next_scale
        if whole:
            stage += 1
        else:
            gl.thread_barrier()
            more = i + stages < steps
            mbarrier.expect(full.index(stage), size, pred=more)
            block = (i + stages) * step_blocks
            tma_load(words_desc, (block, row0, 0), full.index(stage), ring.index(stage), more)
            turn = stage == stages - 1
            stage = gl.where(turn, 0, stage + 1)
            phase = gl.where(turn, phase ^ 1, phase)
    store_sums(acc, out, bias, residual, row0, n, warps_k, activation, has_bias, has_residual)
