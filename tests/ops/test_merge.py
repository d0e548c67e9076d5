"""Merging partial results equals attention over all keys at once."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rooftile.ops.attention import attention
from rooftile.ops.merge import MERGE, merge_attention_states
from tests.ops import attention_oracle as oracle
from tests.ops.accuracy import assert_rows_close, opcheck


@given(
    lengths=st.lists(st.integers(0, 9), max_size=5),
    q_len=st.integers(0, 4),
    has_sink=st.booleans(),
    dtype=oracle.DTYPES,
    seed=st.integers(0, 2**32),
)
def test_parts_make_the_whole(
    lengths: list[int], q_len: int, has_sink: bool, dtype: torch.dtype, seed: int
) -> None:
    g = torch.Generator().manual_seed(seed)
    q = oracle.draw(g, torch.float64, q_len, 4, 8)
    kv = oracle.draw(g, torch.float64, 2, sum(lengths), 2, 8)
    sink = torch.randn(4, generator=g) if has_sink else None
    parts = []
    for i, chunk in enumerate(kv.split(lengths, 1) if lengths else ()):
        # Exactly one part holds the sink.
        parts.append(oracle.attend(q, chunk[0], chunk[1], sink=sink if i == 0 else None))
    if parts:
        outs, lses = (torch.stack(x) for x in zip(*parts, strict=True))
    else:
        outs, lses, sink = torch.zeros(0, q_len, 4, 8), torch.zeros(0, q_len, 4), None
    outs, lses = outs.to(dtype), lses.to(torch.float64 if dtype == torch.float64 else torch.float32)
    outs[lses == -math.inf] = math.nan  # what saw nothing adds nothing
    out, lse = merge_attention_states(outs, lses)
    expected = oracle.attend(q, kv[0], kv[1], sink=sink)
    assert (out.dtype, lse.dtype) == (dtype, lses.dtype)
    # The weights carry the rounding of the parts' lse, which may be several units.
    assert_rows_close(out, expected[0], dtype, scale=4)
    empty = expected[1] == -math.inf
    assert torch.equal(lse == -math.inf, empty)
    torch.testing.assert_close(lse[~empty].double(), expected[1][~empty], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("size", [0.0, 1e4, -1e6, 1e8])
def test_weights_add_up_to_one_whatever_the_size_of_lse(size: float) -> None:
    outs = torch.full((3, 2, 1, 4), 5.0, requires_grad=True)
    lses = torch.tensor([0.5, 0.25, -0.5])[:, None, None].expand(3, 2, 1) + size
    out, _ = merge_attention_states(outs, lses)
    torch.testing.assert_close(out, outs[0], rtol=1e-6, atol=0)
    out.sum().backward()
    assert outs.grad is not None
    torch.testing.assert_close(outs.grad.sum(0), torch.ones(2, 1, 4), rtol=1e-6, atol=0)


def test_gradients_through_a_split_equal_those_of_the_whole() -> None:
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, n, 2, 4, generator=g).double().requires_grad_() for n in (3, 6, 6))
    weight = torch.randn(3, 2, 4, generator=g).double()

    def loss(split: bool) -> torch.Tensor:
        if not split:
            out, lse = attention(q, k, v, return_lse=True)
            return (out[0] * weight).sum() + lse.square().sum()
        # The first part is empty: its lse is -inf.
        parts = [
            attention(q, k[:, a:b], v[:, a:b], return_lse=True) for a, b in ((0, 0), (0, 2), (2, 6))
        ]
        outs, lses = (torch.stack(x)[:, 0] for x in zip(*parts, strict=True))
        out, lse = merge_attention_states(outs, lses)
        return (out * weight).sum() + lse.square().sum()

    whole = torch.autograd.grad(loss(split=False), (q, k, v))
    split = torch.autograd.grad(loss(split=True), (q, k, v))
    torch.testing.assert_close(split, whole)


def test_gradcheck_opcheck_and_compile() -> None:
    g = torch.Generator().manual_seed(0)
    outs = torch.randn(3, 2, 2, 3, generator=g).double().requires_grad_()
    lses = torch.randn(3, 2, 2, generator=g).double().requires_grad_()
    assert torch.autograd.gradcheck(merge_attention_states, (outs, lses))
    opcheck(MERGE, outs, lses)
    compiled = torch.compile(merge_attention_states, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(outs, lses)[0], merge_attention_states(outs, lses)[0])


def test_refusals() -> None:
    outs, lses = torch.randn(2, 3, 4, 5), torch.randn(2, 3, 4)
    with pytest.raises(ValueError, match=r"outs has shape \[3, 4, 5\]; expected \[n, tokens"):
        merge_attention_states(outs[0], lses)
    with pytest.raises(ValueError, match=r"lses has shape \[2, 3, 3\]; expected"):
        merge_attention_states(outs, lses[..., :3])
    with pytest.raises(ValueError, match="outs is torch.float64 but lses is torch.float32"):
        merge_attention_states(outs.double(), lses)
    with pytest.raises(ValueError, match="kernel='torch' does not exist"):
        merge_attention_states(outs, lses, kernel="torch")
