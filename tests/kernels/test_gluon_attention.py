"""The Hopper attention kernel in the simulator: host path and device source against float64.

What a simulator cannot check (layouts, swizzles, visibility) benchmarks/attention_gpu.py checks on
a GPU, over the same features.
"""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rooftile.kernels.reference import attention as reference
from rooftile.kernels.reference import attention_alibi as reference_alibi
from tests.support.gluon_sim import load_simulated, simulation

KERNEL, DENSE, RAGGED, CONFIG, ALIBI = load_simulated(
    "rooftile.kernels.gluon.attention.forward",
    "rooftile.kernels.gluon.attention.dense",
    "rooftile.kernels.gluon.attention.ragged",
    "rooftile.kernels.gluon.attention.config",
    "rooftile.kernels.gluon.attention_alibi",
)
WINDOWS = [(-1, -1), (-1, 0), (40, 0), (0, 0), (70, 10), (-1, 30), (20, -1)]


def set_multiprocessors(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    for kind in (DENSE, RAGGED):
        monkeypatch.setattr(kind, "multiprocessors", lambda device: number)


@pytest.fixture(autouse=True)
def three_multiprocessors(monkeypatch: pytest.MonkeyPatch) -> None:
    set_multiprocessors(monkeypatch, 3)


def assert_close(got: tuple[Tensor, Tensor], exact: tuple[Tensor, Tensor]) -> None:
    """Rows within three roundings of the dtype (weights, output); lse within float32 roundings."""
    out, lse = got
    assert out.shape == exact[0].shape
    assert lse.shape == exact[1].shape
    assert lse.dtype == torch.float32
    if out.numel():
        error = (out.double() - exact[0]).abs().amax(-1)
        eps = torch.finfo(out.dtype).eps
        assert bool((error <= 1.5 * eps * (exact[0].abs().amax(-1) + 0.5)).all()), error.max()
    assert torch.equal(lse == -math.inf, exact[1] == -math.inf)
    seen = exact[1] > -math.inf
    assert torch.allclose(lse[seen].double(), exact[1][seen], atol=2e-5, rtol=1e-5)


def wide(x: Any) -> Any:
    return x.double() if isinstance(x, Tensor) and x.is_floating_point() else x


def check_dense(
    q: Tensor, k: Tensor, v: Tensor, *options: Any, seed: int = 0, config: Any = None
) -> None:
    exact = reference.attention(*map(wide, (q, k, v, *options)))
    with simulation(seed=seed, residency=1 + seed % 3):
        got = KERNEL.attention(q, k, v, *options, config=config)
    assert_close(got, exact)


def normal(seed: int, dtype: torch.dtype, *shapes: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


@settings(max_examples=60)
@given(
    batch=st.integers(1, 2),
    q_len=st.sampled_from([1, 63, 64, 65, 130, 200, 400]),
    kv_len=st.sampled_from([1, 7, 64, 127, 128, 129, 300, 520]),
    kv_heads=st.integers(1, 2),
    group=st.integers(1, 3),
    dim=st.sampled_from([8, 40, 64, 96, 128, 256]),
    window=st.sampled_from(WINDOWS),
    softcap=st.sampled_from([0.0, 0.0, 15.0]),
    has_sink=st.booleans(),
    dtype=st.sampled_from([torch.bfloat16, torch.float16]),
    seed=st.integers(0, 2**31),
)
def test_dense(
    batch: int,
    q_len: int,
    kv_len: int,
    kv_heads: int,
    group: int,
    dim: int,
    window: tuple[int, int],
    softcap: float,
    has_sink: bool,
    dtype: torch.dtype,
    seed: int,
) -> None:
    heads = kv_heads * group
    q, k, v = normal(
        seed,
        dtype,
        (batch, q_len, heads, dim),
        (batch, kv_len, kv_heads, dim),
        (batch, kv_len, kv_heads, dim),
    )
    sink = torch.randn(heads) if has_sink else None
    check_dense(q, k, v, sink, *window, softcap, dim**-0.5, seed=seed)


@settings(max_examples=40)
@given(
    lengths=st.lists(
        st.tuples(st.sampled_from([0, 1, 5, 64, 129, 250]), st.sampled_from([0, 1, 60, 128, 300])),
        min_size=1,
        max_size=5,
    ),
    padding=st.sampled_from([0, 3, 140]),
    group=st.integers(1, 2),
    dim=st.sampled_from([64, 128, 256]),
    window=st.sampled_from(WINDOWS),
    has_sink=st.booleans(),
    dtype=st.sampled_from([torch.bfloat16, torch.float16]),
    seed=st.integers(0, 2**31),
)
def test_ragged_with_nan_in_the_padding(
    lengths: list[tuple[int, int]],
    padding: int,
    group: int,
    dim: int,
    window: tuple[int, int],
    has_sink: bool,
    dtype: torch.dtype,
    seed: int,
) -> None:
    q_lens, kv_lens = ([pair[i] for pair in lengths] for i in range(2))
    tokens_q, tokens_k = sum(q_lens), sum(kv_lens)
    q, k, v = normal(
        seed,
        dtype,
        (tokens_q + padding, 2 * group, dim),
        (tokens_k + padding, 2, dim),
        (tokens_k + padding, 2, dim),
    )
    cu_q, cu_k = (torch.tensor([0, *lens]).cumsum(0) for lens in (q_lens, kv_lens))
    sink = torch.randn(2 * group) if has_sink else None
    rest = (cu_q, cu_k, max(q_lens), max(kv_lens), sink, *window, 0.0, dim**-0.5)
    exact = reference.attention_varlen(*map(wide, (q, k, v, *rest)))
    q[tokens_q:] = k[tokens_k:] = v[tokens_k:] = math.nan
    with simulation(seed=seed, residency=1 + seed % 3):
        got = KERNEL.attention_varlen(q, k, v, *rest)
    assert_close(got, exact)


@pytest.mark.parametrize("seed", range(10))  # every policy of the scheduler, twice
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_any_order_of_events(dim: int, seed: int) -> None:
    q, k, v = normal(seed, torch.bfloat16, (1, 700, 2, dim), (1, 700, 1, dim), (1, 700, 1, dim))
    check_dense(q, k, v, None, -1, 0, 0.0, dim**-0.5, seed=seed, config=CONFIG.CONFIGS[dim])


def test_same_inputs_same_bits_whatever_the_order() -> None:
    q, k, v = normal(0, torch.bfloat16, (2, 300, 2, 64), (2, 300, 2, 64), (2, 300, 2, 64))
    results = []
    for seed in range(4):
        with simulation(seed=seed, residency=3):
            results.append(KERNEL.attention(q, k, v, None, -1, 0, 0.0, 0.125))
    for out, lse in results[1:]:
        assert torch.equal(out, results[0][0])
        assert torch.equal(lse, results[0][1])


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (70, 10)])
def test_linear_biases(dim: int, window: tuple[int, int]) -> None:
    q, k, v = normal(9, torch.bfloat16, (1, 200, 4, dim), (1, 330, 2, dim), (1, 330, 2, dim))
    slopes = torch.tensor([0.5, 0.01, 0.0, 2.0])
    options = (None, slopes, *window, 5.0, dim**-0.5)
    exact = reference_alibi.attention_alibi(*map(wide, (q, k, v, *options)))
    with simulation(seed=dim):
        got = ALIBI.attention_alibi(q, k, v, *options)
    assert_close(got, exact)
    cu_q, cu_k = torch.tensor([0, 70, 200]), torch.tensor([0, 230, 330])
    ragged = (q[0], k[0], v[0], cu_q, cu_k, 130, 230, *options)
    exact = reference_alibi.attention_varlen_alibi(*map(wide, ragged))
    with simulation(seed=dim):
        got = ALIBI.attention_varlen_alibi(*ragged)
    assert_close(got, exact)


