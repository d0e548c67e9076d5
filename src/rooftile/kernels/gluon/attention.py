"""Attention forward for Hopper: dense and ragged, in the schedule of FlashAttention-3 and -4.

One producer warp copies tiles of Q, K and V by TMA; two or three consumer warpgroups of 64 query
rows each multiply and take the softmax. Within a warpgroup the exponentials of block i run while
the product of block i - 1 with V is in flight; between warpgroups, turns at the matrix unit keep
one busy with products while another is busy with exponentials (ping-pong). CTAs are persistent:
the producer runs ahead into the next tile while the consumers finish the last.

Tiles are taken longest first where causality makes them unequal, and in the ragged case sequences
are ordered by a small kernel on the device, so nothing waits for the host.
"""
# mypy: disable-error-code="no-untyped-def"

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from rooftile.kernels import Kernel
from rooftile.kernels.gluon.launch import launch, multiprocessors
from rooftile.kernels.gluon.tile.barrier import pass_turn, start_turns, take_turn
from rooftile.kernels.gluon.tile.mask import key_range, visible, whole_range
from rooftile.kernels.gluon.tile.mma import (
    GROUP_ROWS,
    accumulator_layout,
    columns_of,
    left_operand_layout,
    multiply,
    narrow,
    rows_of,
    wait,
)
from rooftile.kernels.gluon.tile.ring import Fill, first_fill, new_ring
from rooftile.kernels.gluon.tile.rows import (
    addressable,
    coordinates,
    describe,
    describe_ragged,
)
from rooftile.kernels.gluon.tile.schedule import new_queue
from rooftile.kernels.gluon.tile.softmax import (
    OnlineSoftmax,
    rescale,
    soft_cap,
    start_softmax,
    start_softmax_at_sink,
)
from rooftile.kernels.triton_version import aggregate, tma_store, tma_store_wait

_LOG2_E = 1.4426950408889634
# Fields of one entry of the ragged tile list; kv_len -1 marks padding after the last sequence.
_ENTRY = 8
# Before the entries stands one that holds their number and the counter of dynamic tiles, 0 at launch.
ENTRY = gl.constexpr(_ENTRY)  # first, tiles, q_start, q_len, kv_start, kv_len, 2 unused


# Fields of the message that describes a tile to the consumers; blocks 0: there are no more.
BLOCKS = gl.constexpr(0)
BATCH = gl.constexpr(1)
HEAD = gl.constexpr(2)
ROW0 = gl.constexpr(3)
Q_START = gl.constexpr(4)
Q_LEN = gl.constexpr(5)
KV_LEN = gl.constexpr(6)
FIRST = gl.constexpr(7)
FIELDS = gl.constexpr(8)


