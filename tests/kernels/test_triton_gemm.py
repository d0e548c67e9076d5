"""The portable Triton matrix product in Triton's interpreter on a CPU, exactly and in float64.

The interpreter is chosen when a kernel is imported, so this needs a process of its own:
TRITON_INTERPRET=1 python -m pytest tests/kernels/test_triton_gemm.py (numpy below 2.4).
"""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rooftile.kernels.flags import flags
from rooftile.kernels.reference import gemm as reference
from rooftile.planning.stream_k import Product, Tiling, data_parallel, hybrid, split_k, stream_k

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1, in a process of its own", allow_module_level=True)
pytest.importorskip("triton", reason="Triton is not installed")

from rooftile.kernels.triton import gemm as kernel


def laid_out(x: Tensor, layout: str) -> Tensor:
    if layout == "column":
        return x.T.contiguous().T
    if layout == "inside":
        wide = torch.full((x.shape[0], x.shape[1] + 5), torch.nan, dtype=x.dtype)
        wide[:, 2:-3] = x
        return wide[:, 2:-3]
    return x


@settings(max_examples=25)
@given(
    scheme=st.sampled_from(["data-parallel", "split-k", "stream-k", "hybrid"]),
    shape=st.tuples(*[st.sampled_from([1, 16, 17, 40, 70])] * 3),
    layouts=st.tuples(*[st.sampled_from(["row", "column", "inside"])] * 2),
    dtype=st.sampled_from([torch.float16, torch.float32]),
    ctas=st.integers(1, 5),
    seed=st.integers(0, 2**31),
)
def test_integers_come_out_exactly(
    scheme: str,
    shape: tuple[int, int, int],
    layouts: tuple[str, str],
    dtype: torch.dtype,
    ctas: int,
    seed: int,
) -> None:
    m, n, k = shape
    generator = torch.Generator().manual_seed(seed)
    a = torch.randint(1, 4, (m, k), generator=generator)
    b = torch.randint(1, 4, (k, n), generator=generator)
    tiling, product = Tiling(16, 32, 16), Product(m, n, k)
    if scheme == "split-k":
        split = min(3, tiling.iterations(product))
        plan = split_k(product, tiling, split * tiling.tiles(product), split)
    else:
        build = {"data-parallel": data_parallel, "stream-k": stream_k, "hybrid": hybrid}[scheme]
        plan = build(product, tiling, ctas)
    got = kernel.matmul(
        *(laid_out(a.to(dtype), layouts[0]), laid_out(b.to(dtype), layouts[1])),
        *(None, None, None, None, "none", torch.float32, False, plan),
    )
    assert torch.equal(got, (a @ b).float())
    assert not flags(a.device).any()


@settings(max_examples=20)
@given(
    shape=st.tuples(*[st.sampled_from([2, 16, 30, 66])] * 3),
    activation=st.sampled_from(reference.ACTIVATIONS),
    has_bias=st.booleans(),
    has_residual=st.booleans(),
    scale_dims=st.sampled_from([None, (0, 0), (1, 1), (0, 1)]),
    out=st.sampled_from([torch.float16, torch.float32]),
    batch_invariant=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_epilogues(
    shape: tuple[int, int, int],
    activation: str,
    has_bias: bool,
    has_residual: bool,
    scale_dims: tuple[int, int] | None,
    out: torch.dtype,
    batch_invariant: bool,
    seed: int,
) -> None:
    m, n, k = shape
    generator = torch.Generator().manual_seed(seed)
    a, b, bias, wide = (  # sums of a product are near 1
        (torch.randn(*s, generator=generator) * k**-0.25).half()
        for s in ((m, k), (k, n), (n,), (m, n + 3))
    )
    columns = n // 2 if reference.is_gated(activation) else n
    scales: list[Tensor | None] = [None, None]
    if scale_dims is not None:
        for i, size in enumerate((m, n)):
            scale = torch.rand(size, generator=generator) + 0.5
            scales[i] = scale if scale_dims[i] else scale[0]
    rest = (
        bias if has_bias else None,
        wide[:, 1 : columns + 1] if has_residual else None,
        *scales,
        activation,
    )
    got = kernel.matmul(a, b, *rest, out, batch_invariant)
    exact = reference.matmul(a.double(), b.double(), *rest, torch.float64, False)
    allowed = (torch.finfo(out).eps + 3e-6) * (exact.abs() + 0.5)
    assert bool(((got.double() - exact).abs() <= allowed).all())


def test_reasons_for_refusal() -> None:
    half = torch.float16
    call = {"device": "cpu", "dtype": half, "out_dtype": half, "b_layout": "column"}
    assert kernel.supports(SimpleNamespace(**call)) is None
    refused = kernel.supports(SimpleNamespace(**{**call, "dtype": torch.bfloat16}))
    assert refused == "Triton's interpreter takes float16 and float32 on a CPU, not torch.bfloat16"
    refused = kernel.supports(SimpleNamespace(**{**call, "out_dtype": torch.float64}))
    assert refused == "it sums in float32, and float64 was asked for"
    refused = kernel.supports(SimpleNamespace(**{**call, "b_layout": "int4_words"}))
    assert refused == "it reads dense weights, not int4 codes"
