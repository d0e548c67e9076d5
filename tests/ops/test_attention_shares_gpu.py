"""Calls of few tiles, which the Hopper kernel cuts along their keys, through the operators, on a GPU."""

from __future__ import annotations

import gc

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rooftile.ops.attention import _CHECKED, attention, attention_varlen
from tests.ops.test_attention_gpu import assert_close, random

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
DIMS = [(64, 64), (128, 128), (256, 256), (96, 96), (192, 128)]
LENGTHS = st.sampled_from(
    [(100, 5000), (257, 3000), (512, 4000), (1000, 1000), (1500, 1500), (1100, 2500), (2100, 1300)]
)
HEADS = st.sampled_from([(1, 1), (4, 4), (6, 2), (12, 3), (9, 9)])


def call(
    seed: int, lengths: tuple[int, int], heads: tuple[int, int], dims: tuple[int, int]
) -> list[Tensor]:
    g = torch.Generator("cuda").manual_seed(seed)
    (m, n), (q_heads, kv_heads), (k_dim, v_dim) = lengths, heads, dims
    shapes = (1, m, q_heads, k_dim), (1, n, kv_heads, k_dim), (1, n, kv_heads, v_dim)
    return [random(g, torch.bfloat16, *shape) for shape in shapes]


@pytest.mark.parametrize("dims", DIMS, ids=str)
@settings(max_examples=5, deadline=None)  # most draws compile kernels
@given(
    lengths=LENGTHS, heads=HEADS, causal=st.booleans(), left=st.sampled_from([None, None, 700]),
    softcap=st.sampled_from([0.0, 20.0]), has_sink=st.booleans(), ragged=st.booleans(),
    padding=st.sampled_from([0, 0, 3]), steep=st.sampled_from([1, 1, 80]),
    seed=st.integers(0, 2**32),
)  # fmt: skip
def test_against_float64(
    dims: tuple[int, int], lengths: tuple[int, int], heads: tuple[int, int], causal: bool,
    left: int | None, softcap: float, has_sink: bool, ragged: bool, padding: int, steep: int, seed: int,
) -> None:  # fmt: skip
    q, k, v = call(seed, lengths, heads, dims)
    if steep > 1:  # the last keys say little about the first
        k *= torch.linspace(steep, 1, lengths[1], device="cuda")[None, :, None, None].to(k.dtype)
    sink = torch.randn(heads[0], device="cuda") if has_sink else None
    window = None if left is None else (left, None)
    results = {}
    for name, kernel, tensors in (
        ("got", "gluon", (q, k, v)),
        ("again", "gluon", (q, k, v)),
        ("exact", "reference", (q.double(), k.double(), v.double())),
        ("plain", "reference", (q, k, v)),
    ):
        torch.full((1, *q.shape[1:3], dims[1]), torch.nan, dtype=q.dtype, device="cuda")
        if ragged:
            flat = [x[0] for x in tensors]
            cu = [torch.tensor([0, x - padding], device="cuda") for x in lengths]
            results[name] = attention_varlen(
                *flat, *cu, causal=causal, window=window, softcap=softcap, sink=sink,
                return_lse=True, kernel=kernel,
            )  # fmt: skip
        else:
            results[name] = attention(
                *tensors, causal=causal, window=window, softcap=softcap, sink=sink,
                return_lse=True, kernel=kernel,
            )  # fmt: skip
    assert_close(results["got"], results["exact"], results["plain"])
    assert all(torch.equal(a, b) for a, b in zip(results["got"], results["again"], strict=True))


@pytest.mark.parametrize("dims", DIMS[:3], ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_graphs_and_streams(dims: tuple[int, int], causal: bool) -> None:
    calls = [call(seed, (512, 6000), (4, 2), dims) for seed in range(4)]
    want = [attention(*tensors, causal=causal, kernel="gluon") for tensors in calls]
    assert torch.equal(want[0], attention(*calls[0], causal=causal, kernel="gluon"))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = [attention(*tensors, causal=causal, kernel="gluon") for tensors in calls]
    for _ in range(3):
        for out in got:
            out.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        assert all(map(torch.equal, got, want))
    streams = [torch.cuda.Stream() for _ in calls]
    for _ in range(5):
        for i, stream in enumerate(streams):
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                got[i] = attention(*calls[i], causal=causal, kernel="gluon")
        torch.cuda.synchronize()
        assert all(map(torch.equal, got, want))


def test_a_graph_keeps_what_is_forgotten_of_its_calls() -> None:
    from rooftile.kernels.gluon.attention import forward

    tensors = call(0, (512, 6000), (4, 2), (128, 128))
    want = attention(*tensors, kernel="gluon")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = attention(*tensors, kernel="gluon")
    forward._dense.clear()
    _CHECKED._found.clear()
    gc.collect()
    others = [
        torch.full((n,), 10**6, device="cuda", dtype=torch.int32) for n in range(64, 8192, 64)
    ]
    for _ in range(3):
        got.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(got, want)
    del others


def test_a_kind_that_is_first_called_while_a_graph_is_captured() -> None:
    tensors = call(0, (513, 6001), (4, 2), (128, 128))
    attention(*call(0, (513, 100), (4, 2), (128, 128)), kernel="gluon")  # compiles whole tiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = attention(*tensors, kernel="gluon")
    graph.replay()
    want = attention(*tensors, kernel="gluon")
    torch.cuda.synchronize()
    assert float((got.float() - want.float()).abs().max()) < 1e-2
