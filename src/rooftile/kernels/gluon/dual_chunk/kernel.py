"""The kernel: shared memory, barriers, and the split into roles."""
# mypy: disable-error-code="no-untyped-def"

from functools import cache
from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from rooftile.kernels.gluon.attention.config import Config
from rooftile.kernels.gluon.dual_chunk.problem import FIELDS, ChunkProblem
from rooftile.kernels.gluon.dual_chunk.roles import attend, load_tiles
from rooftile.kernels.gluon.first_call import spares_llvm
from rooftile.kernels.gluon.tile.mma import GROUP_ROWS
from rooftile.kernels.gluon.tile.ring import new_ring
from rooftile.kernels.gluon.tile.roles import specialize
from rooftile.kernels.gluon.tile.said import allocate_said
from rooftile.kernels.gluon.tile.schedule import new_queue

_UNSPECIALISED = [
    *("lse", "counter", "num_tiles", "num_heads", "group_size", "q_len", "kv_len", "q_tiles"),
    *("num_rows_of_heads", "section", "left", "right", "chunk", "first_rows", "first_tiles"),
    "chunk_tiles",
]


@spares_llvm()
@gluon.jit(do_not_specialize=_UNSPECIALISED)
def dual_chunk_kernel(
    intra_desc,
    succ_desc,
    inter_desc,
    k_desc,
    v_desc,
    o_desc,
    k64_desc,  # of keys and of values in boxes of 64 rows, for a second pass over a tile
    v64_desc,
    lse,  # pointer, see ChunkProblem
    counter,  # pointer to two int32 that are 0
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
    chunk,
    first_rows,
    first_tiles,
    chunk_tiles,
    factor,
    softcap,
    k_dim: gl.constexpr,
    v_dim: gl.constexpr,
    groups: gl.constexpr,
    block: gl.constexpr,
    stages: gl.constexpr,
    turns: gl.constexpr,
    lazy: gl.constexpr,
    anchored: gl.constexpr,
    software_share: gl.constexpr,
    own_output: gl.constexpr,
    consumer_registers: gl.constexpr,
    producer_registers: gl.constexpr,
    dynamic: gl.constexpr,
    has_softcap: gl.constexpr,
):
    """Dual chunk attention. Launched with four warps; the other roles are added here."""
    problem = ChunkProblem(
        lse,
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
        chunk,
        first_rows,
        first_tiles,
        chunk_tiles,
        factor,
        softcap,
        False,
        True,
        has_softcap,
        groups,
        block,
        turns,
        lazy,
        anchored,
        software_share,
        own_output,
    )
    # With room for outputs of their own, Q tiles are loaded one ahead.
    q_ring = new_ring(intra_desc, GROUP_ROWS, k_dim, groups * 2 if own_output else groups, 1)
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
    landed = gl.allocate_shared_memory(gl.int64, [groups, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(groups):
        mbarrier.init(landed.index(i), count=1)
    said = allocate_said(groups, gl.int32)
    queue = new_queue(counter, FIELDS, groups, dynamic)
    fence_async_shared()
    specialize(
        attend,
        (
            problem, queue, o_desc, intra_desc, succ_desc, inter_desc, k64_desc, v64_desc, landed,
            said, q_ring, k_ring, v_ring, o_tiles,
        ),
        groups,
        consumer_registers,
        [
            (
                load_tiles,
                (
                    problem, queue, intra_desc, succ_desc, inter_desc, k_desc, v_desc, q_ring,
                    k_ring, v_ring,
                ),
            )
        ],
        producer_registers,
    )  # fmt: skip


@cache
def constants(config: Config, dynamic: bool, has_softcap: bool) -> tuple[tuple[str, Any], ...]:
    """The compile-time arguments of `dual_chunk_kernel`, in its order."""
    return (
        ("k_dim", config.dim),
        ("v_dim", config.dim),
        ("groups", config.groups),
        ("block", config.block),
        ("stages", config.stages),
        ("turns", config.turns),
        ("lazy", config.lazy),
        ("anchored", config.anchored),
        ("software_share", config.software_share),
        ("own_output", config.own_output),
        ("consumer_registers", config.consumer_registers),
        ("producer_registers", config.producer_registers),
        ("dynamic", dynamic),
        ("has_softcap", has_softcap),
    )
