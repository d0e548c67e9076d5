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

import triton
import triton.language as tl

from rooftile import attention as attention_operator
from rooftile import attention_varlen as varlen_operator
from rooftile import mask_mod, score_mod
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


def test_nan_among_the_keys_that_are_seen_shows_in_lse_too() -> None:
    """An lse of -inf would say that nothing was seen, and merging would drop the part."""
    q, k, v = (torch.randn(1, 5, 2, 16) for _ in range(3))
    k[0, 2, 0, 7] = math.nan
    out, lse = kernel.attention(q, k, v, None, -1, 0, 0.0, 0.25)
    for x in (out[..., 0], lse):
        assert bool(x[0, 2:, 0].isnan().all())
        assert bool(x[0, :2].isfinite().all())
        assert bool(x[0, :, 1].isfinite().all())


def test_reasons_for_refusal() -> None:
    call = {"device": "cpu", "dtype": torch.float16, "k_dim": 64, "v_dim": 64, "page_size": 0}
    assert kernel.supports(SimpleNamespace(**call)) is None
    refused = kernel.supports(SimpleNamespace(**{**call, "v_dim": 300}))
    assert refused == "v_dim is 300; it takes up to 256"
    refused = kernel.supports(SimpleNamespace(**{**call, "dtype": torch.bfloat16}))
    assert refused == "Triton's interpreter takes float16 and float32, not torch.bfloat16"


@triton.jit
def _biased(s, b, h, i, j, bias, slopes):  # type: ignore[no-untyped-def]
    return 3.0 * tl.sigmoid(s) + tl.load(bias + j) - tl.load(slopes + h) * tl.abs(i - j)


def biased(
    s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor, bias: Tensor, slopes: Tensor
) -> Tensor:
    return 3.0 * torch.sigmoid(s) + bias[j] - slopes[h] * (i - j).abs()


@triton.jit
def _documents(b, h, i, j, queries, keys):  # type: ignore[no-untyped-def]
    return (tl.load(queries + i) == tl.load(keys + j)) | (b == 1)


def documents(b: Tensor, h: Tensor, i: Tensor, j: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
    return (queries[i] == keys[j]) | (b == 1)


BIASED, DOCUMENTS = score_mod(_biased, reference=biased), mask_mod(_documents, reference=documents)


@settings(max_examples=12)
@given(
    q_len=st.sampled_from([1, 33, 70]),
    kv_len=st.sampled_from([1, 40, 64, 100]),
    window=st.sampled_from([(None, None), (None, 0), (20, 3)]),
    softcap=st.sampled_from([0.0, 15.0]),
    modifiers=st.sampled_from(["score", "mask", "both"]),
    ragged=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_modifiers(
    q_len: int,
    kv_len: int,
    window: tuple[int | None, int | None],
    softcap: float,
    modifiers: str,
    ragged: bool,
    seed: int,
) -> None:
    """Captured tensors have exactly as many entries as there are valid indices."""
    g = torch.Generator().manual_seed(seed)
    q = torch.randn(2, q_len, 4, 16, generator=g)
    k, v = (torch.randn(2, kv_len, 2, 16, generator=g) for _ in range(2))
    bias, slopes = torch.randn(kv_len, generator=g), torch.rand(4, generator=g)
    rows, keys = (torch.randint(3, (n,), generator=g) for n in (q_len, kv_len))
    options: dict[str, Any] = {"window": window, "softcap": softcap, "return_lse": True}
    if modifiers != "mask":
        options["score_mod"] = BIASED(bias, slopes)
    if modifiers != "score":
        options["mask_mod"] = DOCUMENTS(rows, keys)
    tensors = [x.flatten(0, 1) if ragged else x for x in (q, k, v)]
    run: Any = attention_operator
    if ragged:
        tensors += [torch.tensor([0, n, 2 * n]) for n in (q_len, kv_len)]
        run = varlen_operator
    wide = [x.double() if x.is_floating_point() else x for x in tensors]
    exact = run(*wide, kernel="reference", **options)
    assert_close(run(*tensors, kernel="triton", **options), exact)


@pytest.mark.parametrize("least", [torch.finfo(torch.float32).min, -1e30, -math.inf])
def test_a_bias_of_the_least_number_hides_whole_rows_too(least: float) -> None:
    q, k, v = (torch.randn(1, 8, heads, 16) for heads in (4, 2, 2))
    bias = torch.full((8,), least)
    bias[5] = 0.0
    options: dict[str, Any] = {"score_mod": BIASED(bias, torch.zeros(4)), "return_lse": True}
    for causal in (True, False):
        exact = attention_operator(q, k, v, kernel="reference", causal=causal, **options)
        assert bool((exact[1][:, :5] == -math.inf).all()) == causal
        got = attention_operator(q, k, v, kernel="triton", causal=causal, **options)
        assert_close(got, (exact[0].double(), exact[1].double()))


@triton.jit
def _of_the_key(s, b, h, i, j, bias):  # type: ignore[no-untyped-def]
    return tl.load(bias + j)


def of_the_key(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor, bias: Tensor) -> Tensor:
    return bias[j]


def test_a_modifier_may_ignore_the_score_and_capture_another_dtype() -> None:
    q, bias = torch.randn(1, 40, 2, 16), torch.randn(40).double()
    mod = score_mod(_of_the_key, reference=of_the_key)(bias)
    got = attention_operator(q, q, q, score_mod=mod, kernel="triton", return_lse=True)
    wide = q.double()
    exact = attention_operator(wide, wide, wide, score_mod=mod, kernel="reference", return_lse=True)
    assert_close(got, exact)  # type: ignore[arg-type]


def test_both_functions_of_a_modifier_take_the_same() -> None:
    with pytest.raises(ValueError, match="fn takes 6 arguments and reference 7"):
        score_mod(_of_the_key, reference=biased)


def test_a_modifier_without_a_jitted_function_is_refused() -> None:
    q = torch.randn(1, 3, 1, 16)
    only_torch = mask_mod(None, reference=upper)
    with pytest.raises(NotImplementedError, match="upper-.* without a @triton.jit function"):
        attention_operator(q, q, q, mask_mod=only_torch, kernel="triton")


def upper(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return i <= j
