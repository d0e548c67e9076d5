"""The dual chunk layer: text in any number of steps, against the matrix of positions in float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from rooftile.distributed.group import ParallelGroup
from rooftile.layers.attention import LayerKV
from rooftile.layers.dual_chunk import DualChunkAttentionLayer
from rooftile.layers.linear import Linear, RowParallelLinear
from rooftile.ops.dual_chunk_rotary import DualChunkConfig
from rooftile.ops.packed_weight import pack
from rooftile.ops.rope import rotary_embedding
from rooftile.ops.rotary_table import RotaryConfig, rotary_table
from rooftile.types import PagedBatch
from tests.ops.test_dual_chunk import positions_of

HEADS, KV_HEADS, DIM, LENGTH = 4, 2, 6, 29
CONFIG = DualChunkConfig(9, 3, original_max_position=8)
TABLE = rotary_table(RotaryConfig(4, 100.0), CONFIG.num_positions)


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64) * 0.5


def by_matrix(x: Tensor, qkv: Tensor, out: Tensor, lengths: Tensor) -> Tensor:
    heads = (x @ qkv.T).unflatten(1, (HEADS + 2 * KV_HEADS, DIM))
    q, k, v = heads.split((HEADS, KV_HEADS, KV_HEADS), 1)
    query, key, _ = positions_of(CONFIG.chunk_size, CONFIG.local_size, len(x))
    fixed = rotary_embedding(k, key, TABLE)
    rows = []
    for i in range(len(x)):
        factor = max(1.0, 0.1 * math.log(int(lengths[i]) / 8) + 1) ** 2
        turned = rotary_embedding(q[i].expand(i + 1, -1, -1), query[i, : i + 1], TABLE)
        keys = fixed[: i + 1].repeat_interleave(HEADS // KV_HEADS, 1)
        weights = ((turned * keys).sum(-1) * factor / math.sqrt(DIM)).softmax(0)  # [keys, heads]
        values = v[: i + 1].repeat_interleave(HEADS // KV_HEADS, 1)
        rows.append((weights[..., None] * values).sum(0).flatten())
    return torch.stack(rows) @ out.T


@pytest.mark.parametrize("page_size", [1, 4, 3, 16])
@pytest.mark.parametrize("step", [1, 5, LENGTH])
@pytest.mark.parametrize("whole_prompt", [False, True])
def test_in_steps(page_size: int, step: int, whole_prompt: bool) -> None:
    x, qkv = draw(LENGTH, 10), draw((HEADS + 2 * KV_HEADS) * DIM, 10)
    out = draw(10, HEADS * DIM)
    layer = DualChunkAttentionLayer(
        qkv=Linear(pack(qkv, "dense")),
        out=RowParallelLinear(pack(out, "dense"), None, ParallelGroup()),
        dual_chunk=CONFIG,
        cos_sin=TABLE,
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=DIM,
    )
    num_pages = -(-LENGTH // page_size)
    pages = [
        torch.full((num_pages, KV_HEADS, page_size, DIM), math.nan, dtype=torch.float64)
        for _ in range(2)
    ]
    table = torch.randperm(num_pages, dtype=torch.int32)[None]
    got = []
    for start in range(0, LENGTH, step):
        at = torch.arange(start, min(start + step, LENGTH))
        batch = PagedBatch(
            cu_seqlens_q=torch.tensor([0, len(at)], dtype=torch.int32),
            kv_lens=torch.tensor([int(at[-1]) + 1], dtype=torch.int32),
            page_table=table,
            max_q_len=len(at),
            max_kv_len=LENGTH,
        )
        slots = table[0].long()[at // page_size] * page_size + at % page_size
        lengths = torch.full_like(at, LENGTH) if whole_prompt else None
        got.append(layer(x[at], at, LayerKV(pages[0], pages[1], slots, batch, lengths)))
    lengths = torch.full((LENGTH,), LENGTH) if whole_prompt else torch.arange(LENGTH) + 1
    torch.testing.assert_close(
        torch.cat(got), by_matrix(x, qkv, out, lengths), rtol=1e-6, atol=1e-6
    )
