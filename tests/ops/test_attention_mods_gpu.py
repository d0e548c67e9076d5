"""`score_mod` and `mask_mod` in the Triton and Gluon kernels on a GPU, against the torch reference in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rooftile import attention, attention_varlen, mask_mod, score_mod

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")


@triton.jit
def _alibi(s, b, h, i, j, slopes, bias):  # type: ignore[no-untyped-def]
    return s - tl.load(slopes + h) * tl.abs(i - j) + tl.load(bias + j)


def alibi(
    s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor, slopes: Tensor, bias: Tensor
) -> Tensor:
    return s - slopes[h] * (i - j).abs() + bias[j]


@triton.jit
def _stripes(b, h, i, j):  # type: ignore[no-untyped-def]
    return ((i + j + h) % 5 != 0) | (i == j)


def stripes(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return ((i + j + h) % 5 != 0) | (i == j)


FAMILIES = ["triton"]
if torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0):
    FAMILIES.append("gluon")
ALIBI, STRIPES = score_mod(_alibi, reference=alibi), mask_mod(_stripes, reference=stripes)


def close(got: tuple[Tensor, Tensor], exact: tuple[Tensor, Tensor], eps: float) -> None:
    error = (got[0].double() - exact[0]).abs().amax(-1)
    assert bool((error <= 3 * eps * (exact[0].abs().amax(-1) + 0.1)).all()), error.max()
    seen = exact[1] > -torch.inf
    assert torch.equal(got[1] > -torch.inf, seen)
    assert torch.allclose(got[1][seen].double(), exact[1][seen], atol=2e-3)


@pytest.mark.parametrize("kernel", FAMILIES)
@settings(max_examples=20, deadline=None)
@given(
    lengths=st.sampled_from([(1, 1), (65, 64), (200, 333), (513, 700)]),
    heads=st.sampled_from([(2, 2), (6, 2)]), dim=st.sampled_from([64, 96, 128, 256]),
    causal=st.booleans(), which=st.sampled_from(["score", "mask", "both"]), ragged=st.booleans(),
    dtype=st.sampled_from([torch.bfloat16, torch.float16]), seed=st.integers(0, 2**31),
)  # fmt: skip
def test_modifiers(
    kernel: str, lengths: tuple[int, int], heads: tuple[int, int], dim: int, causal: bool, which: str,
    ragged: bool, dtype: torch.dtype, seed: int,
) -> None:  # fmt: skip
    g = torch.Generator("cuda").manual_seed(seed)
    (m, n), (h, kv) = lengths, heads
    q, k, v = (
        torch.randn(2, length, count, dim, generator=g, device="cuda").to(dtype)
        for length, count in ((m, h), (n, kv), (n, kv))
    )
    slopes = torch.rand(h, generator=g, device="cuda") * 0.1
    bias = torch.randn(n, generator=g, device="cuda")
    options: dict[str, Any] = {"causal": causal, "return_lse": True}
    if which != "mask":
        options["score_mod"] = ALIBI(slopes, bias)
    if which != "score":
        options["mask_mod"] = STRIPES
    tensors, run = [q, k, v], attention
    if ragged:
        cu = [torch.tensor([0, x, 2 * x], device="cuda", dtype=torch.int32) for x in lengths]
        tensors, run = [*(x.flatten(0, 1) for x in (q, k, v)), *cu], attention_varlen
    wide = [x.double() if x.is_floating_point() else x for x in tensors]
    exact = run(*wide, kernel="reference", **options)  # type: ignore[arg-type]
    got = run(*tensors, kernel=kernel, **options)  # type: ignore[arg-type]
    close(got, exact, torch.finfo(dtype).eps)


def test_graphs_compilation_and_the_choice_of_kernel() -> None:
    q = torch.randn(1, 300, 4, 64, device="cuda", dtype=torch.bfloat16)
    slopes, bias = torch.rand(4, device="cuda"), torch.randn(300, device="cuda")

    def run(q: Tensor, slopes: Tensor) -> Tensor:
        return attention(q, q, q, causal=True, score_mod=ALIBI(slopes, bias), mask_mod=STRIPES)  # type: ignore[return-value]

    eager = run(q, slopes)
    explicit = attention(
        q, q, q, causal=True, score_mod=ALIBI(slopes, bias), mask_mod=STRIPES, kernel=FAMILIES[-1]
    )
    assert torch.equal(eager, explicit)  # type: ignore[arg-type]
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(q, slopes), eager)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run(q, slopes)
    captured.fill_(torch.nan)
    graph.replay()
    assert torch.equal(captured, eager)
