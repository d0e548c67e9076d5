"""Tiles cut along their keys by the Hopper attention kernel in the simulator, against float64."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rooftile.kernels.reference import attention as reference
from rooftile.planning.key_shares import Costs, share_out
from tests.kernels.test_gluon_attention import (
    CONFIG,
    KERNEL,
    WINDOWS,
    assert_close,
    normal,
    set_multiprocessors,
    wide,
)
from tests.kernels.test_gluon_attention_switches import rising
from tests.support.gluon_sim import load_simulated, simulation

CONFIGS = [
    None,
    CONFIG.CONFIGS[64],
    CONFIG.DRAWN_64,
    replace(CONFIG.CONFIGS[64], anchored=True),
    replace(CONFIG.CONFIGS[128], anchored=True),
]
CONSUMER, CUT = load_simulated(
    "rooftile.kernels.gluon.attention.consumer", "rooftile.kernels.gluon.attention.cut"
)
CHEAP = Costs(block=10, item=1, part=1, join=0, fewest=1)


@pytest.fixture(autouse=True)
def every_call_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    set_multiprocessors(monkeypatch, 5)
    monkeypatch.setattr(CONFIG, "CUT_BELOW", math.inf)
    monkeypatch.setattr(CONFIG, "share_out", lambda *call: share_out(*call[:3], CHEAP))
    monkeypatch.setattr(KERNEL, "_dense", {})
    monkeypatch.setattr(KERNEL, "_ragged", {})


def cut_tiles(q: Any, k: Any, v: Any, config: Any, left: int, right: int) -> int:
    """How many parts there are of tiles that a call cuts."""
    dim = max(q.shape[3], v.shape[3])
    config = config or CONFIG.config_of(dim, dim, q.shape[1], right)
    heads, places = q.shape[0] * q.shape[2], 5 * config.ctas
    device = torch.device("cpu")
    lengths = q.shape[1], k.shape[1]
    cut = CUT.cut_of(config, device, heads, *lengths, left, right, places, right >= 0, 0)
    return int(cut.new_parts().shape[0])


@settings(max_examples=24)
@given(
    config=st.sampled_from(CONFIGS),
    dims=st.sampled_from([(128, 128), (96, 96), (256, 256), (192, 128), (40, 72)]),
    batch=st.integers(1, 2),
    lengths=st.sampled_from([(1, 300), (64, 520), (65, 129), (200, 420), (330, 300), (130, 700)]),
    group=st.integers(1, 2),
    window=st.sampled_from(WINDOWS),
    softcap=st.sampled_from([0.0, 0.0, 15.0]),
    has_sink=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_parts_of_tiles(
    config: Any, dims: tuple[int, int], batch: int, lengths: tuple[int, int], group: int,
    window: tuple[int, int], softcap: float, has_sink: bool, seed: int,
) -> None:  # fmt: skip
    k_dim, v_dim = dims if config is None else (config.dim, config.dim)
    (m, n), heads = lengths, 2 * group
    q, k, v = normal(
        seed, torch.bfloat16, (batch, m, heads, k_dim), (batch, n, 2, k_dim), (batch, n, 2, v_dim)
    )
    options = (torch.randn(heads) if has_sink else None, *window, softcap, k_dim**-0.5)
    exact = reference.attention(*map(wide, (q, k, v, *options)))
    with simulation(seed=seed, residency=1 + seed % 5):
        got = KERNEL.attention(q, k, v, *options, config=config)
    assert_close(got, exact)
    with simulation(seed=seed + 1, residency=5 - seed % 5):
        again = KERNEL.attention(q, k, v, *options, config=config)
    # Whoever comes last joins the parts in the same order.
    assert torch.equal(again[0], got[0])
    assert torch.equal(again[1], got[1])


def test_these_calls_are_cut() -> None:
    q, k, v = normal(0, torch.bfloat16, (1, 130, 2, 128), (1, 700, 2, 128), (1, 700, 2, 128))
    assert cut_tiles(q, k, v, None, -1, -1) >= 8
    assert cut_tiles(q, k, v, None, -1, 0) >= 8


@settings(max_examples=16)
@given(
    config=st.sampled_from(CONFIGS),
    lengths=st.sampled_from([(64, 520), (200, 420), (330, 300), (130, 700)]),
    padding=st.sampled_from([(0, 0), (0, 0), (1, 0), (0, 1), (70, 9), (0, 300)]),
    group=st.integers(1, 2),
    window=st.sampled_from(WINDOWS),
    has_sink=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_one_sequence_of_a_ragged_batch(
    config: Any, lengths: tuple[int, int], padding: tuple[int, int], group: int,
    window: tuple[int, int], has_sink: bool, seed: int,
) -> None:  # fmt: skip
    """With padding behind it, which the host cannot see, its tiles are whole."""
    dim, heads = config.dim if config else 128, 2 * group
    (m, n), (q_len, kv_len) = lengths, (x - y for x, y in zip(lengths, padding, strict=True))
    q, k, v = normal(seed, torch.bfloat16, (m, heads, dim), (n, 2, dim), (n, 2, dim))
    cu = [torch.tensor([0, max(x, 0)]) for x in (q_len, kv_len)]
    sink = torch.randn(heads) if has_sink else None
    options = (*cu, m, n, sink, *window, 0.0, dim**-0.5)
    exact = reference.attention_varlen(*map(wide, (q, k, v, *options)))
    q[max(q_len, 0) :] = k[kv_len:] = v[kv_len:] = math.nan
    with simulation(seed=seed, residency=1 + seed % 5):
        got = KERNEL.attention_varlen(q, k, v, *options, config)
    assert_close(got, exact)


@settings(max_examples=12)
@given(
    config=st.sampled_from(CONFIGS[2:]),
    lengths=st.sampled_from([(65, 520), (130, 420), (300, 300)]),
    steep=st.sampled_from([1.0, 4.0, 60.0, 200.0]),
    window=st.sampled_from(WINDOWS),
    has_sink=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_second_passes_keep_to_their_part(
    config: Any, lengths: tuple[int, int], steep: float, window: tuple[int, int], has_sink: bool,
    seed: int,
) -> None:  # fmt: skip
    q, k, v = rising(seed, 2, lengths, config.dim, steep)
    options = (torch.randn(2) if has_sink else None, *window, 0.0, config.dim**-0.5)
    exact = reference.attention(*map(wide, (q, k, v, *options)))
    with simulation(seed=seed):
        assert_close(KERNEL.attention(q, k, v, *options, config=config), exact)


@pytest.mark.parametrize("right", [-1, 0])
@pytest.mark.parametrize("config", CONFIGS[2:], ids=lambda c: f"{c.dim}-{c.tile_rows}")
def test_ordinary_parts_need_no_second_pass(
    config: Any, right: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("a second pass")

    monkeypatch.setattr(CONSUMER, "attend_again", refuse)
    q, k, v = normal(
        5, torch.bfloat16, (1, 200, 2, config.dim), (1, 700, 1, config.dim), (1, 700, 1, config.dim)
    )
    with simulation(seed=1):
        KERNEL.attention(q, k, v, None, -1, right, 0.0, config.dim**-0.5, config=config)


def test_whole_waves_are_not_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()

    def cut(heads: int, q_len: int, kv_len: int, right: int, places: int = 132) -> Any:
        config, device = CONFIG.CONFIGS[128], torch.device("cpu")
        kv_bytes = 2 * kv_len * 256 * heads
        return CUT.cut_of(
            config, device, heads, q_len, kv_len, -1, right, places, right >= 0, kv_bytes
        )

    assert cut(8, 2048, 2048, -1, 128) is None
    assert cut(10, 1792, 8192, -1) is not None  # 140 tiles
    assert cut(8, 4096, 16384, 0) is None
    assert cut(4, 4096, 4096, 0) is not None
    assert cut(6, 2048, 20000, -1) is None  # 96 tiles, more keys than the L2 cache holds
    assert cut(6, 2048, 8192, -1) is not None
