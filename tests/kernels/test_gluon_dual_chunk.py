"""Dual chunk attention on Hopper, dense and over pages, in the simulator, against float64.

tests/ops/test_dual_chunk_gpu.py runs the same on a GPU, through the operators.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rooftile.kernels.chunk_requests import cut_at_chunks
from rooftile.kernels.reference import dual_chunk as reference
from rooftile.ops.dual_chunk import DualChunkCall
from rooftile.planning.split_kv import plan
from tests.kernels.test_gluon_attention import assert_close
from tests.kernels.test_gluon_paged import CONFIG, KERNEL, Batch
from tests.support.gluon_sim import load_simulated, simulation

DENSE = load_simulated("rooftile.kernels.gluon.dual_chunk.forward")
Lengths = Sequence[tuple[int, int]]  # query, keys


@pytest.fixture(autouse=True)
def three_multiprocessors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KERNEL, "_ctas", lambda device: 3)
    monkeypatch.setattr(DENSE, "multiprocessors", lambda device: 3)


def check(
    batch: Batch, chunk_len: int, softcap: float = 0.0, seed: int = 0, config: Any = None
) -> tuple[Tensor, Tensor]:
    """Each rotation of the queries is drawn by itself, so that none can stand in for another."""
    generator = torch.Generator().manual_seed(seed)
    tokens = sum(q for q, _ in batch.lengths)
    queries = [batch.q.clone() for _ in range(3)]
    for q in queries:
        q[:tokens] = torch.randn(q[:tokens].shape, generator=generator).to(q.dtype)
    pages = batch.k_pages, batch.v_pages
    lengths = batch.cu_seqlens_q, batch.kv_lens, batch.table
    wide = [x.double() for x in (*queries, *pages)]
    most = batch.max_q_len, batch.max_kv_len
    arguments: tuple[Any, ...] = (*wide, *lengths, *most, chunk_len, softcap, 0.125)
    exact = reference.paged_dual_chunk_attention(*arguments)
    pieces = cut_at_chunks(*lengths, batch.q.shape[0], chunk_len)
    starts, lens = pieces[0].tolist(), pieces[1].tolist()
    q_lens = [b - a for a, b in itertools.pairwise(starts)]
    spec = replace(batch.spec(-1, 0, config=config), batch=len(lens))
    words = torch.tensor(plan(spec, q_lens, lens).words(spec), dtype=torch.int32)
    with simulation(seed=seed, residency=1 + seed % 3):
        got: tuple[Tensor, Tensor] = KERNEL.paged_attention(
            *(torch.cat(queries), *pages, *pieces, batch.max_q_len, batch.max_kv_len),
            *(None, -1, 0, softcap, 0.125, None, None, False, words, spec.numbers),
            config=config,
            chunk_len=chunk_len,
        )
    assert_close(got, exact)
    return got


@settings(max_examples=25)
@given(
    lengths=st.lists(
        st.tuples(
            st.sampled_from([1, 1, 1, 0, 3, 8]),
            st.sampled_from([0, 1, 63, 64, 65, 127, 128, 129, 193, 256, 257, 400]),
        ),
        min_size=1,
        max_size=4,
    ),
    heads=st.sampled_from([(4, 1), (4, 2), (7, 1), (3, 3), (10, 2)]),
    dims=st.sampled_from([(64, 64), (128, 128), (96, 96), (256, 256)]),
    page_size=st.sampled_from([8, 16, 64, 128]),
    chunk_len=st.sampled_from([128, 256]),
    softcap=st.sampled_from([0.0, 0.0, 15.0]),
    padding=st.sampled_from([0, 0, 3]),
    seed=st.integers(0, 2**31),
)
def test_decode(
    lengths: Lengths, heads: tuple[int, int], dims: tuple[int, int], page_size: int,
    chunk_len: int, softcap: float, padding: int, seed: int,
) -> None:  # fmt: skip
    batch = Batch(lengths, heads, dims, page_size, padding=padding, seed=seed)
    rows = batch.max_q_len * heads[0] // heads[1]
    few = seed % 2 == 0 and rows <= 16
    config = CONFIG.config_of(*dims, rows, False) if few else None
    check(batch, chunk_len, softcap, seed, config)


@settings(max_examples=8)
@given(
    lengths=st.lists(
        st.tuples(st.sampled_from([1, 1, 30, 100]), st.sampled_from([1, 128, 129, 300])),
        min_size=1,
        max_size=3,
    ),
    heads=st.sampled_from([(4, 1), (5, 1)]),
    dim=st.sampled_from([64, 128, 256]),
    page_size=st.sampled_from([16, 128]),
    seed=st.integers(0, 2**31),
)
def test_prefill_and_decode_together(
    lengths: Lengths, heads: tuple[int, int], dim: int, page_size: int, seed: int
) -> None:
    batch = Batch([(190, 300), *lengths], heads, (dim, dim), page_size, seed=seed)
    check(batch, 128, seed=seed)


@pytest.mark.parametrize(
    ("q_len", "dim", "chunk_len"), [(12, 128, 128), (140, 96, 256), (140, 64, 128)]
)
def test_items_of_many_tiles(q_len: int, dim: int, chunk_len: int) -> None:
    """More of them than fit into the rings, which values once waited behind for what comes next."""
    batch = Batch([(q_len, 1000), (1, 700)], (8, 2), (dim, dim), 16, seed=q_len)
    check(batch, chunk_len, seed=q_len)


@pytest.mark.parametrize("seed", range(10))  # every policy of the scheduler, twice
def test_any_order_of_events(seed: int) -> None:
    batch = Batch([(1, 700), (2, 129), (1, 0), (1, 333)], (4, 1), (128, 128), 16, seed=seed)
    check(batch, 128, seed=seed)


def check_dense(
    lengths: tuple[int, int], heads: tuple[int, int], dims: tuple[int, int], chunk_len: int,
    softcap: float = 0.0, scale: float = 0.125, seed: int = 0,
    dtype: torch.dtype = torch.bfloat16, rises: tuple[int, ...] = (),
) -> None:  # fmt: skip
    """rises: keys whose scores are far above all others."""
    g = torch.Generator().manual_seed(seed)
    shapes = [(2, lengths[0], heads[0], dims[0])] * 3
    shapes += [(2, lengths[1], heads[1], dim) for dim in dims]
    tensors = [torch.randn(shape, generator=g).to(dtype) for shape in shapes]
    tensors[3][1, list(rises)] *= 100
    options = (chunk_len, softcap, scale)
    exact = reference.dual_chunk_attention(*(x.double() for x in tensors), *options)
    with pytest.MonkeyPatch.context() as patch, simulation(seed=seed, residency=1):
        if rises or seed % 2:  # anchored maxima, which are for long texts
            patch.setattr(DENSE, "ANCHORED_Q_LEN", 1)
        got = DENSE.dual_chunk_attention(*tensors, *options)
    assert_close(got, exact)


@settings(max_examples=25)
@given(
    q_len=st.sampled_from([1, 64, 127, 128, 129, 257, 400]),
    kv_len=st.sampled_from([1, 63, 127, 128, 129, 256, 257, 385, 500]),
    heads=st.sampled_from([(1, 1), (3, 3), (4, 2)]),
    dims=st.sampled_from([(64, 64), (128, 128), (96, 40), (256, 256)]),
    chunk_len=st.sampled_from([128, 256, 384]),
    softcap=st.sampled_from([0.0, 0.0, 15.0]),
    scale=st.sampled_from([0.125, 0.125, -0.2, 0.0]),
    dtype=st.sampled_from([torch.bfloat16, torch.float16]),
    seed=st.integers(0, 2**31),
)
def test_dense(
    q_len: int, kv_len: int, heads: tuple[int, int], dims: tuple[int, int], chunk_len: int,
    softcap: float, scale: float, dtype: torch.dtype, seed: int,
) -> None:  # fmt: skip
    check_dense((q_len, kv_len), heads, dims, chunk_len, softcap, scale, seed, dtype)


@pytest.mark.parametrize("seed", range(10))
def test_any_order_of_events_without_pages(seed: int) -> None:
    if seed % 2:
        check_dense((200, 300), (2, 1), (128, 128), 128, seed=seed)
    else:
        check_dense((100, 200), (2, 1), (256, 256), 64, seed=seed)


def test_reasons_for_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    call = DualChunkCall("cuda", torch.bfloat16, 4, 2, 128, 128, 1280, False)
    assert DENSE.supports(call) is None
    assert DENSE.supports(replace(call, chunk_len=100)) == (
        "chunks of 100 tokens are no whole blocks of 128 keys"
    )
    assert DENSE.supports(replace(call, k_dim=256, v_dim=256, chunk_len=64)) is None


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("rises", [(3,), (140,), (290,), (3, 290)])
def test_scores_that_rise_far_above_those_of_the_last_keys(
    rises: tuple[int, ...], dim: int
) -> None:
    """In the own chunk, the one before, and earlier: by more than 2^64."""
    check_dense((200, 400), (2, 1), (dim, dim), 128, rises=rises)
