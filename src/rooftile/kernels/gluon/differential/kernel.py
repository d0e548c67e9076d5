"""The kernel: shared memory, barriers, and the split into roles."""
# mypy: disable-error-code="no-untyped-def"

from functools import cache
from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from rooftile.kernels.gluon.attention.problem import FIELDS, Inlined, Problem
from rooftile.kernels.gluon.attention.sequences import Sequences
from rooftile.kernels.gluon.attention.tile_list import ENTRY
from rooftile.kernels.gluon.differential.config import Config
from rooftile.kernels.gluon.differential.roles import Pair, attend_half, load_pairs
from rooftile.kernels.gluon.first_call import spares_llvm
from rooftile.kernels.gluon.tile.mma import GROUP_ROWS
from rooftile.kernels.gluon.tile.ring import new_ring
from rooftile.kernels.gluon.tile.schedule import new_queue

_UNSPECIALISED = [
    *("lse1", "lse2", "lam", "entries", "num_tiles", "num_pairs", "group_size", "q_len", "kv_len"),
    *("q_tiles", "num_rows_of_pairs", "section", "left", "right"),
    *("lam_batch_stride", "lam_stride", "lam_pair_stride"),
]


@spares_llvm()
@gluon.jit(do_not_specialize=_UNSPECIALISED)
def differential_kernel(
    q1_desc,
    q2_desc,
    k1_desc,
    k2_desc,
    v_desc,
    o_desc,
    k1_64_desc,  # of keys and of values in boxes of 64 rows, for a second pass over a tile
    k2_64_desc,
    v64_desc,
    lse1,  # pointers, see Pair
    lse2,
    lam,
    entries,  # pointer to int32, see ENTRY
    num_tiles,
    num_pairs,
    group_size,
    q_len,
    kv_len,
    q_tiles,
    num_rows_of_pairs,
    section,
    left,
    right,
    lam_batch_stride,
    lam_stride,
    lam_pair_stride,
    factor,
    k_dim: gl.constexpr,
    v_dim: gl.constexpr,
    block: gl.constexpr,
    stages: gl.constexpr,
    q_stages: gl.constexpr,
    turns: gl.constexpr,
    lazy: gl.constexpr,
    anchored: gl.constexpr,
    consumer_registers: gl.constexpr,
    producer_registers: gl.constexpr,
    ragged: gl.constexpr,
    dynamic: gl.constexpr,
    has_left: gl.constexpr,
    has_right: gl.constexpr,
    shared_keys: gl.constexpr,
):
    """Differential attention. Launched with four warps; the other roles are added here."""
    counter = entries + 1
    if ragged:
        num_tiles = gl.load(entries) * num_pairs
        entries = entries + ENTRY
    o_tile = gl.allocate_shared_memory(o_desc.dtype, o_desc.block_shape, o_desc.layout)
    problem = Problem(
        lse1,
        lse1,
        lse1,
        Sequences(entries, o_tile, entries, entries, num_tiles, num_tiles, 0),
        Inlined(None, None, (), (), False),
        num_tiles,
        num_pairs,
        group_size,
        q_len,
        kv_len,
        q_tiles,
        num_rows_of_pairs,
        section,
        left,
        right,
        factor,
        factor,  # of no use, as sinks and slopes
        ragged,
        has_right,  # longest first
        has_left,
        has_right,
        False,
        False,
        False,
        1,  # tiles of 64 rows: both warpgroups have the same ones
        block,
        turns,
        True,
        lazy,
        k_dim,
        v_dim,
        anchored,
        False,
        0,
        q_stages == 2,
        False,
        False,
        False,
    )
    q1_ring = new_ring(q1_desc, GROUP_ROWS, k_dim, q_stages, 1)
    q2_ring = new_ring(q2_desc, GROUP_ROWS, k_dim, q_stages, 1)
    v_ring = new_ring(v_desc, block, v_dim, stages, 2)
    if shared_keys:
        k1_ring = new_ring(k1_desc, block, k_dim, stages, 2)
        k2_ring = k1_ring
    else:
        k1_ring = new_ring(k1_desc, block, k_dim, stages, 1)
        k2_ring = new_ring(k2_desc, block, k_dim, stages, 1)
    hand_over = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    mbarrier.init(hand_over.index(0), count=1)
    mbarrier.init(hand_over.index(1), count=1)
    landed = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    mbarrier.init(landed.index(0), count=1)
    mbarrier.init(landed.index(1), count=1)
    pair = Pair(
        *(
            lse1,
            lse2,
            lam,
            lam_batch_stride,
            lam_stride,
            lam_pair_stride,
            o_tile,
            hand_over,
            landed,
        ),
        shared_keys,
    )
    queue = new_queue(counter, FIELDS, 2, dynamic)
    fence_async_shared()
    # The argument tuples are literals: a tuple bound to a name loses its compile-time values.
    gl.warp_specialize(
        [
            (
                attend_half,
                (
                    problem, pair, queue, o_desc, k1_64_desc, v64_desc, q1_ring, k1_ring, v_ring,
                    gl.constexpr(0),
                ),
            ),
            (
                attend_half,
                (
                    problem, pair, queue, o_desc, k2_64_desc, v64_desc, q2_ring, k2_ring, v_ring,
                    gl.constexpr(1),
                ),
            ),
            (
                load_pairs,
                (
                    problem, pair, queue, q1_desc, q2_desc, k1_desc, k2_desc, v_desc, q1_ring,
                    q2_ring, k1_ring, k2_ring, v_ring,
                ),
            ),
        ],
        [4, 1],
        [consumer_registers, producer_registers],
    )  # fmt: skip


@cache
def constants(
    config: Config, ragged: bool, dynamic: bool, has_left: bool, has_right: bool, shared_keys: bool
) -> tuple[tuple[str, Any], ...]:
    """The compile-time arguments of `differential_kernel`, in its order."""
    return (
        ("k_dim", config.k_dim),
        ("v_dim", config.v_dim),
        ("block", config.block),
        ("stages", config.stages),
        ("q_stages", config.q_stages),
        ("turns", config.turns),
        ("lazy", config.lazy),
        ("anchored", config.anchored),
        ("consumer_registers", config.consumer_registers),
        ("producer_registers", config.producer_registers),
        ("ragged", ragged),
        ("dynamic", dynamic),
        ("has_left", has_left),
        ("has_right", has_right),
        ("shared_keys", shared_keys),
    )
