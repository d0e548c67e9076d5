"""The matrix product's kernel: shared memory, barriers and roles."""
# mypy: disable-error-code="no-untyped-def"

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from rooftile.kernels.gluon.gemm.accumulator import is_odd_width
from rooftile.kernels.gluon.gemm.cluster_sum import multiply_part
from rooftile.kernels.gluon.gemm.consumer import multiply_share
from rooftile.kernels.gluon.gemm.problem import GROUPS, Problem
from rooftile.kernels.gluon.gemm.producer import first_loads, load_operands, load_operands_together
from rooftile.kernels.gluon.gemm.shares import Shares
from rooftile.kernels.gluon.tile.cluster import new_cluster_ring
from rooftile.kernels.gluon.tile.dependent import let_dependents_start
from rooftile.kernels.gluon.tile.divisor import Divisor
from rooftile.kernels.gluon.tile.maps import prefetch_maps
from rooftile.kernels.gluon.tile.operands import new_operand_ring

_UNSPECIALISED = [
    "out",
    "bias",
    "residual",
    "scale_a",
    "scale_b",
    "m",
    "n",
    "out_stride",
    "residual_stride",
    "scale_a_stride",
    "scale_b_stride",
    "num_tiles",
    "tiles_m",
    "band",
    "band_factor",
    "band_shift",
    "last_band",
    "last_band_factor",
    "last_band_shift",
    "tiles_per_band",
    "tiles_per_band_factor",
    "tiles_per_band_shift",
    "iterations",
    "iterations_factor",
    "iterations_shift",
    "stream_tiles",
    "group_ctas",
    "group_ctas_factor",
    "group_ctas_shift",
    "group_steps",
]


@gluon.jit
def _multiply(
    problem, shares, ring, out_desc, out_tiles, group: gl.constexpr, buffers: gl.constexpr
):
    """A consumer warpgroup of a kernel whose operands are loaded by a cluster, or pass."""
    if problem.split > 1:
        multiply_part(problem, shares, ring, out_desc, out_tiles, group, buffers)
    else:
        multiply_share(problem, shares, ring, out_desc, out_tiles, group, buffers)


