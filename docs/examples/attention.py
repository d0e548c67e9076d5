"""Attention forward on a Hopper GPU, in bfloat16: the code of docs/tutorial_attention.md."""

import math

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from rooftile.kernels.gluon.launch import Launch, multiprocessors
from rooftile.kernels.gluon.tile.mask import visible
from rooftile.kernels.gluon.tile.mma import (
    accumulator_layout,
    columns_of,
    left_operand_layout,
    multiply,
    narrow,
    rows_of,
    wait,
)
from rooftile.kernels.gluon.tile.record import record
from rooftile.kernels.gluon.tile.ring import Fill, Ring, new_ring
from rooftile.kernels.gluon.tile.rows import addressable, coordinates, describe
from rooftile.kernels.gluon.tile.softmax import OnlineSoftmax, rescale, start_softmax
from rooftile.kernels.gluon.tile.template import load_compute_finish
from rooftile.kernels.triton_version import tma_store, tma_store_wait

ROWS = gl.constexpr(64)  # of one warpgroup; two of them share a tile
KEYS = gl.constexpr(128)


@record
class State:
    o: gl.tensor  # [64, dim] float32, not yet divided by the sum of weights
    softmax: OnlineSoftmax


@record
class Attention:
    num_tiles: gl.tensor
    heads: gl.tensor
    group_size: gl.tensor  # query heads for a key-value head
    q_tiles: gl.tensor  # for a head
    q_len: gl.tensor
    kv_len: gl.tensor
    factor: gl.tensor  # scores to log2 units
    lse: gl.tensor  # pointer, [batch, q_len, heads] float32
    ring: Ring  # K
    v_ring: Ring
    q_ring: Ring  # one stage for each warpgroup
    out: gl.shared_memory_descriptor  # [2, box]
    dim: gl.constexpr
    causal: gl.constexpr

    @gluon.jit
    def tile(self, t):
        """Batch, head and first row: tiles that share K and V run at the same time."""
        head = t // self.q_tiles
        row0 = (self.q_tiles - 1 - t % self.q_tiles) * (2 * ROWS)  # the longest first
        return head // self.heads, head % self.heads, row0

    @gluon.jit
    def steps(self, t):
        end = self.kv_len
        if self.causal:
            row0 = self.tile(t)[2]
            last = gl.minimum(row0 + 2 * ROWS, self.q_len) - 1
            end = gl.minimum(end, last + self.kv_len - self.q_len + 1)
        return gl.maximum(gl.cdiv(gl.maximum(end, 0), KEYS), 1)

    @gluon.jit
    def load(self, descs, turn, fill, t, i):
        batch, head, row0 = self.tile(t)
        if i == 0:
            for group in gl.static_range(2):
                mine = Fill(turn.stage + group, turn.phase)
                self.q_ring.acquire(mine)
                at = coordinates(False, batch, head, 0, 0, row0 + group * ROWS)
                self.q_ring.load(mine, descs[0], at)
        at = coordinates(False, batch, head // self.group_size, 0, 0, i * KEYS)
        self.ring.acquire(fill)
        self.ring.load(fill, descs[1], at)
        self.v_ring.acquire(fill)
        self.v_ring.load(fill, descs[2], at)

    @gluon.jit
    def start(self, t, group: gl.constexpr):
        o = gl.zeros([ROWS, self.dim], gl.float32, accumulator_layout(self.dim))
        return State(o, start_softmax(ROWS, rows_of(accumulator_layout(KEYS))))

    @gluon.jit
    def compute(self, state, turn, fill, t, i, group: gl.constexpr):
        S: gl.constexpr = accumulator_layout(KEYS)
        O: gl.constexpr = accumulator_layout(self.dim)  # noqa: E741
        mine = Fill(turn.stage + group, turn.phase)
        if i == 0:
            self.q_ring.arrived(mine)
        self.ring.arrived(fill)
        s = gl.zeros([ROWS, KEYS], gl.float32, S)
        k = self.ring.tile(fill).permute((1, 0))
        s = wait(0, deps=[multiply(self.q_ring.tile(mine), k, s, use_acc=False)])
        self.ring.release(fill)
        row0 = self.tile(t)[2] + group * ROWS
        offset = self.kv_len - self.q_len
        end = self.kv_len
        if self.causal:
            end = gl.minimum(end, row0 + offset + 1)
        if (i + 1) * KEYS > end:  # the block is not seen whole
            rows = row0 + gl.arange(0, ROWS, rows_of(S))
            columns = i * KEYS + gl.arange(0, KEYS, columns_of(S))
            seen = visible(rows, columns, offset, self.kv_len, 0, 0, False, self.causal)
            s = gl.where(seen, s, float("-inf"))
        p, alpha, softmax = state.softmax.step(s, self.factor, True, 0)
        o = rescale(state.o, gl.convert_layout(alpha, rows_of(O)), self.dim, True)
        weights = gl.convert_layout(narrow(p, gl.bfloat16), left_operand_layout(O))
        self.v_ring.arrived(fill)
        o = multiply(weights, self.v_ring.tile(fill), o)
        o, weights = wait(0, deps=[o, weights])
        self.v_ring.release(fill)
        return State(o, softmax)

    @gluon.jit
    def finish(self, state, descs, turn, t, group: gl.constexpr):
        O: gl.constexpr = accumulator_layout(self.dim)  # noqa: E741
        self.q_ring.release(Fill(turn.stage + group, turn.phase))
        batch, head, row0 = self.tile(t)
        row0 += group * ROWS
        scale = gl.convert_layout(state.softmax.reciprocal(), rows_of(O))
        out = self.out.index(group)
        tma_store_wait(0)
        o = (state.o * gl.expand_dims(scale, 1)).to(gl.bfloat16)
        out.reshape([ROWS, self.dim]).store(o)
        fence_async_shared()
        tma_store(descs[3], coordinates(False, batch, head, 0, 0, row0), out)
        rows = row0 + gl.arange(0, ROWS, rows_of(accumulator_layout(KEYS)))
        at = (batch * self.q_len + rows).to(gl.int64) * self.heads + head
        gl.store(self.lse + at, state.softmax.lse(), mask=rows < self.q_len)


@gluon.jit(do_not_specialize=range(5, 11))  # a 1 would become a compile-time value
def attention_kernel(
    q_desc, k_desc, v_desc, o_desc, lse, num_tiles, heads, group_size, q_tiles, q_len, kv_len,
    factor, dim: gl.constexpr, stages: gl.constexpr, causal: gl.constexpr,
):  # fmt: skip
    work = Attention(
        num_tiles, heads, group_size, q_tiles, q_len, kv_len, factor, lse,
        new_ring(k_desc, KEYS, dim, stages, 2),
        new_ring(v_desc, KEYS, dim, stages, 2),
        new_ring(q_desc, ROWS, dim, 2, 1),
        gl.allocate_shared_memory(gl.bfloat16, [2] + o_desc.block_shape, o_desc.layout),  # noqa: RUF005
        dim, causal,
    )  # fmt: skip
    load_compute_finish(work, (q_desc, k_desc, v_desc, o_desc), 2, 232)


def attention(
    q: torch.Tensor,  # [batch, q_len, heads, dim], dim 64 or 128
    k: torch.Tensor,  # [batch, kv_len, kv_heads, dim]
    v: torch.Tensor,  # [batch, kv_len, kv_heads, dim]
    causal: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:  # [batch, q_len, heads, dim], [batch, q_len, heads]
    batch, q_len, heads, dim = q.shape
    q, k, v = addressable(q), addressable(k), addressable(v)
    out, lse = torch.empty_like(q), q.new_empty(q.shape[:-1], dtype=torch.float32)
    q_tiles = -(-q_len // 128)
    tiles = batch * heads * q_tiles
    boxes = tuple(describe(x, rows, dim) for x, rows in ((q, 64), (k, 128), (v, 128), (out, 64)))
    factor = dim**-0.5 * math.log2(math.e)
    numbers = (tiles, heads, heads // k.shape[2], q_tiles, q_len, k.shape[1], factor)
    constants = (("dim", dim), ("stages", 2), ("causal", causal))
    ctas = min(tiles, multiprocessors(q.device))
    launch = Launch(attention_kernel, ctas, q.device, q.dtype, boxes, numbers, constants)
    launch((q, k, v, out), (lse,))
    return out, lse
