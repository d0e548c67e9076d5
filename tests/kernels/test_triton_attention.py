"""The portable Triton attention in Triton's interpreter on a CPU, against float64.

The interpreter is chosen when a kernel is imported, so this needs a process of its own:
TRITON_INTERPRET=1 python -m pytest tests/kernels/test_triton_attention.py (numpy below 2.4).
"""

from __future__ import annotations

import math
import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rooftile.kernels.reference import attention as reference

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1, in a process of its own", allow_module_level=True)
pytest.importorskip("triton", reason="Triton is not installed")

from rooftile.kernels.triton import attention as kernel

WINDOWS = [(-1, -1), (-1, 0), (20, 0), (0, 0), (40, 10), (-1, 15), (9, -1)]


def wide(x: Any) -> Any:
    return x.double() if isinstance(x, Tensor) and x.is_floating_point() else x


def assert_close(got: tuple[Tensor, Tensor], exact: tuple[Tensor, Tensor]) -> None:
    out, lse = got
    if out.numel():
        error = (out.double() - exact[0]).abs().amax(-1)
        eps = torch.finfo(out.dtype).eps
        assert bool((error <= (3 * eps + 1e-6) * (exact[0].abs().amax(-1) + 0.5)).all())
    assert torch.equal(lse == -math.inf, exact[1] == -math.inf)
    seen = exact[1] > -math.inf
    assert torch.allclose(lse[seen].double(), exact[1][seen], atol=2e-5, rtol=1e-5)


@settings(max_examples=25)
@given(
    q_len=st.sampled_from([1, 31, 33, 70]),
    kv_len=st.sampled_from([0, 1, 31, 64, 100]),
    kv_heads=st.integers(1, 2),
    group=st.integers(1, 2),
    dims=st.sampled_from([(16, 16), (24, 40), (64, 64), (5, 3)]),
    window=st.sampled_from(WINDOWS),
    softcap=st.sampled_from([0.0, 15.0]),
    has_sink=st.booleans(),
    scale=st.sampled_from([0.3, -0.2, 0.0]),
    dtype=st.sampled_from([torch.float32, torch.float16]),
    seed=st.integers(0, 2**31),
)
def test_dense(
    q_len: int,
    kv_len: int,
    kv_heads: int,
    group: int,
    dims: tuple[int, int],
    window: tuple[int, int],
    softcap: float,
    has_sink: bool,
    scale: float,
    dtype: torch.dtype,
    seed: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    heads = kv_heads * group
    q = torch.randn(2, heads, q_len, dims[0], generator=generator).to(dtype).transpose(1, 2)
    k = torch.randn(2, kv_len, kv_heads, dims[0], generator=generator).to(dtype)
    v = torch.randn(2, kv_len, kv_heads, dims[1], generator=generator).to(dtype)
    options = (torch.randn(heads) if has_sink else None, *window, softcap, scale)
    exact = reference.attention(*map(wide, (q, k, v, *options)))
    assert_close(kernel.attention(q, k, v, *options), exact)


@settings(max_examples=15)
@given(
    lengths=st.lists(
        st.tuples(st.sampled_from([0, 1, 33, 50]), st.sampled_from([0, 1, 40, 64])),
        min_size=1,
        max_size=4,
    ),
    padding=st.sampled_from([0, 2, 90]),
    window=st.sampled_from(WINDOWS),
    has_sink=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_ragged_with_nan_in_the_padding(
    lengths: list[tuple[int, int]],
    padding: int,
    window: tuple[int, int],
    has_sink: bool,
    seed: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    q_lens, kv_lens = ([pair[i] for pair in lengths] for i in range(2))
    tokens_q, tokens_k = sum(q_lens), sum(kv_lens)
    q = torch.randn(tokens_q + padding, 2, 32, generator=generator)
    k, v = (torch.randn(tokens_k + padding, 1, 32, generator=generator) for _ in range(2))
    cu_q, cu_k = (torch.tensor([0, *lens]).cumsum(0) for lens in (q_lens, kv_lens))
    sink = torch.randn(2) if has_sink else None
    rest = (cu_q, cu_k, max(q_lens), max(kv_lens), sink, *window, 0.0, 0.2)
    exact = reference.attention_varlen(*map(wide, (q, k, v, *rest)))
    q[tokens_q:] = k[tokens_k:] = v[tokens_k:] = math.nan
    assert_close(kernel.attention_varlen(q, k, v, *rest), exact)


def test_reasons_for_refusal() -> None:
    call = {"device": "cpu", "dtype": torch.float16, "k_dim": 64, "v_dim": 64, "page_size": 0}
    assert kernel.supports(SimpleNamespace(**call)) is None
    refused = kernel.supports(SimpleNamespace(**{**call, "v_dim": 300}))
    assert refused == "v_dim is 300; it takes up to 256"
    refused = kernel.supports(SimpleNamespace(**{**call, "dtype": torch.bfloat16}))
    assert refused == "Triton's interpreter takes float16 and float32, not torch.bfloat16"
