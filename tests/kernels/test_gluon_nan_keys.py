"""Keys that are NaN where a query sees them, in the Hopper kernels: output and lse of the row are NaN both.

As tests/ops/test_nan_keys.py for the other kernels; in the simulator, whose maxima pass NaN over as the
hardware's do.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.kernels import test_gluon_attention as dense
from tests.kernels import test_gluon_attention_shares as shares
from tests.kernels import test_gluon_attention_short as short
from tests.kernels import test_gluon_differential as differential
from tests.kernels import test_gluon_dual_chunk as dual_chunk
from tests.kernels import test_gluon_paged as paged
from tests.ops.test_nan_keys import assert_nan
from tests.support.gluon_sim import simulation

CONFIG = dense.CONFIG
BFLOAT16 = torch.bfloat16
CONFIGS = {
    "64": CONFIG.CONFIGS[64],
    "64 drawn": CONFIG.DRAWN_64,
    "128": CONFIG.CONFIGS[128],
    "128 anchored": CONFIG.ANCHORED[128],
    "256": CONFIG.CONFIGS[256],
}


def seen_from(position: int, q_len: int, kv_len: int) -> torch.Tensor:
    """Which queries see a key, causally: [q_len, 1]."""
    return (torch.arange(q_len) + kv_len - q_len >= position)[:, None]


@pytest.mark.parametrize("place", [0, 150, 299])
@pytest.mark.parametrize("name", CONFIGS)
def test_dense(name: str, place: int, monkeypatch: pytest.MonkeyPatch) -> None:
    dense.set_multiprocessors(monkeypatch, 3)
    config = CONFIGS[name]
    dim = config.dim
    q, k, v = dense.normal(3, BFLOAT16, (1, 330, 2, dim), (1, 300, 1, dim), (1, 300, 1, dim))
    k[0, place, 0, 1] = math.nan
    with simulation():
        out, lse = dense.KERNEL.attention(q, k, v, None, -1, 0, 0.0, 0.1, config=config)
    assert_nan(out, lse, seen_from(place, 330, 300))
    assert bool((lse[:, :30] == -math.inf).all())  # they see nothing
    assert bool((out[:, :30] == 0).all())


@pytest.mark.parametrize("place", [0, 700, 1199])
@pytest.mark.parametrize("config", shares.CONFIGS[1:], ids=lambda c: f"{c.dim}-{c.tile_rows}")
def test_parts_of_tiles(config: Any, place: int, monkeypatch: pytest.MonkeyPatch) -> None:
    dense.set_multiprocessors(monkeypatch, 5)
    monkeypatch.setattr(CONFIG, "CUT_BELOW", math.inf)
    monkeypatch.setattr(dense.KERNEL, "_dense", {})
    dim = config.dim
    q, k, v = dense.normal(3, BFLOAT16, (1, 70, 2, dim), (1, 1200, 1, dim), (1, 1200, 1, dim))
    k[0, place, 0, 1] = math.nan
    assert shares.cut_tiles(q, k, v, config, -1, 0)
    with simulation():
        out, lse = dense.KERNEL.attention(q, k, v, None, -1, 0, 0.0, 0.1, config=config)
    assert_nan(out, lse, seen_from(place, 70, 1200))


@pytest.mark.parametrize("config", short.SHORTS, ids=str)
def test_few_keys(config: Any) -> None:
    dim = config.dim
    q, k, v = dense.normal(3, BFLOAT16, (1, 130, 2, dim), (1, 100, 1, dim), (1, 100, 1, dim))
    k[0, 50, 0, 1] = math.nan
    out, lse = torch.empty_like(q), torch.empty(q.shape[:-1])
    with simulation():
        short.SHORT.bind_short(q, k, v, 0, 0.1, config, 1)(q, k, v, out, lse)
    assert_nan(out, lse, seen_from(50, 130, 100))
    assert bool((lse[:, :30] == -math.inf).all())


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("anchored", [False, True])
@pytest.mark.parametrize("lengths", [[(1, 700), (1, 90)], [(150, 700), (1, 90)]])
@pytest.mark.parametrize("dim", [64, 128])
def test_pages(
    dim: int, lengths: paged.Lengths, anchored: bool, whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paged.KERNEL, "_ctas", lambda device: 3)
    if anchored:
        monkeypatch.setattr(paged.KERNEL, "anchored_from", lambda dim, right: 1)
    batch = paged.Batch(lengths, (4, 1), (dim, dim), 16)
    batch.k_pages[batch.table[0, 20], 0, 3, 1] = math.nan  # key 323 of the first request
    spec = replace(batch.spec(-1, 0), **({"whole": 1} if whole else {}))
    plan = batch.planned(spec), spec.numbers
    with simulation():
        out, lse = paged.KERNEL.paged_attention(
            *batch.arguments, None, -1, 0, 0.0, 0.1, None, None, False, *plan
        )
    (q_len, kv_len), (others, _) = lengths
    assert_nan(out[:q_len], lse[:q_len], seen_from(323, q_len, kv_len))
    assert lse[q_len:].shape[0] == others
    assert not bool(lse[q_len:].isnan().any())


@pytest.mark.parametrize("dim", [64, 128])
def test_dual_chunk(dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dual_chunk.DENSE, "multiprocessors", lambda device: 3)
    *queries, k, v = dense.normal(3, BFLOAT16, *[(1, 300, 2, dim)] * 3, *[(1, 300, 1, dim)] * 2)
    k[0, 140, 0, 1] = math.nan
    with simulation():
        out, lse = dual_chunk.DENSE.dual_chunk_attention(*queries, k, v, 128, 0.0, 0.1)
    assert_nan(out, lse, seen_from(140, 300, 300))


@pytest.mark.parametrize("which", [1, 2])
def test_differential(which: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(differential.KERNEL, "multiprocessors", lambda device: 3)
    q1, q2, k1, k2, v = dense.normal(
        *(3, BFLOAT16, *[(1, 150, 2, 64)] * 2, *[(1, 300, 1, 64)] * 2, (1, 300, 1, 128))
    )
    (k1 if which == 1 else k2)[0, 200, 0, 1] = math.nan
    with simulation(residency=1):
        out, *both = differential.KERNEL.differential_attention(
            *(q1, k1, q2, k2, v), torch.full((2,), 0.5), -1, 0, 0.125
        )
    assert_nan(out, both[which - 1], seen_from(200, 150, 300))
