"""Attention with linear biases against a computation row by row in float64."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rooftile.ops.attention import attention, attention_varlen
from rooftile.ops.attention_alibi import ATTENTION_ALIBI, ATTENTION_VARLEN_ALIBI


def row_by_row(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slopes: Tensor,
    causal: bool,
    softcap: float,
    sink: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """One sequence [length, heads, dim] at a time, straight from the definition."""
    out, lse = torch.zeros(*q.shape[:2], v.shape[2], dtype=torch.float64), torch.zeros(q.shape[:2])
    lse = lse.double()
    for i in range(q.shape[0]):
        p = i + k.shape[0] - q.shape[0]
        seen = [j for j in range(k.shape[0]) if not causal or j <= p]
        for h in range(q.shape[1]):
            kv = h * k.shape[1] // q.shape[1]
            logits = []
            for j in seen:
                s = float(q[i, h].double() @ k[j, kv].double()) * q.shape[2] ** -0.5
                s = softcap * math.tanh(s / softcap) if softcap else s
                logits.append(s - float(slopes[h]) * abs(p - j))
            row = torch.tensor(logits, dtype=torch.float64)
            every = row if sink is None else torch.cat([row, sink[h : h + 1].double()])
            lse[i, h] = every.logsumexp(0) if len(every) else -math.inf
            if seen:
                out[i, h] = torch.exp(row - lse[i, h]) @ v[seen, kv].double()
    return out, lse


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_slopes_are_rounded_no_further(dtype: torch.dtype) -> None:
    """Neither slopes in 16 bits over long distances, nor float32 ones beside float64 inputs."""
    q, k, v = (torch.randn(n, 1, 8, dtype=torch.float64) for n in (1, 700, 700))
    slopes = torch.tensor([0.011], dtype=dtype)
    exact = row_by_row(q, k, v, slopes, False, 0.0, None)
    got = attention(q[None], k[None], v[None], alibi_slopes=slopes, return_lse=True)
    for x, expected in zip(got, exact, strict=True):
        torch.testing.assert_close(x[0], expected, rtol=1e-12, atol=1e-12)


@given(
    lengths=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 6)), min_size=1, max_size=3),
    group=st.integers(1, 2), causal=st.booleans(), softcap=st.sampled_from([0.0, 2.0]),
    has_sink=st.booleans(), seed=st.integers(0, 2**31),
)  # fmt: skip
def test_by_definition(
    lengths: list[tuple[int, int]],
    group: int,
    causal: bool,
    softcap: float,
    has_sink: bool,
    seed: int,
) -> None:
    g = torch.Generator().manual_seed(seed)
    q_lens, kv_lens = [a for a, _ in lengths], [b for _, b in lengths]
    q = torch.randn(sum(q_lens), 2 * group, 8, generator=g)
    k, v = (torch.randn(sum(kv_lens), 2, 8, generator=g) for _ in range(2))
    slopes = torch.rand(2 * group, generator=g)
    sink = torch.randn(2 * group, generator=g) if has_sink else None
    cu_q, cu_k = (torch.tensor([0, *lens]).cumsum(0) for lens in (q_lens, kv_lens))
    options = {"alibi_slopes": slopes, "causal": causal, "softcap": softcap, "sink": sink}
    out, lse = attention_varlen(q, k, v, cu_q, cu_k, return_lse=True, **options)  # type: ignore[arg-type]
    for i in range(len(lengths)):
        rows, keys = slice(cu_q[i], cu_q[i + 1]), slice(cu_k[i], cu_k[i + 1])
        exact = row_by_row(q[rows], k[keys], v[keys], slopes, causal, softcap, sink)
        assert torch.allclose(out[rows].double(), exact[0], atol=1e-5)
        assert torch.allclose(lse[rows].double(), exact[1], atol=1e-5)
        dense = attention(q[None, rows], k[None, keys], v[None, keys], **options)  # type: ignore[arg-type]
        assert torch.allclose(dense[0], out[rows], atol=1e-6)


def test_operators_and_compilation() -> None:
    q, k = torch.randn(1, 5, 2, 8), torch.randn(1, 7, 2, 8)
    slopes, cu = torch.rand(2), (torch.tensor([0, 5]), torch.tensor([0, 7]))
    options = (None, slopes, -1, 0, 0.0, 0.3, "auto")
    torch.library.opcheck(ATTENTION_ALIBI.overload, (q, k, k, *options))
    ragged = (q[0], k[0], k[0], *cu, 5, 7)
    torch.library.opcheck(ATTENTION_VARLEN_ALIBI.overload, (*ragged, *options))
    compiled = torch.compile(attention, fullgraph=True, backend="aot_eager")
    expected = attention(q, k, k, causal=True, alibi_slopes=slopes)
    assert torch.allclose(compiled(q, k, k, causal=True, alibi_slopes=slopes), expected)  # type: ignore[arg-type]


def test_gradients_reach_the_slopes() -> None:
    q, k, v = (torch.randn(1, 4, 2, 8, dtype=torch.float64, requires_grad=True) for _ in range(3))
    slopes = torch.rand(2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda *x: attention(*x[:3], causal=True, alibi_slopes=x[3]), (q, k, v, slopes)
    )


def test_refusals() -> None:
    q = torch.randn(1, 4, 2, 8)
    with pytest.raises(ValueError, match=r"alibi_slopes .*\[num_q_heads\]"):
        attention(q, q, q, alibi_slopes=torch.rand(3))
    with pytest.raises(NotImplementedError, match="takes no alibi_slopes"):
        attention(q, q, q, alibi_slopes=torch.rand(2), kernel="torch")
    with pytest.raises(NotImplementedError, match="no gradients"):
        attention(q.requires_grad_(), q, q, alibi_slopes=torch.rand(2), kernel="triton")
