"""Differential attention's Hopper kernel in the simulator, dense and ragged, against float64.

tests/ops/test_differential_gpu.py runs the same features on a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rooftile.kernels.reference import differential as reference
from tests.support.gluon_sim import load_simulated, simulation

KERNEL = load_simulated("rooftile.kernels.gluon.differential.forward")
MASKS = [(-1, -1), (-1, 0), (-1, 0), (40, 0), (0, 0), (70, 10), (-1, 30), (20, -1)]
# Of a key and of values; whether both queries of a pair share their keys.
DIMS = [
    (64, 128, False), (32, 64, False), (128, 256, False), (40, 72, False), (128, 128, False),
    (64, 64, True), (128, 128, True), (192, 256, True),
]  # fmt: skip


@pytest.fixture(autouse=True)
def three_multiprocessors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KERNEL, "multiprocessors", lambda device: 3)


def draw(g: torch.Generator, dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(shape, generator=g).to(dtype)


def assert_close(got: Sequence[Tensor], exact: Sequence[Tensor], size: Tensor) -> None:
    """size: of the two outputs that are subtracted, [..., pairs]; both are rounded, and weights are."""
    eps = torch.finfo(got[0].dtype).eps
    error = (got[0].double() - exact[0]).abs().amax(-1)
    assert bool((error <= 2 * eps * (size + 0.05)).all()), (error / (eps * (size + 0.05))).max()
    for lse, wanted in zip(got[1:], exact[1:], strict=True):
        assert torch.equal(lse == -math.inf, wanted == -math.inf)
        assert torch.allclose(lse.double(), wanted, atol=1e-4, rtol=1e-5)


def size_of_both(exact: Any, lam: Tensor) -> Tensor:
    first = exact(torch.zeros_like(lam))[0]
    size: Tensor = first.abs().amax(-1) + (first - exact(torch.ones_like(lam))[0]).abs().amax(-1)
    return size


@settings(max_examples=25)
@given(
    q_len=st.sampled_from([1, 2, 63, 64, 65, 130, 200]),
    kv_len=st.sampled_from([1, 64, 65, 128, 129, 200, 300]),
    heads=st.sampled_from([(1, 1), (3, 3), (4, 2)]),
    dims=st.sampled_from(DIMS),
    mask=st.sampled_from(MASKS),
    of_tokens=st.booleans(),
    interleaved=st.booleans(),
    scale=st.sampled_from([0.125, 0.125, -0.2, 0.0]),
    dtype=st.sampled_from([torch.bfloat16, torch.float16]),
    seed=st.integers(0, 2**31),
)
def test_dense(
    q_len: int,
    kv_len: int,
    heads: tuple[int, int],
    dims: tuple[int, int, bool],
    mask: tuple[int, int],
    of_tokens: bool,
    interleaved: bool,
    scale: float,
    dtype: torch.dtype,
    seed: int,
) -> None:
    g = torch.Generator().manual_seed(seed)
    k_dim, v_dim, shared = dims

    def pair(length: int, heads: int) -> tuple[Tensor, ...]:
        both = draw(g, dtype, 2, length, 2 * heads, k_dim)
        return (both[:, :, 0::2], both[:, :, 1::2]) if interleaved else both.chunk(2, 2)

    (q1, q2), (k1, k2) = pair(q_len, heads[0]), pair(kv_len, heads[1])
    tensors = (q1, k1, q2, None if shared else k2, draw(g, dtype, 2, kv_len, heads[1], v_dim))
    lam = torch.rand((2, q_len, heads[0]) if of_tokens else heads[:1], generator=g)

    def exact(lam: Tensor) -> Any:
        wide = [None if x is None else x.double() for x in tensors]
        return reference.differential_attention(*wide, lam.double(), *mask, scale)

    with simulation(seed=seed, residency=1):
        got = KERNEL.differential_attention(*tensors, lam, *mask, scale)
    assert_close(got, exact(lam), size_of_both(exact, lam))


@settings(max_examples=12)
@given(
    lengths=st.lists(
        st.tuples(st.sampled_from([0, 1, 64, 65, 100]), st.sampled_from([0, 1, 64, 130, 200])),
        min_size=1,
        max_size=4,
    ),
    padding=st.sampled_from([0, 0, 3, 70]),
    dims=st.sampled_from(DIMS),
    mask=st.sampled_from(MASKS),
    seed=st.integers(0, 2**31),
)
def test_ragged(
    lengths: list[tuple[int, int]],
    padding: int,
    dims: tuple[int, int, bool],
    mask: tuple[int, int],
    seed: int,
) -> None:
    g = torch.Generator().manual_seed(seed)
    k_dim, v_dim, shared = dims
    q_lens, kv_lens = ([pair[i] for pair in lengths] for i in range(2))
    tokens, keys = sum(q_lens) + padding, sum(kv_lens)
    q1, q2 = (draw(g, torch.bfloat16, tokens, 4, k_dim) for _ in range(2))
    k1, k2 = (draw(g, torch.bfloat16, keys, 2, k_dim) for _ in range(2))
    tensors = (q1, k1, q2, None if shared else k2, draw(g, torch.bfloat16, keys, 2, v_dim))
    lam = torch.rand(tokens, 4, generator=g)
    cu = [torch.tensor([0, *lens]).cumsum(0).int() for lens in (q_lens, kv_lens)]
    rest = (*cu, max(q_lens), max(kv_lens), *mask, 0.125)

    def exact(lam: Tensor) -> Any:
        wide = [None if x is None else x.double() for x in tensors]
        return reference.differential_attention_varlen(*wide, lam.double(), *rest)

    wanted, size = exact(lam), size_of_both(exact, lam)
    for x in (q1, q2, lam):
        x[sum(q_lens) :] = math.nan
    with simulation(seed=seed, residency=1):
        got = KERNEL.differential_attention_varlen(*tensors, lam, *rest)
    assert_close(got, wanted, size)
    assert bool((got[0][sum(q_lens) :] == 0).all())


@pytest.mark.parametrize("which", [(1,), (2,), (1, 2)])
@pytest.mark.parametrize("ragged", [False, True])
def test_scores_that_rise_far_above_those_of_the_last_keys(
    which: tuple[int, ...], ragged: bool
) -> None:
    """By more than 2^64: weights under the maximum of a tile's first blocks would overflow."""
    g = torch.Generator().manual_seed(0)
    q1, q2 = (draw(g, torch.bfloat16, 2, 150, 4, 64) for _ in range(2))
    k1, k2 = (draw(g, torch.bfloat16, 2, 300, 2, 64) for _ in range(2))
    for number, k in ((1, k1), (2, k2)):
        if number in which:
            k[1, 3:9] *= 100
    v, lam = draw(g, torch.bfloat16, 2, 300, 2, 128), torch.rand(4, generator=g)
    tensors = (q1, k1, q2, k2, v)

    def exact(lam: Tensor) -> Any:
        wide = [x.double() for x in tensors]
        return reference.differential_attention(*wide, lam.double(), -1, 0, 0.125)

    with simulation(residency=1):
        if ragged:
            cu = [torch.tensor([0, n, 2 * n], dtype=torch.int32) for n in (150, 300)]
            flat = [x.flatten(0, 1) for x in tensors]
            got = KERNEL.differential_attention_varlen(*flat, lam, *cu, 150, 300, -1, 0, 0.125)
            got = [x.unflatten(0, (2, 150)) for x in got]
        else:
            got = KERNEL.differential_attention(*tensors, lam, -1, 0, 0.125)
    assert_close(got, exact(lam), size_of_both(exact, lam))


