"""tree_attention: every path through a tree sees what it would see as a text of its own."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rooftile.ops.paged import paged_attention
from rooftile.ops.tree import TREE_ATTENTION, tree_attention
from rooftile.types import PagedBatch
from tests.ops import attention_oracle as oracle
from tests.ops.accuracy import dtype_for, kernels_to_test, opcheck
from tests.ops.test_paged import fill


def draw_trees(g: torch.Generator, q_lens: list[int]) -> tuple[list[list[list[int]]], Tensor]:
    """For each request the path from the root to each node, and all nodes' masks."""
    paths: list[list[list[int]]] = []
    masks = []
    for q_len in q_lens:
        found: list[list[int]] = []
        for node in range(q_len):
            parent = int(torch.randint(-1, node, (1,), generator=g)) if node else -1
            found.append([*(found[parent] if parent >= 0 else []), node])
            masks.append(sum(1 << ancestor for ancestor in found[-1]))
        paths.append(found)
    # The mask of 64 tokens fills all bits of an int64.
    return paths, torch.tensor([m - (1 << 64) if m >> 63 else m for m in masks], dtype=torch.int64)


@pytest.mark.parametrize("kernel", kernels_to_test(TREE_ATTENTION))
@settings(max_examples=15)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 40)), min_size=1, max_size=3),
    heads=oracle.HEADS,
    page_size=st.sampled_from([1, 4, 16]),
    dtype=oracle.DTYPES,
    softcap=oracle.SOFTCAPS,
    sink_kind=oracle.SINKS,
    padding=st.integers(0, 2),
    seed=st.integers(0, 2**32),
)
def test_each_node_sees_its_own_path(
    kernel: str,
    lengths: list[tuple[int, int]],
    heads: tuple[int, int],
    page_size: int,
    dtype: torch.dtype,
    softcap: float,
    sink_kind: float | None,
    padding: int,
    seed: int,
) -> None:
    dtype = dtype_for(kernel, dtype)
    g = torch.Generator().manual_seed(seed)
    lengths = [(q_len, q_len + context) for q_len, context in lengths]
    paged = fill(g, lengths, heads, (8, 6), page_size, dtype, padding=padding)
    paths, tree = draw_trees(g, [q for q, _ in lengths])
    tree = torch.cat([tree, torch.full((padding,), -1)])
    sink = oracle.sink_of(g, heads[0], sink_kind)
    out, lse = tree_attention(
        paged.q, paged.k_pages, paged.v_pages, paged.batch, tree, softcap=softcap, sink=sink,
        return_lse=True, kernel=kernel,
    )  # fmt: skip
    token = 0
    for (q_len, kv_len), found, k, v in zip(lengths, paths, paged.k, paged.v, strict=True):
        before = kv_len - q_len
        for path in found:
            keys = [*range(before), *(before + node for node in path)]
            one = slice(token, token + 1)
            expected = oracle.attend(paged.q[one], k[keys], v[keys], softcap=softcap, sink=sink)
            oracle.assert_attention_close((out[one], lse[one]), expected, dtype)
            token += 1
    assert bool((out[token:] == 0).all())
    assert bool((lse[token:] == -math.inf).all())


@pytest.mark.parametrize("kernel", kernels_to_test(TREE_ATTENTION))
def test_a_chain_of_sixty_four_is_causal_attention(kernel: str) -> None:
    g = torch.Generator().manual_seed(0)
    paged = fill(g, [(64, 150)], (2, 1), (16, 16), 16, torch.float32)
    tree = torch.tensor([(2 << i) - 1 if i < 63 else -1 for i in range(64)], dtype=torch.int64)
    arguments: Any = (paged.q, paged.k_pages, paged.v_pages, paged.batch)
    expected = paged_attention(*arguments, kernel=kernel)
    got = tree_attention(*arguments, tree, kernel=kernel)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


def small() -> tuple[Tensor, Tensor, Tensor, PagedBatch, Tensor]:
    paged = fill(torch.Generator().manual_seed(0), [(3, 9)], (4, 2), (8, 8), 4, torch.float32)
    return (
        *(paged.q, paged.k_pages.nan_to_num(), paged.v_pages.nan_to_num(), paged.batch),
        torch.tensor([1, 3, 5]),
    )


def test_opcheck_and_compile() -> None:
    q, k, v, b, tree = small()
    lengths = (b.cu_seqlens_q, b.kv_lens, b.page_table, tree, 3, 9)
    opcheck(TREE_ATTENTION, q, k, v, *lengths, torch.zeros(4), 5.0, 0.3, None, None)
    compiled = torch.compile(tree_attention, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(q, k, v, b, tree), tree_attention(q, k, v, b, tree))


def test_refusals() -> None:
    q, k, v, b, tree = small()
    with pytest.raises(ValueError, match=r"tree has shape \[2\]; expected \[tokens\]"):
        tree_attention(q, k, v, b, tree[:2])
    with pytest.raises(ValueError, match=r"tree has dtype torch.int32; convert it to torch.int64"):
        tree_attention(q, k, v, b, tree.int())
    paged = fill(torch.Generator(), [(65, 70)], (1, 1), (8, 8), 4, torch.float32)
    with pytest.raises(ValueError, match="max_q_len is 65; a tree has at most 64 tokens"):
        tree_attention(paged.q, paged.k_pages, paged.v_pages, paged.batch, torch.zeros(65).long())
