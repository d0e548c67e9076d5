"""The product of whole tiles in Triton's interpreter: TRITON_INTERPRET=1, a process of its own."""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rooftile.kernels.reference import gemm as reference

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1, in a process of its own", allow_module_level=True)
pytest.importorskip("triton", reason="Triton is not installed")

from rooftile.kernels.gluon.gemm.tile_plan import TilePlan
from rooftile.kernels.triton import gemm_tiles


def inside(x: Tensor, offset: int) -> Tensor:
    """The same matrix within a wider one whose rest is NaN."""
    rows, columns = x.shape
    wide = torch.full((rows, columns + 2 * offset + 1), torch.nan, dtype=x.dtype)
    wide[:, offset : offset + columns] = x
    return wide[:, offset : offset + columns]


@settings(max_examples=30, deadline=None)
@given(
    tile=st.sampled_from([(64, 32), (64, 64), (128, 64)]),
    m=st.sampled_from([1, 63, 64, 130]),
    n=st.sampled_from([1, 8, 31, 66, 128]),
    k=st.sampled_from([1, 8, 64, 65, 130]),
    offset=st.sampled_from([None, 0, 1, 3]),
    out=st.sampled_from([torch.float16, torch.float32]),
    has_bias=st.booleans(),
    has_residual=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_integers_come_out_exactly(
    tile: tuple[int, int],
    m: int,
    n: int,
    k: int,
    offset: int | None,
    out: torch.dtype,
    has_bias: bool,
    has_residual: bool,
    seed: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        x = torch.randint(-2, 3, shape, generator=generator).half()
        return x if offset is None or len(shape) == 1 else inside(x, offset)

    a, b = draw(m, k), draw(n, k)
    bias = draw(n) if has_bias else None
    residual = draw(m, n) if has_residual else None
    got = gemm_tiles.matmul(a, b, bias, residual, "none", out, TilePlan(*tile))
    wide = [None if x is None else x.double() for x in (a, b.T, bias, residual)]
    exact = reference.matmul(*wide, None, None, "none", torch.float64, False)  # type: ignore[arg-type]
    assert torch.equal(got, exact.to(out))
