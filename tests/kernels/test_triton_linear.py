"""The product of few rows in Triton, in its interpreter or on a GPU, against float64."""

from __future__ import annotations

import os

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1" and not torch.cuda.is_available():
    pytest.skip("needs TRITON_INTERPRET=1 or an NVIDIA GPU", allow_module_level=True)
pytest.importorskip("triton", reason="Triton is not installed")

from rooftile.kernels.triton import linear as kernel
from rooftile.kernels.triton.few import takes

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
DTYPES = [torch.float32, torch.float16] if INTERPRETED else [torch.float32, torch.bfloat16]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 2, 3, 4])
@pytest.mark.parametrize(
    ("out_features", "in_features"), [(1, 128), (70, 384), (300, 1024), (37, 1552), (2048, 3072)]
)
def test_few_rows(dtype: torch.dtype, rows: int, out_features: int, in_features: int) -> None:
    if INTERPRETED and out_features > 300:
        pytest.skip("takes the interpreter long")
    wide = torch.full((rows, in_features + 8), torch.nan, dtype=dtype, device=DEVICE)
    x = wide[:, :in_features].copy_(torch.randn(rows, in_features))
    weight, bias = (torch.randn(*s).to(DEVICE, dtype) for s in ((out_features, in_features), (1,)))
    assert takes(rows, in_features)
    for b in (None, bias.expand(out_features).contiguous()):
        exact = x.double() @ weight.double().T + (0 if b is None else b.double())
        total = x.double().abs() @ weight.double().abs().T
        allowed = torch.finfo(dtype).eps * exact.abs() + 1e-6 * total
        assert kernel.keeps_row(x, weight) == (rows == 1)
        for out in (
            kernel.linear(x, [weight], "dense", out_features, b),
            kernel._few_rows(x, weight, b),  # which large weights take at one row as well
        ):
            assert out.dtype == dtype
            assert bool(((out.double() - exact).abs() <= allowed).all())


@pytest.mark.gpu
def test_what_goes_to_the_vendor() -> None:
    assert not takes(5, 128)
    assert not takes(0, 128)
    assert not takes(1, 100)