@pytest.mark.parametrize("scale", [-0.2, 0.0, 3.0])
def test_any_scale(scale: float) -> None:
    q, k, v = normal(1, torch.float16, (1, 70, 2, 64), (1, 140, 2, 64), (1, 140, 2, 64))
    check_dense(q, k, v, None, -1, 0, 0.0, scale)


def test_strides_as_they_come() -> None:
    (qkv,) = normal(2, torch.bfloat16, (2, 150, 3, 2, 64))
    q, k, v = qkv.unbind(2)
    assert DENSE.addressable(q) is q
    check_dense(q, k, v, None, -1, 0, 0.0, 0.125)
    q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
    check_dense(q, k, v, None, -1, 0, 0.0, 0.125)
    (narrow,) = normal(3, torch.bfloat16, (1, 90, 2, 67))  # strides the copy engine cannot take
    q = narrow[..., 1:65]
    assert DENSE.addressable(q) is not q
    check_dense(q, q, q, None, -1, -1, 0.0, 0.125)
    (one,) = normal(4, torch.bfloat16, (1, 1, 1, 64))
    k = one.expand(1, 200, 1, 64)  # stride 0
    check_dense(one, k, k, None, -1, -1, 0.0, 0.125)


def test_extremes() -> None:
    q, k, v = normal(5, torch.bfloat16, (1, 130, 1, 64), (1, 300, 1, 64), (1, 300, 1, 64))
    check_dense(q * 30, k * 30, v, None, -1, 0, 0.0, 1.0)  # one key takes all the weight
    check_dense(q, k, v, torch.full((1,), 1e4), -1, 0, 0.0, 1.0)  # the sink does
    check_dense(q, k, v, torch.full((1,), -math.inf), 0, 0, 0.0, 1.0)
    climbing = k * torch.linspace(9, 1, 300)[None, :, None, None].to(k.dtype)
    check_dense(q, climbing, v, None, -1, -1, 0.0, 1.0)  # the maximum grows block by block


