"""The kernel: shared memory, barriers, and the split into roles."""
# mypy: disable-error-code="no-untyped-def"

from collections.abc import Mapping
from functools import cache
from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
)

from rooftile.kernels.gluon.attention.config import Config, columns_used
from rooftile.kernels.gluon.attention.consumer import attend
from rooftile.kernels.gluon.attention.first_tile import load_first_tile
from rooftile.kernels.gluon.attention.problem import FIELDS, FIELDS_OF_PARTS, Inlined, Problem
from rooftile.kernels.gluon.attention.producer import load_tiles
from rooftile.kernels.gluon.attention.sequences import Sequences, start_sequences
from rooftile.kernels.gluon.attention.shares import Shares, is_one_sequence
from rooftile.kernels.gluon.attention.tile_list import ENTRY
from rooftile.kernels.gluon.first_call import spares_llvm
from rooftile.kernels.gluon.tile.dependent import (
    await_kernels_before,
    let_dependents_start,
)
from rooftile.kernels.gluon.tile.maps import prefetch_maps
from rooftile.kernels.gluon.tile.mma import GROUP_ROWS
from rooftile.kernels.gluon.tile.ring import allocate_ring
from rooftile.kernels.gluon.tile.roles import specialize
from rooftile.kernels.gluon.tile.said import allocate_said
from rooftile.kernels.gluon.tile.schedule import allocate_queue

_UNSPECIALISED = [
    "lse",
    "sink",
    "slopes",
    "entries",
    "cu_seqlens_q",
    "cu_seqlens_k",
    "parts",
    "arrived",
    "batch",
    "tokens",
    "num_tiles",
    "num_heads",
    "group_size",
    "q_len",
    "kv_len",
    "q_tiles",
    "num_rows_of_heads",
    "section",
    "rounds",
    "left",
    "right",
    "with_lse",
]


def _as_good_without_llvm(constants: Mapping[str, Any]) -> bool:
    """H200, time without LLVM's optimiser over time with it: dense d128 full 1.00, causal 0.99 to 1.00, s256 0.97 to
    1.00, ragged causal 0.99, cut 0.97 to 1.00, d64 192 rows 0.99, d96 0.99, d192 causal 1.00; what is left out: d64 in tiles of
    64 keys 1.01 to 1.03, d128 in these 1.00 to 1.02, ragged d128 full 1.01, d192 full 1.01, d256 1.00 to 1.01. Biases of ALiBi
    spill; what functions of the caller would do is not known."""
    if constants["has_alibi"] or constants["score_mod"] or constants["mask_mod"]:
        return False
    if not constants["anchored"]:
        return constants["k_dim"] < 256 or constants["split"]
    masked = constants["has_left"] or constants["has_right"] or constants["split"]
    if constants["block"] == 64:
        return constants["k_dim"] == 256 and masked
    return masked or not constants["ragged"]


