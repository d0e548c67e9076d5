"""The kernel: shared memory, barriers, and the split into roles."""
# mypy: disable-error-code="no-untyped-def"

from functools import cache
from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from rooftile.kernels.gluon.paged.config import Config
from rooftile.kernels.gluon.paged.consumer import attend_items
from rooftile.kernels.gluon.paged.few import attend_few
from rooftile.kernels.gluon.paged.producer import load_items, load_values
from rooftile.kernels.gluon.paged.work import FIELDS, Work
from rooftile.kernels.gluon.tile.dependent import await_kernels_before, let_dependents_start
from rooftile.kernels.gluon.tile.mma import GROUP_ROWS
from rooftile.kernels.gluon.tile.pages import new_page_ring
from rooftile.kernels.gluon.tile.schedule import new_queue

_UNSPECIALISED = [
    "q",
    "out",
    "lse",
    "partial_out",
    "partial_lse",
    "sink",
    "k_scale",
    "v_scale",
    "k_pages",
    "v_pages",
    "plan",
    "page_table",
    "cu_seqlens_q",
    "batch",
    "shares",
    "tokens",
    "ctas_at",
    "merges_at",
    "items_at",
    "table_stride",
    "k_pitch",
    "v_pitch",
    "k_stride",
    "v_stride",
    "k_head_stride",
    "v_head_stride",
    "q_stride",
    "q_head_stride",
    "group_size",
    "num_heads",
    "k_width_of_8",
    "v_width_of_8",
    "left",
    "right",
    "chunk",
]