@pytest.mark.parametrize("seed", range(10))  # every policy of the scheduler, twice
def test_any_order_of_events(seed: int) -> None:
    g = torch.Generator().manual_seed(0)
    q1, q2 = (draw(g, torch.bfloat16, 1, 200, 4, 64) for _ in range(2))
    k1, k2 = (draw(g, torch.bfloat16, 1, 400, 2, 64) for _ in range(2))
    v, lam = draw(g, torch.bfloat16, 1, 400, 2, 128), torch.rand(4, generator=g)
    expected = reference.differential_attention(
        *(x.double() for x in (q1, k1, q2, k2, v, lam)), -1, 0, 0.125
    )
    with simulation(seed=seed, residency=1):
        got = KERNEL.differential_attention(q1, k1, q2, k2, v, lam, -1, 0, 0.125)
    assert_close(got, expected, expected[0].abs().amax(-1) + 1)


def test_reasons_for_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    call = {"device": "cuda", "dtype": torch.bfloat16, "k_dim": 64, "v_dim": 128}
    call |= {"shared_keys": False}
    assert KERNEL.supports(SimpleNamespace(**call)) is None
    assert KERNEL.supports(SimpleNamespace(**{**call, "k_dim": 256, "shared_keys": True})) is None
    for change, reason in (
        ({"k_dim": 136}, "k_dim is 136; it takes multiples of 8 up to 128"),
        ({"v_dim": 264}, "v_dim is 264; it takes multiples of 8 up to 256"),
        ({"k_dim": 36}, "k_dim is 36; it takes multiples of 8 up to 128"),
        ({"dtype": torch.float32}, "it takes bfloat16 and float16, not torch.float32"),
    ):
        assert KERNEL.supports(SimpleNamespace(**{**call, **change})) == reason
