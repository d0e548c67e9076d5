"""The Hopper attention kernel for few keys: in the simulator against float64, and its machine code."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rooftile.kernels.reference import attention as reference
from tests.support.gluon_sim import load_simulated, simulation

KERNEL, DENSE, CONFIG, SHORT = load_simulated(
    "rooftile.kernels.gluon.attention.forward",
    "rooftile.kernels.gluon.attention.dense",
    "rooftile.kernels.gluon.attention.config",
    "rooftile.kernels.gluon.attention.short.forward",
)
SHORTS = CONFIG.SHORT


def exact_of(q: Tensor, k: Tensor, v: Tensor, right: int, scale: float) -> tuple[Tensor, Tensor]:
    return reference.attention(q.double(), k.double(), v.double(), None, -1, right, 0.0, scale)


def check(
    q: Tensor, k: Tensor, v: Tensor, right: int, short: Any, seed: int, units: int = 1
) -> None:
    scale = q.shape[-1] ** -0.5
    out = torch.full_like(q, math.nan)
    lse = torch.full(q.shape[:-1], math.nan)
    with simulation(seed=seed, residency=1 + seed % 3):
        SHORT.bind_short(q, k, v, right, scale, short, units)(q, k, v, out, lse)
    exact, exact_lse = exact_of(q, k, v, right, scale)
    error = (out.double() - exact).abs().amax(-1)
    eps = torch.finfo(q.dtype).eps
    assert bool((error <= 1.5 * eps * (exact.abs().amax(-1) + 0.5)).all()), error.max()
    assert torch.equal(lse == -math.inf, exact_lse == -math.inf)
    seen = exact_lse > -math.inf
    assert torch.allclose(lse[seen].double(), exact_lse[seen], atol=2e-5, rtol=1e-5)


@settings(max_examples=40)
@given(
    short=st.sampled_from(SHORTS),
    batch=st.integers(1, 3),
    q_len=st.sampled_from([1, 63, 64, 65, 128, 130, 300]),
    kv_len=st.sampled_from([1, 7, 63, 64, 65, 100, 127, 128, 200, 256]),
    kv_heads=st.integers(1, 2),
    group=st.integers(1, 3),
    right=st.sampled_from([-1, 0, 0, 5, 1000]),
    dtype=st.sampled_from([torch.bfloat16, torch.float16]),
    seed=st.integers(0, 2**31),
)
def test_against_float64(
    short: Any,
    batch: int,
    q_len: int,
    kv_len: int,
    kv_heads: int,
    group: int,
    right: int,
    dtype: torch.dtype,
    seed: int,
) -> None:
    """Every row is written, whatever the lengths, also where it sees nothing."""
    kv_len = min(kv_len, short.keys)
    g = torch.Generator().manual_seed(seed)
    q = torch.randn(batch, q_len, kv_heads * group, short.dim, generator=g).to(dtype)
    k, v = (
        torch.randn(batch, kv_len, kv_heads, short.dim, generator=g).to(dtype) for _ in range(2)
    )
    check(q, k, v, right, short, seed)


@pytest.mark.parametrize("short", SHORTS, ids=str)
def test_nothing_is_read_beyond_the_sequence(short: Any) -> None:
    """Keys and values of a packed tensor whose neighbours are NaN."""
    g = torch.Generator().manual_seed(2)
    q = torch.randn(2, 100, 2, short.dim, generator=g).bfloat16()
    packed = torch.full((2, 100, 3, 2, short.dim), math.nan, dtype=torch.bfloat16)
    packed[:, :90, 1:] = torch.randn(2, 90, 2, 2, short.dim, generator=g).bfloat16()
    k, v = packed[:, :90, 1], packed[:, :90, 2]
    check(q, k, v, 0, short, 2)


@pytest.mark.parametrize("short", SHORTS, ids=str)
@pytest.mark.parametrize("units", [1, 3])
def test_every_tile_is_taken_once(short: Any, units: int) -> None:
    """A head's rows differ from those of all others, and come out where they belong."""
    g = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(3, 140, 5, short.dim, generator=g).bfloat16() for _ in range(3))
    check(q, k[:, :128], v[:, :128], 0, short, 3, units)


def test_which_calls_are_short() -> None:
    """Plain calls whose keys are one tile; the lengths are those of docs/performance.md."""
    for dim, plain in itertools.product((32, 64, 96, 128, 256), (False, True)):
        chosen = CONFIG.short_of(dim, dim, 128, plain, False)
        assert (chosen is not None) == (plain and dim in (64, 128))
    assert CONFIG.short_of(64, 32, 100, True, False) is None
    for dim, causal in itertools.product((64, 128), (False, True)):
        shorts = CONFIG.SHORT_CAUSAL if causal else SHORTS
        most = max(short.keys for short in shorts if short.dim == dim)
        assert CONFIG.short_of(dim, dim, most, True, causal).keys == most
        assert CONFIG.short_of(dim, dim, most + 1, True, causal) is None


@pytest.mark.parametrize("short", SHORTS, ids=str)
def test_an_lse_that_nobody_reads_is_not_written(short: Any) -> None:
    g = torch.Generator().manual_seed(5)
    q, k, v = (torch.randn(2, 100, 2, short.dim, generator=g).bfloat16() for _ in range(3))
    outs = [torch.full_like(q, math.nan) for _ in range(2)]
    lses = [torch.full(q.shape[:-1], math.nan) for _ in range(2)]
    with simulation(seed=5):
        for results in (1, 2):
            fill = SHORT.bind_short(q, k, v, 0, 0.125, short, 1, results)
            fill(q, k, v, outs[results - 1], lses[results - 1])
    assert torch.equal(*outs)
    assert bool(lses[0].isnan().all())
    assert not bool(lses[1].isnan().any())


@pytest.mark.parametrize("short", SHORTS, ids=str)
def test_the_operator_takes_it(short: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DENSE, "multiprocessors", lambda device: 2)
    monkeypatch.setattr(DENSE, "config_of", None)  # of the other kernel
    g = torch.Generator().manual_seed(4)
    length = short.keys - 58
    q, k, v = (torch.randn(2, length, 2, short.dim, generator=g).bfloat16() for _ in range(3))
    right = 0 if short in CONFIG.SHORT_CAUSAL else -1
    options = (None, -1, right, 0.0)
    with simulation(seed=4):
        out, _ = KERNEL.attention(q, k, v, *options, 0.125)
        turned, _ = KERNEL.attention(q, k, v, *options, -0.125)  # by way of new tensors
        shifted = torch.empty(q.numel() + 1, dtype=q.dtype)[1:].view_as(q).copy_(q)
        moved, _ = KERNEL.attention(shifted, k, v, *options, 0.125)
    assert torch.equal(moved, out)
    for got, scale in ((out, 0.125), (turned, -0.125)):
        exact, _ = exact_of(q, k, v, right, scale)
        assert (got.double() - exact).abs().max() < 0.02