@aggregate
class Problem:
    """What every role of the kernel needs to know."""

    lse: gl.tensor  # pointer, [tokens, heads] or [batch, q_len, heads] float32
    sink: gl.tensor  # pointer, [heads] float32
    entries: gl.tensor  # pointer, [num_entries, ENTRY] int32 (ragged)
    num_tiles: gl.tensor
    num_heads: gl.tensor
    group_size: gl.tensor  # query heads per key-value head
    q_len: gl.tensor
    kv_len: gl.tensor
    q_tiles: gl.tensor  # tiles per sequence and head (dense)
    num_rows_of_heads: gl.tensor  # batch * heads (dense)
    section: gl.tensor  # heads whose K and V are meant to share the L2 cache
    left: gl.tensor
    right: gl.tensor
    factor: gl.tensor  # raw scores to log2 units
    softcap: gl.tensor
    ragged: gl.constexpr
    longest_first: gl.constexpr
    has_left: gl.constexpr
    has_right: gl.constexpr
    has_softcap: gl.constexpr
    has_sink: gl.constexpr
    groups: gl.constexpr
    block: gl.constexpr  # keys per tile
    turns: gl.constexpr  # warpgroups that take turns at the matrix unit, 1: none
    lazy: gl.constexpr
    software_share: gl.constexpr
    own_output: gl.constexpr  # the output tile has shared memory of its own

    @gluon.constexpr_function
    def __init__(
        self,
        lse,
        sink,
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
        groups,
        block,
        turns,
        lazy,
        software_share,
        own_output,
    ):
        self.lse = lse
        self.sink = sink
        self.entries = entries
        self.num_tiles = num_tiles
        self.num_heads = num_heads
        self.group_size = group_size
        self.q_len = q_len
        self.kv_len = kv_len
        self.q_tiles = q_tiles
        self.num_rows_of_heads = num_rows_of_heads
        self.section = section
        self.left = left
        self.right = right
        self.factor = factor
        self.softcap = softcap
        self.ragged = gl.constexpr(ragged)
        self.longest_first = gl.constexpr(longest_first)
        self.has_left = gl.constexpr(has_left)
        self.has_right = gl.constexpr(has_right)
        self.has_softcap = gl.constexpr(has_softcap)
        self.has_sink = gl.constexpr(has_sink)
        self.groups = gl.constexpr(groups)
        self.block = gl.constexpr(block)
        self.turns = gl.constexpr(turns)
        self.lazy = gl.constexpr(lazy)
        self.software_share = gl.constexpr(software_share)
        self.own_output = gl.constexpr(own_output)

    @gluon.jit
    def tile(self, t):
        """Batch (of a dense batch), head, first row, q_start, q_len, kv_start, kv_len of tile t."""
        if self.ragged:
            entry = self.entries + (t // self.num_heads) * ENTRY
            first = gl.load(entry) * self.num_heads  # tile of the sequence
            tiles = gl.load(entry + 1)  # per head
            if self.longest_first:
                head = (t - first) % self.num_heads
                m = tiles - 1 - (t - first) // self.num_heads
            else:
                head = (t - first) // tiles
                m = tiles - 1 - (t - first) % tiles
            row0 = m * (GROUP_ROWS * self.groups)
            q_start = gl.load(entry + 2)
            q_len = gl.load(entry + 3)
            kv_start = gl.load(entry + 4)
            kv_len = gl.load(entry + 5)
            return 0, head, row0, q_start, q_len, kv_start, kv_len
        else:
            per_section = self.section * self.q_tiles
            first_head = (t // per_section) * self.section
            width = gl.minimum(self.section, self.num_rows_of_heads - first_head)
            m = (t % per_section) // width
            if self.longest_first:
                m = self.q_tiles - 1 - m
            head = first_head + (t % per_section) % width
            batch = head // self.num_heads
            row0 = m * (GROUP_ROWS * self.groups)
            return batch, head % self.num_heads, row0, 0, self.q_len, 0, self.kv_len

    @gluon.jit
    def q_fill(self, turn, group: gl.constexpr):
        """The fill of the Q ring for a warpgroup; each has one stage of its own, or two."""
        return Fill(turn.stage * self.groups + group, turn.phase)

    @gluon.jit
    def next_q(self, turn):
        if self.own_output:
            return Fill(turn.stage ^ 1, turn.phase ^ turn.stage)
        else:
            return Fill(turn.stage, turn.phase ^ 1)

    @gluon.jit
    def keys(self, row0, q_len, kv_len):
        """First block of keys of a tile, and how many."""
        return key_range(
            row0,
            GROUP_ROWS * self.groups,
            q_len,
            kv_len,
            self.left,
            self.right,
            self.block,
            self.has_left,
            self.has_right,
        )


@gluon.jit
def _load_tiles(problem, queue, q_desc, k_desc, v_desc, q_ring, k_ring, v_ring):
    """The producer warp: tells the consumers what each tile is, and loads it."""
    q_turn = first_fill()
    fill = first_fill()
    slot = first_fill()
    t = gl.program_id(0)
    while t < problem.num_tiles:
        following = queue.draw(t)
        batch, head, row0, q_start, q_len, kv_start, kv_len = problem.tile(t)
        first, blocks = problem.keys(row0, q_len, kv_len)
        queue.send(slot, (blocks, batch, head, row0, q_start, q_len, kv_len, first))
        kv_head = head // problem.group_size
        for group in gl.static_range(problem.groups):
            q_fill = problem.q_fill(q_turn, group)
            q_ring.acquire(q_fill)
            at = coordinates(problem.ragged, batch, head, q_start, q_len, row0 + group * GROUP_ROWS)
            q_ring.load(q_fill, q_desc, at)
        q_turn = problem.next_q(q_turn)
        for i in range(blocks):
            column0 = (first + blocks - 1 - i) * problem.block
            at = coordinates(problem.ragged, batch, kv_head, kv_start, kv_len, column0)
            k_ring.acquire(fill)
            k_ring.load(fill, k_desc, at)
            v_ring.acquire(fill)
            v_ring.load(fill, v_desc, at)
            fill = k_ring.after(fill)
        t = following
        slot = queue.after(slot)
    queue.send(slot, (0, 0, 0, 0, 0, 0, 0, 0))


@gluon.jit
def _hide(problem, s, rows, columns, offset, kv_len):
    """Scores with what a query does not see at -inf."""
    seen = visible(
        rows,
        columns,
        offset,
        kv_len,
        problem.left,
        problem.right,
        problem.has_left,
        problem.has_right,
    )
    return gl.where(seen, s, float("-inf"))


@gluon.jit
def _next_block(
    problem,
    q,  # shared tile [64, k_dim]
    k_ring,
    v_ring,
    fill,  # of this block's K and V
    v_fill,  # of the block before
    more,  # whether a block follows
    o,  # [64, v_dim] float32, the blocks up to two before
    weights,  # [64, block], of the block before
    softmax,
    rows,
    columns,
    n,  # which block of keys
    low,  # blocks low .. high - 1 need no mask
    high,
    offset,
    kv_len,
    group: gl.constexpr,
    S: gl.constexpr,
    O: gl.constexpr,  # noqa: E741
):
    """Softmax of a block, while the block before is multiplied with V."""
    block: gl.constexpr = problem.block
    v_dim: gl.constexpr = v_ring.columns
    factor = problem.factor
    take_turn(group, problem.turns)
    s = gl.zeros([GROUP_ROWS, block], gl.float32, S)
    s = multiply(q, k_ring.tile(fill).permute((1, 0)), s, use_acc=False)
    v_ring.arrived(v_fill)
    o = multiply(weights, v_ring.tile(v_fill), o)
    pass_turn(group, problem.turns)
    s = wait(1, deps=[s])
    k_ring.release(fill)
    if problem.has_softcap:
        s = soft_cap(s, problem.factor, problem.softcap)
        factor = 1.0  # soft_cap gives log2 units
    # Only the first block, which is not this one, can run over the end of the keys.
    if (problem.has_left or problem.has_right) and ((n < low) | (n >= high)):
        s = _hide(problem, s, rows, n * block + columns, offset, kv_len)
    p, alpha, softmax = softmax.step(s, factor, problem.lazy, problem.software_share)
    # Waiting for the next K here ends the basic block: ptxas would otherwise hoist the wait below
    # above the exponentials, and nothing would overlap.
    next_fill = k_ring.after(fill)
    k_ring.arrived(next_fill, pred=more)
    # p passes through the wait so that it is computed before it; it is narrowed after, when the
    # registers of the old weights are free.
    o, weights, p, alpha, total = wait(0, deps=[o, weights, p, alpha, softmax.total])
    softmax = OnlineSoftmax(softmax.maximum, total)
    v_ring.release(v_fill)
    o = rescale(o, gl.convert_layout(alpha, rows_of(O)), v_dim, problem.lazy)
    weights = gl.convert_layout(narrow(p, weights.dtype), left_operand_layout(O))
    return o, weights, softmax, next_fill


@gluon.jit
def _attend(problem, queue, o_desc, q_ring, k_ring, v_ring, o_tiles, group: gl.constexpr):
    """One consumer warpgroup: rows group * 64 .. group * 64 + 63 of every tile."""
    block: gl.constexpr = problem.block
    v_dim: gl.constexpr = v_ring.columns
    dtype: gl.constexpr = o_desc.dtype
    S: gl.constexpr = accumulator_layout(block)
    O: gl.constexpr = accumulator_layout(v_dim)  # noqa: E741
    columns = gl.arange(0, block, columns_of(S))

    start_turns(group, problem.turns)
    q_turn = first_fill()
    fill = first_fill()
    slot = first_fill()
    queue.arrived(slot)
    blocks = queue.field(slot, BLOCKS)
    while blocks > 0:
        batch = queue.field(slot, BATCH)
        head = queue.field(slot, HEAD)
        row0 = queue.field(slot, ROW0) + group * GROUP_ROWS
        q_start = queue.field(slot, Q_START)
        q_len = queue.field(slot, Q_LEN)
        kv_len = queue.field(slot, KV_LEN)
        last = queue.field(slot, FIRST) + blocks - 1
        queue.release(slot)
        offset = kv_len - q_len
        rows = row0 + gl.arange(0, GROUP_ROWS, rows_of(S))
        if problem.has_sink:
            sink = gl.load(problem.sink + head)
            if kv_len < 0:  # padding after the last sequence
                sink = float("-inf")
            softmax = start_softmax_at_sink(sink, GROUP_ROWS, rows_of(S))
        else:
            softmax = start_softmax(GROUP_ROWS, rows_of(S))

        # The first block, the last of the keys: nothing to overlap it with.
        q_fill = problem.q_fill(q_turn, group)
        q_ring.arrived(q_fill)
        q = q_ring.tile(q_fill)
        k_ring.arrived(fill)
        take_turn(group, problem.turns)
        s = gl.zeros([GROUP_ROWS, block], gl.float32, S)
        s = multiply(q, k_ring.tile(fill).permute((1, 0)), s, use_acc=False)
        pass_turn(group, problem.turns)
        s = wait(0, deps=[s])
        k_ring.release(fill)
        factor = problem.factor
        if problem.has_softcap:
            s = soft_cap(s, problem.factor, problem.softcap)
            factor = 1.0
        low, high = whole_range(
            row0,
            offset,
            kv_len,
            problem.left,
            problem.right,
            GROUP_ROWS,
            block,
            problem.has_left,
            problem.has_right,
        )
        if (last < low) | (last >= high):
            s = _hide(problem, s, rows, last * block + columns, offset, kv_len)
        p, _alpha, softmax = softmax.step(s, factor, problem.lazy, problem.software_share)
        weights = gl.convert_layout(narrow(p, dtype), left_operand_layout(O))
        o = gl.zeros([GROUP_ROWS, v_dim], gl.float32, O)
        v_fill = fill
        fill = k_ring.after(fill)
        k_ring.arrived(fill, pred=blocks > 1)

        for i in range(1, blocks):
            at = fill
            o, weights, softmax, fill = _next_block(
                problem,
                q,
                k_ring,
                v_ring,
                fill,
                v_fill,
                i + 1 < blocks,
                o,
                weights,
                softmax,
                rows,
                columns,
                last - i,
                low,
                high,
                offset,
                kv_len,
                group,
                S,
                O,
            )
            v_fill = at

        v_ring.arrived(v_fill)
        o = multiply(weights, v_ring.tile(v_fill), o)
        if problem.own_output:
            q_ring.release(q_fill)
            out = o_tiles.index(group)
        else:
            out = q_ring.box(q_fill)
        tma_store_wait(0)
        o, weights = wait(0, deps=[o, weights])
        v_ring.release(v_fill)
        o = o * gl.expand_dims(gl.convert_layout(softmax.reciprocal(), rows_of(O)), 1)
        out.reshape([GROUP_ROWS, v_dim]).store(o.to(dtype))
        fence_async_shared()
        tma_store(o_desc, coordinates(problem.ragged, batch, head, q_start, q_len, row0), out)
        token = (batch * problem.q_len + q_start + rows).to(gl.int64)
        at_lse = problem.lse + token * problem.num_heads + head
        gl.store(at_lse, softmax.lse(), mask=rows < q_len)
        if not problem.own_output:
            tma_store_wait(0)
            q_ring.release(q_fill)
        q_turn = problem.next_q(q_turn)
        slot = queue.after(slot)
        queue.arrived(slot)
        blocks = queue.field(slot, BLOCKS)
    tma_store_wait(0)


_UNSPECIALISED = [
    "lse",
    "sink",
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
    lazy: gl.constexpr,
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
):
    """Forward attention. Launched with four warps; the other roles are added here."""
    counter = entries + 1
    if ragged:
        num_tiles = gl.load(entries) * num_heads
        entries = entries + ENTRY
    problem = Problem(
        lse,
        sink,
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
        groups,
        block,
        turns,
        lazy,
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
    if groups == 2:
        gl.warp_specialize(
            [
                (
                    _attend,
                    (problem, queue, o_desc, q_ring, k_ring, v_ring, o_tiles, gl.constexpr(0)),
                ),
                (
                    _attend,
                    (problem, queue, o_desc, q_ring, k_ring, v_ring, o_tiles, gl.constexpr(1)),
                ),
                (_load_tiles, (problem, queue, q_desc, k_desc, v_desc, q_ring, k_ring, v_ring)),
            ],
            [4, 1],
            [consumer_registers, producer_registers],
        )
    else:
        gl.warp_specialize(
            [
                (
                    _attend,
                    (problem, queue, o_desc, q_ring, k_ring, v_ring, o_tiles, gl.constexpr(0)),
                ),
                (
                    _attend,
                    (problem, queue, o_desc, q_ring, k_ring, v_ring, o_tiles, gl.constexpr(1)),
                ),
                (
                    _attend,
                    (problem, queue, o_desc, q_ring, k_ring, v_ring, o_tiles, gl.constexpr(2)),
                ),
                (_load_tiles, (problem, queue, q_desc, k_desc, v_desc, q_ring, k_ring, v_ring)),
            ],
            [4, 4, 1],
            [consumer_registers, consumer_registers, producer_registers],
        )


@gluon.jit(do_not_specialize=["entries", "cu_seqlens_q", "cu_seqlens_k", "batch", "tokens"])
def list_tiles_kernel(
    entries,  # pointer, [1 + capacity, ENTRY] int32, see ENTRY
    cu_seqlens_q,  # pointer, [batch + 1] int32
    cu_seqlens_k,  # pointer, [batch + 1] int32
    batch,
    tokens,  # rows of q; those after the last sequence form a sequence without keys
    tile_rows: gl.constexpr,
):
    """Lists the query tiles of a ragged batch, sequences with more keys first.

    Each of a sequence's entries stands for one of its tiles in every head; all say the same: the
    sequence's first entry, how many it has, and where its tokens are.

    One CTA a sequence, and one for the padding: each counts the tiles of the sequences before its
    own, so none waits for another.
    """
    L: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    lane = gl.arange(0, 128, L)
    me = gl.program_id(0)
    q_start = gl.load(cu_seqlens_q + me)
    kv_start = gl.load(cu_seqlens_k + me)
    if me == batch:
        q_len = tokens - q_start
        kv_len = -1
    else:
        q_len = gl.load(cu_seqlens_q + me + 1) - q_start
        kv_len = gl.load(cu_seqlens_k + me + 1) - kv_start
    before = gl.full([128], 0, gl.int32, L)
    for i in range(0, batch, 128):
        other = i + lane
        valid = other < batch
        other_q = gl.load(cu_seqlens_q + other + 1, mask=valid, other=0) - gl.load(
            cu_seqlens_q + other, mask=valid, other=0
        )
        other_kv = gl.load(cu_seqlens_k + other + 1, mask=valid, other=0) - gl.load(
            cu_seqlens_k + other, mask=valid, other=0
        )
        first = (other_kv > kv_len) | ((other_kv == kv_len) & (other < me))
        tiles = (other_q + (tile_rows - 1)) // tile_rows
        before += gl.where(valid & first, tiles, 0)
    start = gl.sum(before, 0)
    tiles = gl.cdiv(q_len, tile_rows)
    if me == batch:
        gl.store(entries, start + tiles)
        gl.store(entries + 1, 0)
    for i in range(0, tiles, 128):
        m = i + lane
        entry = entries + (1 + start + m) * ENTRY
        mine = m < tiles
        zero = m * 0
        gl.store(entry, zero + start, mask=mine)
        gl.store(entry + 1, zero + tiles, mask=mine)
        gl.store(entry + 2, zero + q_start, mask=mine)
        gl.store(entry + 3, zero + q_len, mask=mine)
        gl.store(entry + 4, zero + kv_start, mask=mine)
        gl.store(entry + 5, zero + kv_len, mask=mine)


@dataclass(frozen=True)
class Config:
    """How a head dim is run: tile sizes, roles and switches. Measurements: docs/performance.md."""

    dim: int  # of the tiles; smaller head dims are filled up with zeros by the copy engine
    groups: int  # consumer warpgroups of 64 query rows
    block: int  # keys per tile
    stages: int
    consumer_registers: int
    producer_registers: int
    turns: int = 1
    lazy: bool = True
    software_share: int = 0
    own_output: bool = True  # needs shared memory for outputs and a second Q tile
    dynamic: str = "unequal"  # when tiles go to whichever CTA is free: always, unequal, never

    @property
    def tile_rows(self) -> int:
        return 64 * self.groups


CONFIGS = {
    64: Config(64, 3, 128, 2, 160, 32, turns=3),
    128: Config(128, 2, 128, 2, 240, 24, turns=2),
    256: Config(256, 2, 64, 2, 240, 24, own_output=False),
}
# Tiles of 128 rows instead of 192 at head dim 64: less waste at short lengths and on the diagonal.
# H200, share of cuDNN with 128 and 192 rows: full s256 0.91, 0.56, s512 0.96, 0.94, s768 0.97, 1.06;
# causal s512 0.91, 0.74, s2048 0.94, 0.89, s8192 0.98, 1.02.
SHORT_64 = Config(64, 2, 128, 2, 240, 24, turns=2)
SHORT_Q_LEN = 512
SHORT_CAUSAL_Q_LEN = 4096
UNBOUNDED = 2**30  # beyond every length
# K and V of the heads that are worked on at a time, in bytes: few heads share the L2 cache, many
# make a long list of tiles to balance. Full attention has nothing to balance and takes one head
# after the other. H200, bf16, TFLOP/s:
#   full    one head, 8, 24 MiB   h16 d128 s512 537 526 494, s2048 688 686 658, s16384 702 704 706
#   causal  one head, 8, 24, 64   h16 d128 s512 235 261 321 -, s2048 533 548 542 498,
#                                 s8192 619 629 632 670; h8 d256 s16384 681 680 678 773
SECTION_BYTES = ((1024, 24 * 2**20), (4096, 8 * 2**20), (2**31, 64 * 2**20))  # q_len up to: bytes
# Up to here drawing tiles from a counter costs more than it balances (H200, d128 causal, s512:
# 303 against 322 TFLOP/s, s768 411 against 433, s2048 540 against 525).
IN_TURN_Q_LEN = 1024


def config_of(k_dim: int, v_dim: int, q_len: int, right: int) -> Config:
    dim = next(dim for dim in CONFIGS if dim >= max(k_dim, v_dim))
    if dim == 64 and q_len <= (SHORT_CAUSAL_Q_LEN if right >= 0 else SHORT_Q_LEN):
        return SHORT_64
    return CONFIGS[dim]


def attention(
    q: Tensor,  # [batch, q_len, num_q_heads, k_dim]
    k: Tensor,  # [batch, kv_len, num_kv_heads, k_dim]
    v: Tensor,  # [batch, kv_len, num_kv_heads, v_dim]
    sink: Tensor | None,  # [num_q_heads]
    left: int,
    right: int,
    softcap: float,
    scale: float,
    config: Config | None = None,
) -> tuple[Tensor, Tensor]:  # [batch, q_len, num_q_heads, v_dim], [batch, q_len, num_q_heads]
    out, lse = _outputs(q, v)
    if out.numel() == 0 or k.shape[1] == 0:
        return _without_keys(out, lse, sink)
    config = config or config_of(q.shape[3], v.shape[3], q.shape[1], right)
    q, scale = _positive_scale(q, scale)
    q, k, v = addressable(q), addressable(k), addressable(v)
    batch, q_len, num_heads, _ = q.shape
    kv_len, num_kv_heads = k.shape[1], k.shape[2]
    q_tiles = -(-q_len // config.tile_rows)
    num_tiles = q_tiles * batch * num_heads
    kv_heads_at_a_time = 1
    if right >= 0:
        section_bytes = next(size for longest, size in SECTION_BYTES if q_len <= longest)
        head_bytes = kv_len * (k.shape[3] + v.shape[3]) * k.element_size()
        kv_heads_at_a_time = max(section_bytes // head_bytes, 1)
    group_size = num_heads // num_kv_heads
    unequal = (left >= 0 or right >= 0) and q_len > IN_TURN_Q_LEN
    dynamic = (config.dynamic == "always" or (config.dynamic == "unequal" and unequal)) and (
        num_tiles > multiprocessors(q.device)
    )
    _launch(
        config,
        num_tiles,
        (
            describe(q, 64, config.dim),
            describe(k, config.block, config.dim),
            describe(v, config.block, config.dim),
            describe(out, 64, config.dim),
            lse,
            lse if sink is None else sink.float(),
            lse.new_zeros(2, dtype=torch.int32) if dynamic else lse,
            num_tiles,
            num_heads,
            group_size,
            q_len,
            kv_len,
            q_tiles,
            batch * num_heads,
            min(kv_heads_at_a_time * group_size, batch * num_heads),
        ),
        ragged=False,
        dynamic=dynamic,
        sink=sink,
        left=left,
        right=right,
        softcap=softcap,
        scale=scale,
    )
    return out, lse


def attention_varlen(
    q: Tensor,  # [tokens_q, num_q_heads, k_dim]
    k: Tensor,  # [tokens_k, num_kv_heads, k_dim]
    v: Tensor,  # [tokens_k, num_kv_heads, v_dim]
    cu_seqlens_q: Tensor,  # [batch + 1]
    cu_seqlens_k: Tensor,  # [batch + 1]
    max_q_len: int,
    max_kv_len: int,
    sink: Tensor | None,  # [num_q_heads]
    left: int,
    right: int,
    softcap: float,
    scale: float,
    config: Config | None = None,
) -> tuple[Tensor, Tensor]:  # [tokens_q, num_q_heads, v_dim], [tokens_q, num_q_heads]
    out, lse = _outputs(q, v)
    if out.numel() == 0:
        return out, lse
    config = config or config_of(q.shape[2], v.shape[2], max_q_len, right)
    q, scale = _positive_scale(q, scale)
    if k.shape[0] == 0:  # a descriptor needs memory, though no row of it will be visible
        k, v = k.new_zeros(1, *k.shape[1:]), v.new_zeros(1, *v.shape[1:])
    q, k, v = addressable(q), addressable(k), addressable(v)
    tokens, num_heads, _ = q.shape
    batch = cu_seqlens_q.shape[0] - 1
    # Every sequence, and the padding after the last, ends in at most one tile that is not full.
    capacity = tokens // config.tile_rows + min(batch + 1, tokens)
    entries = torch.empty(1 + capacity, _ENTRY, dtype=torch.int32, device=q.device)
    launch(
        list_tiles_kernel,
        batch + 1,
        q.device,
        (entries, cu_seqlens_q.to(torch.int32), cu_seqlens_k.to(torch.int32), batch, tokens),
        (("tile_rows", config.tile_rows),),
    )
    _launch(
        config,
        capacity * num_heads,
        (
            describe_ragged(q, 64, config.dim),
            describe_ragged(k, config.block, config.dim),
            describe_ragged(v, config.block, config.dim),
            describe_ragged(out, 64, config.dim),
            lse,
            lse if sink is None else sink.float(),
            entries,
            0,
            num_heads,
            num_heads // k.shape[1],
            *(0, 0, 0, 0, 0),
        ),
        ragged=True,
        dynamic=config.dynamic != "never",
        sink=sink,
        left=left,
        right=right,
        softcap=softcap,
        scale=scale,
    )
    return out, lse


def _outputs(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    out = q.new_empty(*q.shape[:-1], v.shape[-1])
    return out, q.new_empty(q.shape[:-1], dtype=torch.float32)


def _without_keys(out: Tensor, lse: Tensor, sink: Tensor | None) -> tuple[Tensor, Tensor]:
    lse.fill_(-torch.inf) if sink is None else lse.copy_(sink.expand_as(lse))
    return out.zero_(), lse


def _positive_scale(q: Tensor, scale: float) -> tuple[Tensor, float]:
    """The row maximum is taken of raw scores, which needs a positive scale."""
    if scale > 0:
        return q, scale
    return (-q, -scale) if scale < 0 else (q * 0, 1.0)


def _launch(
    config: Config,
    most_tiles: int,
    arguments: tuple[Any, ...],
    *,
    ragged: bool,
    dynamic: bool,
    sink: Tensor | None,
    left: int,
    right: int,
    softcap: float,
    scale: float,
) -> None:
    device = arguments[4].device
    launch(
        attention_kernel,
        min(most_tiles, multiprocessors(device)),
        device,
        (
            *arguments,
            min(left, UNBOUNDED),
            min(right, UNBOUNDED),
            # With a cap, what goes into tanh, and the log2 units that come out.
            scale / softcap if softcap else scale * _LOG2_E,
            softcap * _LOG2_E,
        ),
        constants(config, ragged, dynamic, left >= 0, right >= 0, softcap != 0, sink is not None),
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
) -> tuple[tuple[str, Any], ...]:
    """The compile-time arguments of `attention_kernel`, in its order."""
    return (
        ("k_dim", config.dim),
        ("v_dim", config.dim),
        ("groups", config.groups),
        ("block", config.block),
        ("stages", config.stages),
        ("turns", config.turns),
        ("lazy", config.lazy),
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
    )


def supports(call: Any) -> str | None:
    if call.device != "cuda":
        return f"it needs an NVIDIA GPU of compute capability 9.0, not a {call.device}"
    capability = torch.cuda.get_device_capability()
    if capability != (9, 0):
        return f"it is for compute capability 9.0, this GPU has {capability[0]}.{capability[1]}"
    if call.dtype not in (torch.bfloat16, torch.float16):
        return f"it takes bfloat16 and float16, not {call.dtype}"
    largest = max(CONFIGS)
    for name, dim in (("k_dim", call.k_dim), ("v_dim", call.v_dim)):
        if dim % 8 or dim > largest:
            return f"{name} is {dim}; it takes multiples of 8 up to {largest}"
    if call.page_size:
        return "it reads dense and ragged keys, not pages"
    return None


KERNELS = {
    "attention": Kernel(attention, supports, efficiency=0.75),
    "attention_varlen": Kernel(attention_varlen, supports, efficiency=0.75),
}
