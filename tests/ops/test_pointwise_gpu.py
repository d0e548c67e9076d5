"""Norm, rotation, activation in Triton on a GPU, against the reference in float64."""

from __future__ import annotations

import pytest
import torch

from rooftile.ops.activation import gelu_and_mul, silu_and_mul
from rooftile.ops.norm import rms_norm
from rooftile.ops.rope import rotary_embedding
from rooftile.ops.rotary_table import RotaryConfig, rotary_table
from tests.ops.accuracy import assert_rows_close

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden", [1, 64, 100, 576, 1024, 4096, 16384])
@pytest.mark.parametrize("rows", [1, 3, 260])
def test_rms_norm(dtype: torch.dtype, hidden: int, rows: int) -> None:
    x = torch.randn(rows, hidden + 8, device="cuda").to(dtype)[:, :hidden]
    residual, weight = (torch.randn(n, device="cuda").to(dtype) for n in (rows * hidden, hidden))
    residual = residual.view(rows, hidden)
    for other in (None, residual):
        got = rms_norm(x, weight, 1e-5, residual=other, weight_offset=1.0, kernel="triton")
        out, stream = (got, x) if other is None else got
        assert torch.equal(stream, x if other is None else x + other)
        exact = rms_norm(stream.double(), weight.double(), 1e-5, weight_offset=1.0)
        assert_rows_close(out, exact, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "dim", "rotary"), [(32, 128, 128), (5, 80, 40), (1, 64, 64)])
@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary(dtype: torch.dtype, heads: int, dim: int, rotary: int, interleaved: bool) -> None:
    x = torch.randn(77, heads + 3, dim, device="cuda").to(dtype)[:, :heads]
    positions = torch.randint(0, 500, (77,), device="cuda")
    table = rotary_table(RotaryConfig(rotary), 500).cuda()
    out = rotary_embedding(x, positions, table, interleaved=interleaved, kernel="triton")
    exact = rotary_embedding(
        x.double(), positions, table, interleaved=interleaved, kernel="reference"
    )
    assert_rows_close(out, exact, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 1000, 14336])
def test_activations(dtype: torch.dtype, size: int) -> None:
    x = (3 * torch.randn(65, 2 * size, device="cuda")).to(dtype)
    assert_rows_close(silu_and_mul(x, kernel="triton"), silu_and_mul(x.double()), dtype)
    exact = gelu_and_mul(x.double(), "tanh")
    assert_rows_close(gelu_and_mul(x, "tanh", kernel="triton"), exact, dtype)
