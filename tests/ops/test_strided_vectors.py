"""Lengths, positions and slots may have a stride, in every kernel: a column of a table, say."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from rooftile import ops
from rooftile.ops.append import APPEND_KV
from rooftile.ops.attention import ATTENTION_VARLEN
from rooftile.ops.differential import DIFFERENTIAL_VARLEN, PAGED_DIFFERENTIAL
from rooftile.ops.dual_chunk import DUAL_CHUNK_VARLEN, PAGED_DUAL_CHUNK
from rooftile.ops.dual_chunk_rotary import DUAL_CHUNK_ROTARY
from rooftile.ops.operator import Operator
from rooftile.ops.paged import PAGED_ATTENTION
from rooftile.ops.rope import ROTARY_EMBEDDING
from rooftile.types import PagedBatch
from tests.ops.accuracy import kernels_to_test
from tests.ops.test_paged import fill

G = torch.Generator().manual_seed(0)
X = torch.randn(9, 2, 16, generator=G)
CU, AT = torch.tensor([0, 4, 9]), torch.arange(9)
TABLE = ops.rotary_table(ops.RotaryConfig(16), 10)
CHUNKS = {"chunk_size": 12, "local_size": 4}
PAGED = fill(G, [(5, 33), (1, 20), (1, 7), (9, 9)], (4, 2), (16, 16), 4, torch.float32)
HALVES = PAGED.q.split(8, -1)
POOL = (PAGED.k_pages, PAGED.v_pages)
Move = Callable[[Tensor], Tensor]


def batch(move: Move) -> PagedBatch:
    given = PAGED.batch
    vectors = (given.cu_seqlens_q, given.kv_lens, given.page_table)
    return PagedBatch(*map(move, vectors), given.max_q_len, given.max_kv_len)


def append(move: Move, kernel: str) -> Tensor:
    pages = torch.zeros(2, 3, 2, 4, 16)
    at = move(AT)
    ops.append_kv(X, X, *pages, at, positions=at, cos_sin=TABLE, kernel=kernel)
    return pages


# Each a function of how lengths and the like are laid out, and of the kernel.
CALLS: dict[Operator, Callable[[Move, str], Any]] = {
    ATTENTION_VARLEN: lambda move, kernel: ops.attention_varlen(
        X, X, X, move(CU), move(CU), causal=True, kernel=kernel
    ),
    DUAL_CHUNK_VARLEN: lambda move, kernel: ops.dual_chunk_attention_varlen(
        X, 2 * X, -X, X, X, move(CU), move(CU), chunk_size=3, local_size=1, kernel=kernel
    ),
    DIFFERENTIAL_VARLEN: lambda move, kernel: ops.differential_attention_varlen(
        X, X, 2 * X, None, X, move(torch.tensor([0.3, 0.5])), move(CU), move(CU), kernel=kernel
    ),
    PAGED_ATTENTION: lambda move, kernel: ops.paged_attention(
        PAGED.q, *POOL, batch(move), kernel=kernel
    ),
    PAGED_DUAL_CHUNK: lambda move, kernel: ops.paged_dual_chunk_attention(
        PAGED.q, 2 * PAGED.q, -PAGED.q, *POOL, batch(move), **CHUNKS, kernel=kernel
    ),
    PAGED_DIFFERENTIAL: lambda move, kernel: ops.paged_differential_attention(
        *HALVES, *POOL, batch(move), 0.3, kernel=kernel
    ),
    ROTARY_EMBEDDING: lambda move, kernel: ops.rotary_embedding(X, move(AT), TABLE, kernel=kernel),
    DUAL_CHUNK_ROTARY: lambda move, kernel: torch.stack(
        ops.dual_chunk_rotary_embedding(
            X, move(AT), TABLE, chunk_size=5, local_size=1, original_max_position=3,
            lengths=move(AT + 1), kernel=kernel,
        )
    ),
    APPEND_KV: append,
}  # fmt: skip


def with_stride(x: Tensor) -> Tensor:
    """Equal, with other numbers between its own."""
    apart = torch.full((*x.shape[:-1], 2 * x.shape[-1]), 3, dtype=x.dtype)
    apart[..., ::2] = x
    return apart[..., ::2]


def cases() -> list[Any]:
    return [
        pytest.param(operator, kernel, id=f"{operator.name} {kernel}")
        for operator in CALLS
        for kernel in kernels_to_test(operator)
    ]


@pytest.mark.parametrize(("operator", "kernel"), cases())
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_a_stride_changes_nothing(operator: Operator, kernel: str, dtype: torch.dtype) -> None:
    def integers(x: Tensor) -> Tensor:
        return x if x.is_floating_point() else x.to(dtype)

    call = CALLS[operator]
    expected = call(integers, kernel)
    for _ in range(2):  # the second call may go another way
        assert torch.equal(call(lambda x: with_stride(integers(x)), kernel), expected)
