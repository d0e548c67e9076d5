"""The kernel: shared memory, barriers, and the split into roles."""
# mypy: disable-error-code="no-untyped-def"

from collections.abc import Mapping
from functools import cache
from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from rooftile.kernels.gluon.attention.problem import Inlined
from rooftile.kernels.gluon.first_call import spares_llvm
from rooftile.kernels.gluon.paged.config import Config
from rooftile.kernels.gluon.paged.consumer import attend_items
from rooftile.kernels.gluon.paged.few import attend_few
from rooftile.kernels.gluon.paged.producer import load_items, load_values
from rooftile.kernels.gluon.paged.work import FIELDS, Work
from rooftile.kernels.gluon.tile.dependent import await_kernels_before, let_dependents_start
from rooftile.kernels.gluon.tile.maps import prefetch_maps
from rooftile.kernels.gluon.tile.mma import GROUP_ROWS
from rooftile.kernels.gluon.tile.pages import allocate_page_ring, new_page_ring
from rooftile.kernels.gluon.tile.roles import specialize
from rooftile.kernels.gluon.tile.said import allocate_said
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
    "with_lse",
]


def _as_good_without_llvm(constants: Mapping[str, Any]) -> bool:
    """Prefill: H200, time without LLVM's optimiser over time with it: d64 0.98, d128 0.98 to 0.99, in tiles of 64 keys 1.03,
    d256 0.99. Decoding has longer loops without it (few rows: 183 instructions for 159)."""
    return constants["groups"] == 2 and (constants["k_dim"], constants["block"]) != (128, 64)


@spares_llvm(where=_as_good_without_llvm)
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
    with_lse,  # 0: nobody reads it
    k_dim: gl.constexpr,
    v_dim: gl.constexpr,
    few: gl.constexpr,
    groups: gl.constexpr,
    block: gl.constexpr,
    k_stages: gl.constexpr,
    v_stages: gl.constexpr,
    lazy: gl.constexpr,
    anchored: gl.constexpr,
    overlapped: gl.constexpr,
    sums_in_parts: gl.constexpr,
    consumer_registers: gl.constexpr,
    producer_registers: gl.constexpr,
    page_size: gl.constexpr,
    packed: gl.constexpr,
    group: gl.constexpr,
    q_stages: gl.constexpr,
    own_output: gl.constexpr,
    quantised: gl.constexpr,
    has_left: gl.constexpr,
    has_right: gl.constexpr,
    has_softcap: gl.constexpr,
    has_sink: gl.constexpr,
    rotations: gl.constexpr,
    drawn: gl.constexpr,
    loaders: gl.constexpr,
    by_threads: gl.constexpr,
    in_turns: gl.constexpr,
    reads_ahead: gl.constexpr,
    passing: gl.constexpr,
):
    """Attention over pages by a plan. Launched with four warps; the other roles are added here."""
    # Of queries, keys, values and the output; a descriptor is a map and two numbers a dimension.
    prefetch_maps("paged_kernel", (0, 11, 22, 33))
    said = allocate_said(groups, gl.int8)
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
        cu_seqlens_q + batch,
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
        with_lse,
        said,
        (few if few > 0 else GROUP_ROWS) * groups,
        page_size,
        packed,
        group,
        q_stages,
        own_output,
        q_stages == 1 and loaders == 2,
        quantised,
        has_left,
        has_right,
        has_softcap,
        has_sink,
        rotations,
        groups,
        block,
        groups if overlapped and in_turns else 1,
        lazy,
        anchored,
        0,
        overlapped,
        sums_in_parts,
        reads_ahead,
        k_dim,
        v_dim,
        Inlined(None, None, (), (), False),
        drawn,
        loaders,
        passing,
    )
    k_ring = new_page_ring(k_desc, block, k_dim, k_stages, groups, by_threads)
    v_ring = new_page_ring(v_desc, block, v_dim, v_stages, groups, by_threads)
    queue = new_queue(plan, FIELDS, groups + loaders - 1, False)
    fence_async_shared()
    await_kernels_before()  # before the other roles begin
    let_dependents_start()  # they may read the plan at once: the kernel that made it has ended
    # Arguments are literals: a tuple bound to a name loses its compile-time values.
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
        specialize(
            attend_few,
            (work, queue, q_ring, q_gathered, p_tiles, k_ring, v_ring),
            groups,
            consumer_registers,
            [
                (load_items, (work, queue, q_desc, k_desc, v_desc, q_ring, k_ring, v_ring)),
                (load_values, (work, queue, q_desc, v_desc, q_ring, v_ring)),
            ][:loaders],
            producer_registers,
            False,
        )
    else:
        q_ring = new_page_ring(q_desc, GROUP_ROWS, k_dim, q_stages * groups, 1)
        outs = allocate_page_ring(o_desc, GROUP_ROWS, v_dim, groups) if own_output else q_ring
        specialize(
            attend_items,
            (work, queue, o_desc, q_ring, k_ring, v_ring, outs),
            groups,
            consumer_registers,
            [
                (load_items, (work, queue, q_desc, k_desc, v_desc, q_ring, k_ring, v_ring)),
                (load_values, (work, queue, q_desc, v_desc, q_ring, v_ring)),
            ][:loaders],
            producer_registers,
            k_dim > 64,  # at 64 it takes 1.015 of the time with a copy for each
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
    passing: bool = False,
) -> tuple[tuple[str, Any], ...]:
    """The compile-time arguments of `paged_kernel`, in its order."""
    return (
        ("k_dim", config.dim),
        ("v_dim", config.dim),
        ("few", config.few),
        ("groups", config.groups),
        ("block", config.block),
        ("k_stages", config.k_stages or config.stages),
        ("v_stages", config.stages),
        ("lazy", config.lazy),
        ("anchored", config.anchored),
        ("overlapped", config.overlapped),
        ("sums_in_parts", config.sums_in_parts),
        ("consumer_registers", config.registers[0]),
        ("producer_registers", config.registers[1]),
        ("page_size", page_size),
        ("packed", packed),
        ("group", group),
        ("q_stages", config.q_stages),
        ("own_output", config.own_output),
        ("quantised", quantised),
        ("has_left", has_left),
        ("has_right", has_right),
        ("has_softcap", has_softcap),
        ("has_sink", has_sink),
        ("rotations", rotations),
        ("drawn", config.drawn),
        ("loaders", config.loaders),
        ("by_threads", config.by_threads),
        ("in_turns", config.in_turns),
        ("reads_ahead", config.reads_ahead),
        ("passing", passing),
    )
