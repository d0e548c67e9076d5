"""Pieces of the tile layer alone, as the simulator runs them."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.gluon_sim import SimulationError, load_simulated
from tests.support.gluon_sim.memory import flat, tile

DIVISOR, MASK, ROWS, SOFTMAX = load_simulated(
    "rooftile.kernels.gluon.tile.divisor",
    "rooftile.kernels.gluon.tile.mask",
    "rooftile.kernels.gluon.tile.rows",
    "rooftile.kernels.gluon.tile.softmax",
)


@pytest.mark.parametrize("d", [1, 2, 3, 7, 16, 48, 127, 132, 1000, 4097, 65_535, 2**20 - 1, 2**24])
def test_quotients_of_few(d: int) -> None:
    """Also where the hardware's division is two units in the last place off."""
    x = torch.arange(2**20, dtype=torch.int32)
    exact = torch.div(x, d, rounding_mode="floor")
    got = DIVISOR.divide_few(tile(x), torch.tensor(d)).as_subclass(torch.Tensor)
    assert torch.equal(got, exact)
    for direction in (-math.inf, math.inf):
        quotient = (x.float() + 0.5) / d
        for _ in range(2):
            quotient = torch.nextafter(quotient, torch.tensor(direction))
        assert torch.equal(quotient.int(), exact)


def test_software_exp2_is_near_enough_and_exact_where_it_matters() -> None:
    x = torch.linspace(-126, 8, 100_001)
    error = (SOFTMAX.exp2_on_fma_units(tile(x)).double() / x.double().exp2() - 1).abs()
    assert error.max() < 1.1e-4
    whole = torch.tensor([-math.inf, -1e30, -127.0, -126.0, -3.0, 0.0, 7.0, 100.0])
    expected = torch.tensor([0.0, 0.0, 0.0, 2.0**-126, 0.125, 1.0, 128.0, 2.0**100])
    assert torch.equal(SOFTMAX.exp2_on_fma_units(tile(whole)).as_subclass(torch.Tensor), expected)


@pytest.mark.parametrize("share", [0, 1, 2])
def test_exp2_on_a_share_of_elements(share: int) -> None:
    x = -torch.rand(8, 16) * 20
    assert torch.allclose(SOFTMAX.exp2(tile(x), share), x.exp2(), rtol=1.1e-4)