@spares_llvm(where=_as_good_without_llvm)
@gluon.jit(do_not_specialize=_UNSPECIALISED)
def attention_kernel(
    q_desc,
    k_desc,
    v_desc,
    o_desc,
    k_again_desc,  # K and V in the boxes of a second pass, see again.py
    v_again_desc,
    lse,  # pointer, see Problem
    sink,
    slopes,
    entries,  # pointer to int32: tiles (ENTRY), or the counter alone, or items (Shares)
    cu_seqlens_q,
    cu_seqlens_k,
    parts,  # pointers, see Shares
    arrived,
    batch,
    tokens,
    num_tiles,
    num_heads,
    group_size,
    q_len,
    kv_len,
    q_tiles,
    num_rows_of_heads,
    section,
    rounds,  # tiles that a CTA takes in turn before it draws others
    left,
    right,
    with_lse,  # 0: nobody reads it
    factor,
    softcap,
    score_captured,
    mask_captured,
    k_dim: gl.constexpr,
    v_dim: gl.constexpr,
    k_used: gl.constexpr,
    v_used: gl.constexpr,
    groups: gl.constexpr,
    block: gl.constexpr,
    stages: gl.constexpr,
    turns: gl.constexpr,
    overlapped: gl.constexpr,
    lazy: gl.constexpr,
    anchored: gl.constexpr,
    sums_in_parts: gl.constexpr,
    software_share: gl.constexpr,
    own_output: gl.constexpr,
    reads_ahead: gl.constexpr,
    by_threads: gl.constexpr,
    loads_early: gl.constexpr,
    dependent: gl.constexpr,
    one_copy: gl.constexpr,
    consumer_registers: gl.constexpr,
    producer_registers: gl.constexpr,
    ragged: gl.constexpr,
    most_sorted: gl.constexpr,
    dynamic: gl.constexpr,
    longest_first: gl.constexpr,
    has_left: gl.constexpr,
    has_right: gl.constexpr,
    has_softcap: gl.constexpr,
    has_sink: gl.constexpr,
    has_alibi: gl.constexpr,
    score_mod: gl.constexpr,
    mask_mod: gl.constexpr,
    split: gl.constexpr,
):
    """Forward attention. Launched with four warps; the other roles are added here."""
    if dependent:
        let_dependents_start()
    # Of Q, K, V and the output; a descriptor is a map and two numbers for each of 4 or 5 dimensions.
    prefetch_maps("attention_kernel", (0, 11, 22, 33) if ragged else (0, 9, 18, 27))
    # With room for outputs of their own, Q tiles are loaded one ahead.
    q_ring = allocate_ring(
        q_desc, GROUP_ROWS, k_dim, groups * 2 if own_output else groups, by_threads
    )
    k_ring = allocate_ring(k_desc, block, k_dim, stages, by_threads)
    v_ring = allocate_ring(v_desc, block, v_dim, stages, by_threads)
    if own_output:
        o_tiles = gl.allocate_shared_memory(
            o_desc.dtype,
            [groups] + o_desc.block_shape,  # noqa: RUF005
            o_desc.layout,
        )
    elif anchored:  # room for keys and values of a second pass only
        o_tiles = gl.allocate_shared_memory(
            o_desc.dtype,
            [groups] + k_again_desc.block_shape,  # noqa: RUF005
            k_again_desc.layout,
        )
    else:
        o_tiles = q_ring.buffers
    landed = gl.allocate_shared_memory(gl.int64, [groups, 1], mbarrier.MBarrierLayout())
    first_drawn = gl.num_programs(0) * gl.maximum(rounds, 1)
    fields: gl.constexpr = FIELDS_OF_PARTS if split else FIELDS
    queue = allocate_queue(entries + 1, first_drawn, fields, dynamic, by_threads)
    said = allocate_said(groups, gl.int32)
    if loads_early:
        load_first_tile(
            q_desc,
            k_desc,
            v_desc,
            q_ring,
            k_ring,
            v_ring,
            num_heads,
            group_size,
            q_len,
            kv_len,
            q_tiles,
            num_rows_of_heads,
            section,
            left,
            right,
            groups,
            block,
            k_used,
            v_used,
            dependent,
            longest_first,
            has_left,
            has_right,
        )
    # Stage by stage: Triton has all warps meet between two barriers of one allocation.
    for i in gl.static_range(6):
        q_ring.start(i, 1, groups if loads_early else 0)
        k_ring.start(i, groups, 1 if loads_early else 0)
        v_ring.start(i, groups, 1 if loads_early else 0)
        queue.start(i, groups)
        if i < groups:
            mbarrier.init(landed.index(i), count=1)
    if dependent and not loads_early:
        await_kernels_before()
    starts = landed
    if most_sorted:
        tile_rows: gl.constexpr = GROUP_ROWS * groups
        layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
        starts = gl.allocate_shared_memory(gl.int16, [most_sorted], layout)
        places = num_tiles
        num_tiles = num_heads * start_sequences(
            starts, cu_seqlens_q, cu_seqlens_k, batch, tokens, tile_rows, most_sorted
        )
    elif ragged:
        num_tiles = gl.load(entries) * num_heads
        entries = entries + ENTRY
    as_planned = gl.to_tensor(True)
    if ragged and split:
        as_planned = is_one_sequence(cu_seqlens_q, cu_seqlens_k, tokens, kv_len)
        num_tiles = gl.where(as_planned, places, num_tiles)
    problem = Problem(
        lse,
        sink,
        slopes,
        Sequences(entries, starts, cu_seqlens_q, cu_seqlens_k, batch, tokens, most_sorted),
        Inlined(
            score_mod,
            mask_mod,
            score_captured,
            mask_captured,
            score_mod is not None or mask_mod is not None,
        ),
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
        k_used,
        v_used,
        anchored,
        sums_in_parts,
        software_share,
        own_output,
        reads_ahead and overlapped,
        loads_early,
        ragged or split or groups == 3,  # see tile/mask.py
    )
    shares = Shares(entries, parts, arrived, said, as_planned, groups, v_dim, split)
    fence_async_shared()
    specialize(
        attend,
        (
            problem,
            shares,
            with_lse,
            queue,
            o_desc,
            k_again_desc,
            v_again_desc,
            landed,
            q_ring,
            k_ring,
            v_ring,
            o_tiles,
        ),
        groups,
        consumer_registers,
        [(load_tiles, (problem, shares, queue, q_desc, k_desc, v_desc, q_ring, k_ring, v_ring))],
        producer_registers,
        one_copy,
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
    k_dim: int = 0,  # of the tensors, 0: that of the tiles
    v_dim: int = 0,
    score_mod: Any = None,
    mask_mod: Any = None,
    most_sorted: int = 0,  # sequences of a ragged batch that each CTA sorts, 0: they are listed
    split: bool = False,  # tiles are in parts, see shares.py
) -> tuple[tuple[str, Any], ...]:
    """The compile-time arguments of `attention_kernel`, in its order."""
    return (
        ("k_dim", config.dim),
        ("v_dim", config.dim),
        ("k_used", columns_used(config.dim, k_dim or config.dim)),
        ("v_used", columns_used(config.dim, v_dim or config.dim)),
        ("groups", config.groups),
        ("block", config.block),
        ("stages", config.stages),
        ("turns", config.turns),
        ("overlapped", config.overlapped),
        ("lazy", config.lazy),
        ("anchored", config.anchored),
        ("sums_in_parts", config.sums_in_parts),
        ("software_share", config.software_share),
        ("own_output", config.own_output),
        ("reads_ahead", config.reads_ahead),
        ("by_threads", config.by_threads),
        ("loads_early", config.loads_early and not ragged and not split),
        ("dependent", config.dependent),
        ("one_copy", config.has_one_copy(has_alibi)),
        ("consumer_registers", config.consumer_registers),
        ("producer_registers", config.producer_registers),
        ("ragged", ragged),
        ("most_sorted", most_sorted),
        ("dynamic", dynamic),
        ("longest_first", has_right),
        ("has_left", has_left),
        ("has_right", has_right),
        ("has_softcap", has_softcap),
        ("has_sink", has_sink),
        ("has_alibi", has_alibi),
        ("score_mod", score_mod),
        ("mask_mod", mask_mod),
        ("split", split),
    )
