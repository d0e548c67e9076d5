"""Attention written out row by row in float64, and what the attention tests share."""

from __future__ import annotations

import math

import torch
from hypothesis import strategies as st
from torch import Tensor

DTYPES = st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16])
HEADS = st.sampled_from([(1, 1), (3, 1), (4, 2), (9, 3), (2, 2)])  # query, key-value
SIDES = st.sampled_from([None, 0, 1, 4, 11])
WINDOWS = st.one_of(st.none(), st.tuples(SIDES, SIDES))
SOFTCAPS = st.sampled_from([0.0, 0.0, 2.5, 30.0])
# A sink may be absent, ordinary, far above every score, or switched off by -inf.
SINKS = st.sampled_from([None, None, 0.0, 1e4, -math.inf])


def attend(
    q: Tensor,  # [q_len, num_q_heads, k_dim]
    k: Tensor,  # [kv_len, num_kv_heads, k_dim]
    v: Tensor,  # [kv_len, num_kv_heads, v_dim]
    *,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    softcap: float = 0.0,
    sink: Tensor | None = None,
    softmax_scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """One sequence: out [q_len, num_q_heads, v_dim] and lse [q_len, num_q_heads], float64."""
    q, k, v = q.double(), k.double(), v.double()
    q_len, heads, dim = q.shape
    kv_len, group = k.shape[0], heads // k.shape[1]
    scale = 1 / math.sqrt(dim) if softmax_scale is None else softmax_scale
    left, right = (None, None) if window is None else window
    out = torch.zeros(q_len, heads, v.shape[-1], dtype=torch.float64)
    lse = torch.full((q_len, heads), -math.inf, dtype=torch.float64)
    for i in range(q_len):
        position = kv_len - q_len + i
        seen = [
            j
            for j in range(kv_len)
            if not (causal and j > position)
            and not (left is not None and j < position - left)
            and not (right is not None and j > position + right)
        ]
        for h in range(heads):
            logits = k[seen, h // group] @ q[i, h] * scale
            if softcap:
                logits = softcap * torch.tanh(logits / softcap)
            if sink is not None:
                logits = torch.cat([logits, sink[h : h + 1].double()])
            if len(logits) == 0 or bool((logits == -math.inf).all()):
                continue
            lse[i, h] = torch.logsumexp(logits, 0)
            weights = torch.softmax(logits, 0)[: len(seen)]
            out[i, h] = weights @ v[seen, h // group]
    return out, lse


def assert_attention_close(
    actual: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor], dtype: torch.dtype
) -> None:
    """Each row's error is a few roundings of dtype, lse as below. A row is a head's output.

    Values are drawn from N(0, 1). In 16 bits the roundings of weights and of the result dominate,
    each of up to half a unit at 1, the floor. Wider inputs are summed in their own precision,
    where a score of size s turns its rounding into a relative error of s units of its weight.
    """
    out, lse = actual
    lse_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    assert (out.dtype, lse.dtype) == (dtype, lse_dtype)
    assert out.shape == expected[0].shape
    assert lse.shape == expected[1].shape
    error = (out.double() - expected[0]).abs()
    unit = torch.finfo(dtype).eps * (2 if dtype.itemsize == 2 else 16)
    allowed = unit * (1 + expected[0].abs().amax(-1, keepdim=True))
    assert bool((error <= allowed).all()), f"{error.max()} above {allowed.min()}"
    assert bool((out[expected[1] == -math.inf] == 0).all())
    assert_lse_close(lse, expected[1], dtype)


def assert_lse_close(lse: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    """lse to a few roundings of its own dtype, or to 1e-4 where the inputs have 16 bits.

    For those, torch's fused kernel sums cheap exponentials that are good to 2^-14.
    """
    empty = expected == -math.inf
    assert torch.equal(lse == -math.inf, empty)
    error = (lse.double() - expected)[~empty].abs()
    unit = 1e-4 if dtype.itemsize == 2 else 16 * torch.finfo(dtype).eps
    allowed = unit * (1 + expected[~empty].abs())
    assert bool((error <= allowed).all()), f"lse: {error} above {allowed}"


def draw(
    generator: torch.Generator, dtype: torch.dtype, *shape: int, strided: bool = False
) -> Tensor:
    """N(0, 1); `strided`: a view into a wider tensor of NaN, so neither dense nor clean around."""
    if not strided:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
    wide = torch.full((*shape[:-1], shape[-1] * 2 + 3), math.nan, dtype=dtype)
    view = wide[..., 1 : shape[-1] * 2 + 1 : 2]
    return view.copy_(torch.randn(shape, generator=generator, dtype=torch.float64))


def sink_of(generator: torch.Generator, heads: int, kind: float | None) -> Tensor | None:
    return None if kind is None else torch.randn(heads, generator=generator) + kind