@pytest.mark.parametrize("shape", [(0, 5, 7), (1, 0, 7), (1, 5, 0)])
def test_empty(shape: tuple[int, int, int]) -> None:
    batch, q_len, kv_len = shape
    q, k, v = normal(
        6, torch.bfloat16, (batch, q_len, 2, 64), (batch, kv_len, 1, 64), (batch, kv_len, 1, 64)
    )
    for sink in (None, torch.tensor([0.5, -1.0])):
        check_dense(q, k, v, sink, -1, 0, 0.0, 0.125)


def test_ragged_without_any_key() -> None:
    q, k = normal(7, torch.bfloat16, (70, 2, 64), (0, 1, 64))
    cu_q, cu_k = torch.tensor([0, 40, 70]), torch.tensor([0, 0, 0])
    rest = (cu_q, cu_k, 40, 0, torch.tensor([0.5, 1.0]), -1, 0, 0.0, 0.125)
    exact = reference.attention_varlen(*map(wide, (q, k, k, *rest)))
    with simulation(seed=1):
        assert_close(KERNEL.attention_varlen(q, k, k, *rest), exact)


@pytest.mark.parametrize("variant", [{"lazy": False}, {"software_share": 1}, {"software_share": 2},
                                     {"turns": 1}, {"stages": 3}, {"dynamic": "always"},
                                     {"dynamic": "never"}, {"own_output": False},
                                     {"overlapped": False}, {"groups": 1, "turns": 1},
                                     {"sums_in_parts": True}])  # fmt: skip
def test_every_switch(variant: dict[str, Any]) -> None:
    from dataclasses import replace

    q, k, v = normal(8, torch.bfloat16, (1, 400, 2, 64), (1, 500, 1, 64), (1, 500, 1, 64))
    config = replace(CONFIG.CONFIGS[64], **variant)
    sink = torch.tensor([0.5, -3.0])
    check_dense(q, k, v, None, -1, 0, 0.0, 0.125, seed=3, config=config)
    check_dense(q, k, v, sink, -1, -1, 0.0, 0.125, seed=4, config=config)


def test_reasons_for_refusal() -> None:
    call = {"device": "cpu", "dtype": torch.bfloat16, "k_dim": 64, "v_dim": 64, "page_size": 0}
    reason = KERNEL.supports(SimpleNamespace(**call))
    assert reason == "it needs an NVIDIA GPU of compute capability 9.0, not a cpu"