@gluon.jit(do_not_specialize=_UNSPECIALISED)
def matmul_kernel(
    a_desc,  # boxes [a_rows, block_k], or [block_k, block_m] where m is contiguous
    b_desc,  # boxes [box_columns, block_k], or [block_k, box_columns] where n is contiguous
    out_desc,  # boxes [rows of a warpgroup, columns of a chunk], or the other way round
    out,  # pointers and numbers: see Problem and Shares
    bias,
    residual,
    scale_a,
    scale_b,
    parts,
    flags,
    m,
    n,
    out_stride,
    residual_stride,
    scale_a_stride,
    scale_b_stride,
    num_tiles,
    tiles_m,
    band,
    band_factor,
    band_shift,
    last_band,
    last_band_factor,
    last_band_shift,
    tiles_per_band,
    tiles_per_band_factor,
    tiles_per_band_shift,
    iterations,
    iterations_factor,
    iterations_shift,
    stream_tiles,
    group_ctas,
    group_ctas_factor,
    group_ctas_shift,
    group_steps,
    block_m: gl.constexpr,
    block_n: gl.constexpr,
    block_k: gl.constexpr,
    a_rows: gl.constexpr,
    split_rows: gl.constexpr,
    stages: gl.constexpr,
    buffers: gl.constexpr,
    consumer_registers: gl.constexpr,
    producer_registers: gl.constexpr,
    a_by_rows: gl.constexpr,
    b_by_rows: gl.constexpr,
    b_boxes: gl.constexpr,
    gated: gl.constexpr,
    activation: gl.constexpr,
    has_bias: gl.constexpr,
    has_residual: gl.constexpr,
    has_scales: gl.constexpr,
    out_unit: gl.constexpr,
    ahead: gl.constexpr,
    streamed: gl.constexpr,
    apart: gl.constexpr,
    sharers: gl.constexpr,
    split: gl.constexpr,
    across: gl.constexpr,
    a_at: gl.constexpr,
    b_at: gl.constexpr,
    passing: gl.constexpr,
    transposed: gl.constexpr,
    alone: gl.constexpr,
    in_turn: gl.constexpr,
    traded: gl.constexpr,
):
    """Launched with four warps; the other roles are added here."""
    cluster: gl.constexpr = sharers * across * split
    joined: gl.constexpr = cluster > 1 or passing or alone or is_odd_width(block_n)
    let_dependents_start()
    prefetch_maps("matmul_kernel", (0, 5, 10))
    problem = Problem(
        out,
        bias,
        residual,
        scale_a,
        scale_b,
        parts,
        flags,
        m,
        n,
        out_stride,
        residual_stride,
        scale_a_stride,
        scale_b_stride,
        block_m,
        block_n,
        block_k,
        split_rows,
        a_by_rows,
        b_by_rows,
        b_boxes,
        gated,
        activation,
        has_bias,
        has_residual,
        has_scales,
        ahead,
        sharers,
        across,
        split,
        joined,
        in_turn,
        transposed,
        out_unit,
    )
    shares = Shares(
        num_tiles,
        tiles_m,
        Divisor(band, band_factor, band_shift),
        Divisor(last_band, last_band_factor, last_band_shift),
        Divisor(tiles_per_band, tiles_per_band_factor, tiles_per_band_shift),
        Divisor(iterations, iterations_factor, iterations_shift),
        stream_tiles,
        Divisor(group_ctas, group_ctas_factor, group_ctas_shift),
        group_steps,
        streamed,
        apart,
        cluster,
        split,
    )
    if joined:
        ring = new_cluster_ring(
            a_desc,
            b_desc,
            block_n,
            stages,
            sharers,
            across,
            cluster,
            GROUPS,
            "matmul_kernel",
            0,
            5,
            a_at,
            b_at,
            passing,
            1 if in_turn else GROUPS,
            traded,
        )
        # Before others are waited for: arguments that nobody has read yet are as far away as memory.
        begin, end, whole, more, tile_m, tile_n, first, last = first_loads(problem, shares, ring)
    else:
        ring = new_operand_ring(
            a_desc,
            b_desc,
            block_m if a_by_rows else block_k,
            b_boxes,
            not b_by_rows,
            stages,
            GROUPS,
        )
    out_tiles = gl.allocate_shared_memory(
        out_desc.dtype,
        [GROUPS * buffers] + out_desc.block_shape,  # noqa: RUF005
        out_desc.layout,
    )
    fence_async_shared()
    # The argument tuples are literals: a tuple bound to a name loses its compile-time values.
    if joined:
        # All warps join the cluster, so there are as many as the launch has: no role of one warp.
        gl.warp_specialize(
            [
                (
                    load_operands_together,
                    (problem, shares, ring, begin, end, whole, more, tile_m, tile_n, first, last),
                ),
                (
                    _multiply,
                    (problem, shares, ring, out_desc, out_tiles, gl.constexpr(0), buffers),
                ),
                (
                    _multiply,
                    (problem, shares, ring, out_desc, out_tiles, gl.constexpr(1), buffers),
                ),
            ],
            [4, 4],
            [consumer_registers, consumer_registers],
        )
    else:
        gl.warp_specialize(
            [
                (
                    multiply_share,
                    (problem, shares, ring, out_desc, out_tiles, gl.constexpr(0), buffers),
                ),
                (
                    multiply_share,
                    (problem, shares, ring, out_desc, out_tiles, gl.constexpr(1), buffers),
                ),
                (load_operands, (problem, shares, ring, a_desc, b_desc)),
            ],
            [4, 1],
            [consumer_registers, producer_registers],
        )
