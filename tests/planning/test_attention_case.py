"""Names of cases: normal forms, lengths, and refusals that say what was not understood."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rooftile.planning.attention_case import attention_case


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("b1 s16384 h16/16 d128 causal", "b1 s16384 h16/16 d128 causal"),
        ("causal d64 h8 s7 b2", "b2 s7 h8/8 d64 causal"),
        ("b2 s7/9 h8/2 d192/128", "b2 s7/9 h8/2 d192/128 full"),
        ("b2 s7/7 h8/2 d64/64 full", "b2 s7 h8/2 d64 full"),
        ("b64 s16..8192 h16/16 d128 full", "b64 s16..8192 h16/16 d128 full"),
        ("b64 s16..8192 h16 d128 varlen", "b64 s16..8192 h16/16 d128 full"),
        ("varlen b4 s4096 h8 d64 causal", "b4 s4096 h8/8 d64 causal varlen"),
        ("b02 s007/0009 h08 d064", "b2 s7/9 h8/8 d64 full"),
    ],
)
def test_names_have_one_normal_form(text: str, name: str) -> None:
    case = attention_case(text)
    assert case.name == name
    assert attention_case(name) == case


def test_fields_by_hand() -> None:
    case = attention_case("b2 s7/9 h8/2 d192/128 causal")
    assert (case.batch, case.q_lens, case.kv_lens) == (2, (7, 7), (9, 9))
    assert (case.num_q_heads, case.num_kv_heads, case.k_dim, case.v_dim) == (8, 2, 192, 128)
    assert case.causal
    assert not case.ragged
    # Row i of 7 sees i + 3 of 9 keys: 3 + ... + 9 = 42 pairs a head and sequence.
    assert case.work().exps == 2 * 8 * 42
    assert case.work().flops == 2 * 2 * 8 * 42 * 320


@given(low=st.integers(1, 100), more=st.integers(0, 5000), batch=st.integers(1, 50))
def test_drawn_lengths_stay_between_their_bounds(low: int, more: int, batch: int) -> None:
    case = attention_case(f"b{batch} s{low}..{low + more} h1 d8")
    assert case.ragged
    assert len(case.q_lens) == batch
    assert all(low <= n <= low + more for n in case.q_lens)
    assert case.q_lens == case.kv_lens


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("b1 s1 h3/2 d1", "multiple of key-value heads"),
        ("b1 s1 h1", "no 'd' word"),
        ("b1 b2 s1 h1 d1", "'b2' after 'b1'"),
        ("b1 s4 quick h1 d4", "'quick' is not understood"),
        ("b1 s9..3 h1 d1", "s9..3 must go up"),
        ("b0 s4 h1 d4", "give b1 or more"),
        ("b1 s0 h1 d4", "no queries or no keys"),
        ("b1 s0/4 h1 d4", "no queries or no keys"),
        ("b1 s4/0 h1 d4", "no queries or no keys"),
        ("", "no 'b' word"),
        ("b\u0661 s1 h1 d1", "is not understood"),
        ("b1 s1..99999999999999999999 h1 d64", "too large; no number goes beyond 16,777,216"),
        ("b1 s16777217 h1 d64", "'s16777217' is too large"),
        (f"b1 s{'9' * 5000} h1 d64", "too large"),
    ],
)
def test_refusals_name_the_word(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        attention_case(text)
