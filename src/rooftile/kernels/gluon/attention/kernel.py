"""The kernel: shared memory, barriers, and the split into roles."""
# mypy: disable-error-code="no-untyped-def"

from functools import cache
from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from rooftile.kernels.gluon.attention.config import Config
from rooftile.kernels.gluon.attention.consumer import attend
from rooftile.kernels.gluon.attention.problem import FIELDS, Problem
from rooftile.kernels.gluon.attention.producer import load_tiles
from rooftile.kernels.gluon.attention.tile_list import ENTRY
from rooftile.kernels.gluon.tile.mma import GROUP_ROWS
from rooftile.kernels.gluon.tile.ring import new_ring
from rooftile.kernels.gluon.tile.schedule import new_queue

_UNSPECIALISED = [
    "lse",
    "sink",
    "slopes",
    "entries",
    "num_tiles",
    "num_heads",
    "group_size",
    "q_len",
    "kv_len",
    "q_tiles",
    "num_rows_of_heads",
    "section",
    "left",
    "right",
]


@gluon.jit(do_not_specialize=_UNSPECIALISED)
def attention_kernel(
    q_desc,
    k_desc,
    v_desc,
    o_desc,
    lse,  # pointer, see Problem
    sink,
    slopes,
    entries,  # pointer to int32, see ENTRY
    num_tiles,
    num_heads,
    group_size,
    q_len,
    kv_len,
    q_tiles,
    num_rows_of_heads,
    section,
    left,
    right,
    factor,
    softcap,
    k_dim: gl.constexpr,
    v_dim: gl.constexpr,
    groups: gl.constexpr,
    block: gl.constexpr,
    stages: gl.constexpr,
    turns: gl.constexpr,
    overlapped: gl.constexpr,
    lazy: gl.constexpr,
    sums_in_parts: gl.constexpr,
    software_share: gl.constexpr,
    own_output: gl.constexpr,
    consumer_registers: gl.constexpr,
    producer_registers: gl.constexpr,
    ragged: gl.constexpr,
    dynamic: gl.constexpr,
    longest_first: gl.constexpr,
    has_left: gl.constexpr,
    has_right: gl.constexpr,
    has_softcap: gl.constexpr,
    has_sink: gl.constexpr,
    has_alibi: gl.constexpr,
):
    """Forward attention. Launched with four warps; the other roles are added here."""
    counter = entries + 1
    if ragged:
        num_tiles = gl.load(entries) * num_heads
        entries = entries + ENTRY
    problem = Problem(
        lse,
        sink,
        slopes,
        entries,
        num_tiles,
        num_heads,
        group_size,
        q_len,
        kv_len,
        q_tiles,
        num_rows_of_heads,
        section,
        left,
        right,
        factor,
        softcap,
        ragged,
        longest_first,
        has_left,
        has_right,
        has_softcap,
        has_sink,
        has_alibi,
        groups,
        block,
        turns,
        overlapped,
        lazy,
        sums_in_parts,
        software_share,
        own_output,
    )
    # With room for outputs of their own, Q tiles are loaded one ahead.
    q_ring = new_ring(q_desc, GROUP_ROWS, k_dim, groups * 2 if own_output else groups, 1)
    k_ring = new_ring(k_desc, block, k_dim, stages, groups)
    v_ring = new_ring(v_desc, block, v_dim, stages, groups)
    if own_output:
        o_tiles = gl.allocate_shared_memory(
            o_desc.dtype,
            [groups] + o_desc.block_shape,  # noqa: RUF005
            o_desc.layout,
        )
    else:
        o_tiles = q_ring.buffers
    queue = new_queue(counter, FIELDS, groups, dynamic)
    fence_async_shared()
    # The argument tuples are literals: a tuple bound to a name loses its compile-time values.
    if groups == 1:
        gl.warp_specialize(
            [
                (
                    attend,
                    (problem, queue, o_desc, q_ring, k_ring, v_ring, o_tiles, gl.constexpr(0)),
                ),
                (load_tiles, (problem, queue, q_desc, k_desc, v_desc, q_ring, k_ring, v_ring)),
            ],
            [1],
            [producer_registers],
        )
    elif groups == 2:
        gl.warp_specialize(
            [
                (
                    attend,
                    (problem, queue, o_desc, q_ring, k_ring, v_ring, o_tiles, gl.constexpr(0)),
                ),
                (
                    attend,
                    (problem, queue, o_desc, q_ring, k_ring, v_ring, o_tiles, gl.constexpr(1)),
                ),
                (load_tiles, (problem, queue, q_desc, k_desc, v_desc, q_ring, k_ring, v_ring)),
            ],
            [4, 1],
            [consumer_registers, producer_registers],
        )
    else:
        gl.warp_specialize(
            [
                (
                    attend,
                    (problem, queue, o_desc, q_ring, k_ring, v_ring, o_tiles, gl.constexpr(0)),
                ),
                (
                    attend,
                    (problem, queue, o_desc, q_ring, k_ring, v_ring, o_tiles, gl.constexpr(1)),
                ),
                (
                    attend,
                    (problem, queue, o_desc, q_ring, k_ring, v_ring, o_tiles, gl.constexpr(2)),
                ),
                (load_tiles, (problem, queue, q_desc, k_desc, v_desc, q_ring, k_ring, v_ring)),
            ],
            [4, 4, 1],
            [consumer_registers, consumer_registers, producer_registers],
        )


@cache
def constants(
    config: Config,
    ragged: bool,
    dynamic: bool,
    has_left: bool,
    has_right: bool,
    has_softcap: bool,
    has_sink: bool,
    has_alibi: bool = False,
) -> tuple[tuple[str, Any], ...]:
    """The compile-time arguments of `attention_kernel`, in its order."""
    return (
        ("k_dim", config.dim),
        ("v_dim", config.dim),
        ("groups", config.groups),
        ("block", config.block),
        ("stages", config.stages),
        ("turns", config.turns),
        ("overlapped", config.overlapped),
        ("lazy", config.lazy),
        ("sums_in_parts", config.sums_in_parts),
        ("software_share", config.software_share),
        ("own_output", config.own_output),
        ("consumer_registers", config.consumer_registers),
        ("producer_registers", config.producer_registers),
        ("ragged", ragged),
        ("dynamic", dynamic),
        ("longest_first", has_right),
        ("has_left", has_left),
        ("has_right", has_right),
        ("has_softcap", has_softcap),
        ("has_sink", has_sink),
        ("has_alibi", has_alibi),
    )