@given(
    lazy=st.booleans(), sink=st.sampled_from([None, -math.inf, 0.7, 50.0]), seed=st.integers(0, 99)
)
def test_online_softmax(lazy: bool, sink: float | None, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(16, 96, generator=generator) * torch.randint(
        1, 30, (96,), generator=generator
    )
    scores[3] = -math.inf
    scores[5, :64] = -math.inf
    values = torch.randn(96, 4, generator=generator)
    softmax = (
        SOFTMAX.start_softmax(16, None)
        if sink is None
        else SOFTMAX.start_softmax_at_sink(sink, 16, None)
    )
    o = torch.zeros(16, 4)
    for part in range(3):
        block = slice(32 * part, 32 * part + 32)
        p, alpha, softmax = softmax.step(tile(scores[:, block]), 1.4426950408889634, lazy, 0)
        o = SOFTMAX.rescale(tile(o), alpha, 4, lazy) + p @ values[block]
    o = o * softmax.reciprocal()[:, None]
    logits = scores.double()
    if sink is not None:
        logits = torch.cat([logits, torch.full((16, 1), sink, dtype=torch.float64)], 1)
    expected = torch.softmax(logits, 1).nan_to_num(0)[:, :96] @ values.double()
    assert torch.allclose(o.double(), expected, atol=1e-5)
    assert torch.allclose(softmax.lse().double(), logits.logsumexp(1), atol=1e-5)


@given(
    anchors=st.sets(st.integers(0, 3)),
    steep=st.sampled_from([0.0, 5.0, 60.0]),
    seed=st.integers(0, 99),
)
def test_anchored_softmax(anchors: set[int], steep: float, seed: int) -> None:
    """Exact where sums stay below OVERFLOW, and told apart where they do not."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(16, 128, generator=generator) + steep * torch.arange(128) / 32
    scores[3] = -math.inf
    values = torch.randn(128, 4, generator=generator)
    softmax, o = SOFTMAX.start_softmax(16, None), torch.zeros(16, 4)
    for part in range(4):
        block = slice(32 * part, 32 * part + 32)
        if part == 0 or part in anchors:
            alpha, softmax = softmax.anchor(tile(scores[:, block]), 1.4426950408889634)
            o = SOFTMAX.rescale(tile(o), alpha, 4, False)
        p, softmax = softmax.weigh(tile(scores[:, block]), 1.4426950408889634, 0)
        o = o + p @ values[block]
    trusted = (softmax.total <= SOFTMAX.OVERFLOW).as_subclass(torch.Tensor)
    assert bool(trusted[3])
    if steep < 10 or anchors >= {1, 2, 3}:
        assert bool(trusted.all())
    o = o * softmax.reciprocal()[:, None]
    expected = torch.softmax(scores.double(), 1).nan_to_num(0) @ values.double()
    assert torch.allclose(o.double()[trusted], expected[trusted], atol=1e-5)
    lse = scores.double().logsumexp(1)
    assert torch.allclose(softmax.lse().double()[trusted], lse[trusted], atol=1e-5)


@given(x=st.floats(-300, 300), cap=st.sampled_from([0.5, 20.0, 50.0]))
def test_soft_cap(x: float, cap: float) -> None:
    got = SOFTMAX.soft_cap(tile(torch.tensor([x])), 1 / cap, cap)
    assert abs(got.item() - cap * math.tanh(x / cap)) < 2e-6 * cap


@given(
    row0=st.integers(0, 300),
    q_len=st.integers(1, 400),
    kv_len=st.integers(0, 400),
    left=st.sampled_from([-1, 0, 3, 70]),
    right=st.sampled_from([-1, 0, 3, 70]),
)
def test_masks_and_the_blocks_they_visit(
    row0: int, q_len: int, kv_len: int, left: int, right: int
) -> None:
    row0 = min(row0, q_len - 1)
    num_rows = min(64, q_len - row0)
    sides = (left >= 0, right >= 0)
    offset = kv_len - q_len
    position = torch.arange(row0, row0 + num_rows)[:, None] + offset
    key = torch.arange(kv_len)
    seen = torch.ones(num_rows, kv_len, dtype=torch.bool)
    if left >= 0:
        seen &= key >= position - left
    if right >= 0:
        seen &= key <= position + right
    rows, columns = (tile(torch.arange(n, dtype=torch.int32)) for n in (num_rows, 448))
    got = MASK.visible(rows + row0, columns, offset, kv_len, left, right, *sides)
    assert torch.equal(got[:, :kv_len].as_subclass(torch.Tensor), seen)
    assert not bool(got[:, kv_len:].any())

    first, blocks = MASK.key_range(row0, 64, q_len, kv_len, left, right, 32, *sides)
    low, high = MASK.whole_range(row0, offset, kv_len, left, right, 64, 32, *sides)
    assert blocks >= 1
    for n in range(14):
        part = got[:, 32 * n : 32 * n + 32]
        if bool(part.any()):
            assert first <= n < first + blocks
        if first <= n < first + blocks and low <= n < high:
            assert bool(part.all())


@given(
    lengths=st.lists(st.integers(0, 9), min_size=1, max_size=4),
    stride=st.sampled_from([8, 24, 2**20]),
    row=st.integers(0, 12),
    data=st.data(),
)
def test_ragged_coordinates_reach_the_right_rows(
    lengths: list[int], stride: int, row: int, data: st.DataObject
) -> None:
    """The wrapping addresses: inside a sequence each row is where it is, outside nothing is."""
    tokens, heads = max(sum(lengths), 1), 2
    x = torch.empty_strided((tokens, heads, 8), (stride * heads, stride, 1), dtype=torch.float16)
    desc = ROWS.describe_ragged(x, 4, 64).at(x)
    sequence = data.draw(st.integers(0, len(lengths) - 1))
    head = data.draw(st.integers(0, heads - 1))
    start, length = sum(lengths[:sequence]), lengths[sequence]
    address, inside = desc.addresses(ROWS.coordinates(True, 0, head, start, length, row))
    for i in range(4):
        assert bool(inside[0, 0, 0, i, 0]) == (row + i < length)
        if row + i < length:
            assert address[0, 0, 0, i, 3] == (start + row + i) * stride * heads + head * stride + 3
    assert not bool(inside[..., 8:].any())  # columns beyond the head dim


def test_a_dense_box_past_the_end_is_clipped() -> None:
    x = torch.zeros(2, 10, 3, 16, dtype=torch.bfloat16)
    desc = ROWS.describe(x, 64, 64).at(x)
    _, inside = desc.addresses(ROWS.coordinates(False, 1, 2, 0, 0, 8))
    assert inside[0, 0, :, :16].all(1).tolist() == [True, True] + [False] * 62
    assert not bool(inside[..., 16:].any())
    with pytest.raises(SimulationError, match="4 dimensions"):
        desc.addresses((0, 0, 0))
    assert flat(x[:, 5]).numel() == x.numel()
