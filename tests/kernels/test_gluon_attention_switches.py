"""Switches of the Hopper attention kernel in the simulator, against float64."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rooftile import mask_mod, score_mod
from rooftile.kernels.reference import attention as reference
from rooftile.kernels.reference import attention_mods as reference_mods
from tests.kernels.test_gluon_attention import (
    CONFIG,
    KERNEL,
    WINDOWS,
    assert_close,
    check_dense,
    normal,
    three_multiprocessors,
    wide,
)
from tests.support.gluon_sim import load_simulated, simulation

assert three_multiprocessors  # a fixture, for every test of this file
MODS = load_simulated("rooftile.kernels.gluon.attention.mods")
ANCHORED = [
    replace(config, anchored=True)
    for config in (
        CONFIG.SHORT_64,
        CONFIG.CONFIGS[64],
        CONFIG.CONFIGS[128],
        CONFIG.SHORT_128,
        CONFIG.CONFIGS[256],
    )
]


def rising(seed: int, heads: int, lengths: tuple[int, int], dim: int, steep: float) -> list[Tensor]:
    """Keys whose scores grow from the last to the first, which is visited last."""
    m, n = lengths
    q, k, v = normal(seed, torch.bfloat16, (1, m, heads, dim), (1, n, 1, dim), (1, n, 1, dim))
    return [q, k * torch.linspace(steep, 1, n)[:, None, None].to(k.dtype), v]


@settings(max_examples=40)
@given(
    config=st.sampled_from(ANCHORED),
    lengths=st.sampled_from([(1, 64), (65, 128), (130, 129), (300, 300), (200, 420)]),
    steep=st.sampled_from([1.0, 4.0, 30.0, 200.0]),
    window=st.sampled_from(WINDOWS),
    has_sink=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_an_anchored_maximum_bears_any_scores(
    config: Any, lengths: tuple[int, int], steep: float, window: tuple[int, int], has_sink: bool,
    seed: int,
) -> None:  # fmt: skip
    q, k, v = rising(seed, 2, lengths, config.dim, steep)
    sink = torch.randn(2) if has_sink else None
    check_dense(q, k, v, sink, *window, 0.0, config.dim**-0.5, seed=seed, config=config)


@settings(max_examples=25)
@given(
    config=st.sampled_from(
        [
            CONFIG.CONFIGS[128],
            CONFIG.SHORT_128,
            CONFIG.ANCHORED[128],
            CONFIG.DRAWN_64,
            replace(CONFIG.SHORT_128, anchored=True, sums_in_parts=True),
        ]
    ),
    lengths=st.sampled_from([(1, 64), (65, 128), (256, 256), (300, 300), (200, 420), (520, 250)]),
    heads=st.integers(1, 3),
    window=st.sampled_from(WINDOWS),
    dynamic=st.sampled_from(["always", "never"]),
    by_threads=st.booleans(),
    steep=st.sampled_from([1.0, 60.0]),
    seed=st.integers(0, 2**31),
)
def test_consumers_that_know_their_next_tile_early_or_release_by_threads(
    config: Any, lengths: tuple[int, int], heads: int, window: tuple[int, int], dynamic: str,
    by_threads: bool, steep: float, seed: int,
) -> None:  # fmt: skip
    config = replace(config, reads_ahead=config.overlapped, by_threads=by_threads, dynamic=dynamic)
    q, k, v = rising(seed, heads, lengths, config.dim, steep)
    check_dense(q, k, v, None, *window, 0.0, config.dim**-0.5, seed=seed, config=config)


@settings(max_examples=25)
@given(
    config=st.sampled_from(
        [CONFIG.CAUSAL_64, CONFIG.DRAWN_64, CONFIG.PLAIN_128, CONFIG.SHORT_128, CONFIG.DRAWN_128]
    ),
    lengths=st.sampled_from([(1, 1), (65, 128), (256, 256), (300, 300), (200, 420), (520, 250)]),
    batch=st.integers(1, 2),
    heads=st.sampled_from([(1, 1), (3, 1), (2, 2), (6, 3)]),
    window=st.sampled_from(WINDOWS),
    seed=st.integers(0, 2**31),
)
def test_a_first_tile_that_is_loaded_before_there_are_roles(
    config: Any, lengths: tuple[int, int], batch: int, heads: tuple[int, int],
    window: tuple[int, int], seed: int,
) -> None:  # fmt: skip
    (m, n), (q_heads, kv_heads), dim = lengths, heads, config.dim
    assert config.loads_early
    shapes = ((batch, m, q_heads, dim), *((batch, n, kv_heads, dim),) * 2)
    q, k, v = normal(seed, torch.bfloat16, *shapes)
    check_dense(q, k, v, None, *window, 0.0, dim**-0.5, seed=seed, config=config)


def test_queries_that_wait_for_an_output_are_not_loaded_early() -> None:
    with pytest.raises(ValueError, match="output tile of its own"):
        replace(CONFIG.CONFIGS[256], loads_early=True)


@pytest.mark.parametrize("right", [-1, 0])
@pytest.mark.parametrize("length", [128, 256, 512, 1024, 2048, 8192])
def test_float16_takes_running_maxima(length: int, right: int) -> None:
    """Its weights end at 2^16. Tiles of 64 keys at head dim 128 pay without such maxima only."""
    for dim in (64, 128, 256):
        usual = CONFIG.config_of(dim, dim, length, right)
        assert not usual.of_few_bits().anchored
        assert usual.anchored or usual.of_few_bits() == usual
    config = CONFIG.config_of(128, 128, 512, right)
    assert (config.block, config.of_few_bits().block) == (64, 128)


@pytest.mark.parametrize("config", ANCHORED[1:3], ids=lambda c: str(c.dim))
def test_second_passes_in_a_ragged_batch_and_in_float16(config: Any) -> None:
    q, k, v = (x[0] for x in rising(0, 2, (430, 500), config.dim, 60.0))
    cu_q, cu_k = torch.tensor([0, 100, 100, 400]), torch.tensor([0, 300, 310, 480])
    options = (cu_q, cu_k, 300, 300, None, -1, -1, 0.0, config.dim**-0.5)
    exact = reference.attention_varlen(*map(wide, (q, k, v, *options)))
    q[400:] = k[480:] = v[480:] = math.nan
    with simulation(seed=1):
        assert_close(KERNEL.attention_varlen(q, k, v, *options, config), exact)
    half = [x[:1].half() for x in (q[None], k[None] / 60, v[None])]
    half = [x[:, :400] for x in half]
    check_dense(*half, None, -1, 0, 0.0, 1.0, config=config)


@settings(max_examples=25)
@given(
    dims=st.sampled_from([(96, 96), (192, 192), (192, 128), (72, 32), (32, 32), (160, 256)]),
    lengths=st.sampled_from([(1, 70), (130, 200), (200, 129)]),
    window=st.sampled_from(WINDOWS),
    ragged=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_head_dims_between_powers_of_two(
    dims: tuple[int, int],
    lengths: tuple[int, int],
    window: tuple[int, int],
    ragged: bool,
    seed: int,
) -> None:
    (k_dim, v_dim), (m, n) = dims, lengths
    q, k, v = normal(seed, torch.bfloat16, (1, m, 2, k_dim), (1, n, 1, k_dim), (1, n, 1, v_dim))
    if not ragged:
        check_dense(q, k, v, None, *window, 0.0, k_dim**-0.5, seed=seed)
        return
    cu = [torch.tensor([0, x // 3, x]) for x in (m, n)]
    options = (*cu, m, n, None, *window, 0.0, k_dim**-0.5)
    exact = reference.attention_varlen(*map(wide, (q[0], k[0], v[0], *options)))
    with simulation(seed=seed):
        assert_close(KERNEL.attention_varlen(q[0], k[0], v[0], *options), exact)


@pytest.mark.parametrize(("dim", "batch"), [(128, 1), (128, 127), (128, 128), (64, 63), (64, 64)])
def test_batches_of_few_and_many_sequences(dim: int, batch: int) -> None:
    generator = torch.Generator().manual_seed(batch)
    lengths = torch.randint(0, 9, (2, batch), generator=generator)
    lengths[:, batch // 2] = 150
    cu_q, cu_k = (torch.cat([torch.zeros(1), x]).cumsum(0).int() for x in lengths)
    tokens_q, tokens_k = int(cu_q[-1]), int(cu_k[-1])
    q, k, v = normal(
        batch,
        torch.bfloat16,
        (tokens_q + 3, 2, 128),
        (tokens_k + 3, 1, 128),
        (tokens_k + 3, 1, 128),
    )
    options = (cu_q, cu_k, 150, 150, None, -1, 0, 0.0, 0.1)
    exact = reference.attention_varlen(*map(wide, (q, k, v, *options)))
    q[tokens_q:] = k[tokens_k:] = v[tokens_k:] = math.nan
    with simulation(seed=batch):
        assert_close(KERNEL.attention_varlen(q, k, v, *options), exact)


def nearer(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return s * 0.5 - 0.01 * (h + 1) * (i - j).abs() + 0.1 * b


def stripes(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return ((i + j + h + b) % 5 != 0) | (i == j)


NEARER, STRIPES = score_mod(None, reference=nearer), mask_mod(None, reference=stripes)


@settings(max_examples=20)
@given(
    which=st.sampled_from(["score", "mask", "both"]),
    dim=st.sampled_from([64, 96, 128, 256]),
    lengths=st.sampled_from([(1, 70), (130, 200), (200, 129)]),
    window=st.sampled_from(WINDOWS),
    softcap=st.sampled_from([0.0, 15.0]),
    ragged=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_functions_of_the_caller(
    which: str, dim: int, lengths: tuple[int, int], window: tuple[int, int], softcap: float,
    ragged: bool, seed: int,
) -> None:  # fmt: skip
    m, n = lengths
    q, k, v = normal(seed, torch.bfloat16, (2, m, 2, dim), (2, n, 1, dim), (2, n, 1, dim))
    mods = MODS.Mods(nearer if which != "mask" else None, stripes if which != "score" else None)
    keys = (
        NEARER.key if which != "mask" else "",
        [],
        STRIPES.key if which != "score" else "",
        [],
    )
    options = (torch.tensor([0.5, -1.0]), *window, softcap, dim**-0.5)
    if ragged:
        q, k, v = (x.flatten(0, 1) for x in (q, k, v))
        cu = [torch.tensor([0, x // 3, 2 * x]) for x in (m, n)]
        rest = (*cu, 2 * m, 2 * n, *options)
        exact = reference_mods.attention_varlen_mods(*map(wide, (q, k, v, *rest)), *keys)
        with simulation(seed=seed):
            got = KERNEL.attention_varlen(q, k, v, *rest, None, None, mods)
    else:
        exact = reference_mods.attention_mods(*map(wide, (q, k, v, *options)), *keys)
        with simulation(seed=seed):
            got = KERNEL.attention(q, k, v, *options, None, None, mods)
    assert_close(got, exact)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_cumulative_lengths_with_a_stride(dtype: torch.dtype) -> None:
    q, k, v = normal(3, torch.bfloat16, (300, 2, 128), (400, 1, 128), (400, 1, 128))
    cu = torch.tensor([[0, 0], [70, 7], [300, 400]], dtype=dtype)
    options = (300, 400, None, -1, 0, 0.0, 0.1)
    exact = reference.attention_varlen(*map(wide, (q, k, v, cu[:, 0], cu[:, 1], *options)))
    for columns in (cu, cu.T.contiguous().T):  # the second is known by the same shapes
        with simulation(seed=4):
            got = KERNEL.attention_varlen(q, k, v, columns[:, 0], columns[:, 1], *options)
        assert_close(got, exact)
