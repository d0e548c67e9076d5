"""The roofline against numbers worked out by hand, and machines against their data sheets."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rooftile.planning.hardware import B200, EPYC_2_CORES, H100, H200, Machine
from rooftile.planning.roofline import (
    Work,
    attention_work,
    least_time,
    linear_work,
    visible_pairs,
)


def test_machines_reach_their_data_sheets() -> None:
    assert H100.matrix_flops == pytest.approx(989.4e12, rel=0.001)
    assert H200.matrix_flops == pytest.approx(989.4e12, rel=0.001)
    assert B200.matrix_flops == pytest.approx(2.25e15, rel=0.005)
    assert EPYC_2_CORES.matrix_flops == pytest.approx(473.6e9)


def test_linear_by_hand() -> None:
    # 3 x 5 times 5 x 7: 105 multiply-adds; 15 + 35 + 21 elements of 2 bytes.
    assert linear_work(3, 5, 7) == Work(flops=210, bytes=142)
    assert linear_work(3, 5, 7, itemsize=4).bytes == 284


def test_attention_by_hand() -> None:
    # Two requests, 2 query heads on 1 KV head, k_dim 4, v_dim 3.
    # Causal pairs: q 2 of kv 3 sees 2 + 3 = 5; q 1 of kv 4 sees 4. Together 9 per head.
    work = attention_work([2, 1], [3, 4], num_q_heads=2, num_kv_heads=1, k_dim=4, v_dim=3)
    assert work.exps == 18
    assert work.flops == 2 * 18 * 7
    assert work.bytes == 2 * (3 * 2 * 7 + 7 * 1 * 7)
    full = attention_work(
        [2, 1], [3, 4], num_q_heads=2, num_kv_heads=1, k_dim=4, v_dim=3, causal=False
    )
    assert full.exps == 2 * (6 + 4)


@given(q=st.integers(0, 12), kv=st.integers(0, 12))
def test_visible_pairs_are_those_of_the_mask(q: int, kv: int) -> None:
    mask = [(i, j) for i in range(q) for j in range(kv) if j <= i + kv - q]
    assert visible_pairs(q, kv) == len(mask)


@pytest.mark.parametrize(
    ("work", "seconds", "unit"),
    [
        (Work(flops=800, bytes=10, exps=0), 2.0, "matrix"),
        (Work(flops=8, bytes=100, exps=0), 10.0, "memory"),
        (Work(flops=8, bytes=10, exps=120), 3.0, "exp"),
    ],
)
def test_the_slowest_unit_binds(work: Work, seconds: float, unit: str) -> None:
    machine = Machine("toy", 4, 10.0, 10, 1, 10.0)  # 400 FLOP/s, 40 exp/s, 10 B/s
    bound = least_time(work, machine)
    assert (bound.seconds, bound.unit) == (seconds, unit)


def test_decode_is_bound_by_memory_and_prefill_by_the_matrix_unit() -> None:
    shape = {"num_q_heads": 32, "num_kv_heads": 8, "k_dim": 128, "v_dim": 128}
    decode = least_time(attention_work([1] * 32, [4096] * 32, **shape), H200)
    # 32 x 4096 tokens x 8 heads x 256 elements x 2 bytes = 536.9 MB, over 4.8 TB/s.
    assert decode.unit == "memory"
    assert decode.seconds == pytest.approx(112e-6, rel=0.01)
    prefill = least_time(attention_work([16384], [16384], **shape), H200)
    assert prefill.unit == "matrix"
    # FlashAttention-4: at head dim 128 a B200 spends as many clocks on exponentials as on matmuls.
    forward = attention_work([16384], [16384], **shape)
    ratio = (forward.exps / B200.exps) / (forward.flops / B200.matrix_flops)
    assert ratio == pytest.approx(1.0)


def test_quantised_weights_by_hand() -> None:
    # 105 multiply-adds; 15 + 21 elements of 2 bytes, 35 of 0.625.
    work = linear_work(3, 5, 7, quantised_bytes=0.625)
    assert work == Work(flops=0, bytes=72 + 21.875, int8_flops=210)
    machine = Machine("toy", 1, 1.0, 10, 1, 1e9)
    assert least_time(work, machine).seconds == pytest.approx(210 / 20)