@gluon.jit(do_not_specialize=_UNSPECIALISED)
def paged_kernel(
    q_desc,
    k_desc,
    v_desc,
    o_desc,
    q,  # pointers, see Work
    out,
    lse,
    partial_out,
    partial_lse,
    sink,
    k_scale,
    v_scale,
    k_pages,
    v_pages,
    plan,
    page_table,
    cu_seqlens_q,
    batch,
    shares,
    tokens,
    ctas_at,
    merges_at,
    items_at,
    table_stride,
    k_pitch,
    v_pitch,
    k_stride,
    v_stride,
    k_head_stride,
    v_head_stride,
    q_stride,
    q_head_stride,
    group_size,
    num_heads,
    k_width_of_8,
    v_width_of_8,
    left,
    right,
    factor,
    softcap,
    chunk,
    k_dim: gl.constexpr,
    v_dim: gl.constexpr,
    few: gl.constexpr,
    groups: gl.constexpr,
    block: gl.constexpr,
    stages: gl.constexpr,
    lazy: gl.constexpr,
    anchored: gl.constexpr,
    consumer_registers: gl.constexpr,
    producer_registers: gl.constexpr,
    page_size: gl.constexpr,
    packed: gl.constexpr,
    group: gl.constexpr,
    q_stages: gl.constexpr,
    quantised: gl.constexpr,
    has_left: gl.constexpr,
    has_right: gl.constexpr,
    has_softcap: gl.constexpr,
    has_sink: gl.constexpr,
    rotations: gl.constexpr,
    drawn: gl.constexpr,
    loaders: gl.constexpr,
):
    """Attention over pages by a plan. Launched with four warps; the other roles are added here."""
    let_dependents_start()
    work = Work(
        q,
        out,
        lse,
        partial_out,
        partial_lse,
        sink,
        k_scale,
        v_scale,
        k_pages,
        v_pages,
        plan,
        page_table,
        cu_seqlens_q,
        batch,
        shares,
        tokens,
        ctas_at,
        merges_at,
        items_at,
        table_stride,
        k_pitch,
        v_pitch,
        k_stride,
        v_stride,
        k_head_stride,
        v_head_stride,
        q_stride,
        q_head_stride,
        group_size,
        num_heads,
        k_width_of_8,
        v_width_of_8,
        left,
        right,
        factor,
        softcap,
        chunk,
        (few if few > 0 else GROUP_ROWS) * groups,
        page_size,
        packed,
        group,
        q_stages,
        quantised,
        has_left,
        has_right,
        has_softcap,
        has_sink,
        rotations,
        groups,
        block,
        groups,
        lazy,
        anchored,
        0,
        drawn,
        loaders,
    )
    k_ring = new_page_ring(k_desc, block, k_dim, stages, groups)
    v_ring = new_page_ring(v_desc, block, v_dim, stages, groups)
    queue = new_queue(plan, FIELDS, groups + loaders - 1, False)
    fence_async_shared()
    await_kernels_before()  # before the other roles begin
    # The argument tuples are literals: a tuple bound to a name loses its compile-time values.
    if few > 0:
        dtype: gl.constexpr = gl.float16 if quantised else k_desc.dtype  # of products
        q_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([few, k_dim], dtype)
        if packed > 0:
            q_ring = new_page_ring(q_desc, few, k_dim, q_stages, 1)
            q_gathered = q_ring.ring.buffers  # of no use
        else:
            q_ring = k_ring  # of no use
            q_gathered = gl.allocate_shared_memory(dtype, [groups, few, k_dim], q_layout)
        p_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([few, block], dtype)
        p_tiles = gl.allocate_shared_memory(dtype, [2 * groups, few, block], p_layout)
        if groups == 1 and loaders == 1:
            gl.warp_specialize(
                [
                    (
                        attend_few,
                        (work, queue, q_ring, q_gathered, p_tiles, k_ring, v_ring, gl.constexpr(0)),
                    ),
                    (load_items, (work, queue, q_desc, k_desc, v_desc, q_ring, k_ring, v_ring)),
                ],
                [1],
                [producer_registers],
            )
        elif groups == 1:
            gl.warp_specialize(
                [
                    (
                        attend_few,
                        (work, queue, q_ring, q_gathered, p_tiles, k_ring, v_ring, gl.constexpr(0)),
                    ),
                    (load_items, (work, queue, q_desc, k_desc, v_desc, q_ring, k_ring, v_ring)),
                    (load_values, (work, queue, v_desc, v_ring)),
                ],
                [1, 1],
                [producer_registers, producer_registers],
            )
        else:
            gl.warp_specialize(
                [
                    (
                        attend_few,
                        (work, queue, q_ring, q_gathered, p_tiles, k_ring, v_ring, gl.constexpr(0)),
                    ),
                    (
                        attend_few,
                        (work, queue, q_ring, q_gathered, p_tiles, k_ring, v_ring, gl.constexpr(1)),
                    ),
                    (load_items, (work, queue, q_desc, k_desc, v_desc, q_ring, k_ring, v_ring)),
                ],
                [4, 1],
                [consumer_registers, producer_registers],
            )
    else:
        q_ring = new_page_ring(q_desc, GROUP_ROWS, k_dim, q_stages * groups, 1)
        if anchored:
            box: gl.constexpr = gl.NVMMASharedLayout.get_default_for(
                [GROUP_ROWS, k_dim], k_desc.dtype
            )
            boxes = gl.allocate_shared_memory(k_desc.dtype, [groups, GROUP_ROWS, k_dim], box)
        else:
            boxes = q_ring.ring.buffers  # of no use
        if groups == 1 and loaders == 1:
            gl.warp_specialize(
                [
                    (
                        attend_items,
                        (work, queue, o_desc, q_ring, k_ring, v_ring, boxes, gl.constexpr(0)),
                    ),
                    (load_items, (work, queue, q_desc, k_desc, v_desc, q_ring, k_ring, v_ring)),
                ],
                [1],
                [producer_registers],
            )
        elif groups == 1:
            gl.warp_specialize(
                [
                    (
                        attend_items,
                        (work, queue, o_desc, q_ring, k_ring, v_ring, boxes, gl.constexpr(0)),
                    ),
                    (load_items, (work, queue, q_desc, k_desc, v_desc, q_ring, k_ring, v_ring)),
                    (load_values, (work, queue, v_desc, v_ring)),
                ],
                [1, 1],
                [producer_registers, producer_registers],
            )
        elif loaders == 1:
            gl.warp_specialize(
                [
                    (
                        attend_items,
                        (work, queue, o_desc, q_ring, k_ring, v_ring, boxes, gl.constexpr(0)),
                    ),
                    (
                        attend_items,
                        (work, queue, o_desc, q_ring, k_ring, v_ring, boxes, gl.constexpr(1)),
                    ),
                    (load_items, (work, queue, q_desc, k_desc, v_desc, q_ring, k_ring, v_ring)),
                ],
                [4, 1],
                [consumer_registers, producer_registers],
            )
        else:
            gl.warp_specialize(
                [
                    (
                        attend_items,
                        (work, queue, o_desc, q_ring, k_ring, v_ring, boxes, gl.constexpr(0)),
                    ),
                    (
                        attend_items,
                        (work, queue, o_desc, q_ring, k_ring, v_ring, boxes, gl.constexpr(1)),
                    ),
                    (load_items, (work, queue, q_desc, k_desc, v_desc, q_ring, k_ring, v_ring)),
                    (load_values, (work, queue, v_desc, v_ring)),
                ],
                [4, 1, 1],
                [consumer_registers, producer_registers, producer_registers],
            )


@cache
def constants(
    config: Config,
    page_size: int,
    packed: int,
    group: int,
    quantised: bool,
    has_left: bool,
    has_right: bool,
    has_softcap: bool,
    has_sink: bool,
    rotations: int = 1,
) -> tuple[tuple[str, Any], ...]:
    """The compile-time arguments of `paged_kernel`, in its order."""
    return (
        ("k_dim", config.dim),
        ("v_dim", config.dim),
        ("few", config.few),
        ("groups", config.groups),
        ("block", config.block),
        ("stages", config.stages),
        ("lazy", config.lazy),
        ("anchored", config.anchored),
        ("consumer_registers", config.registers[0]),
        ("producer_registers", config.registers[1]),
        ("page_size", page_size),
        ("packed", packed),
        ("group", group),
        ("q_stages", config.q_stages),
        ("quantised", quantised),
        ("has_left", has_left),
        ("has_right", has_right),
        ("has_softcap", has_softcap),
        ("has_sink", has_sink),
        ("rotations", rotations),
        ("drawn", config.drawn),
        ("loaders", config.loaders),
    )
