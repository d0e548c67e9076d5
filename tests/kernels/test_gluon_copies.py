"""Copies of operands with rows that the copy engine can address, in the simulator."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.support.gluon_sim import load_simulated, simulation

PAD = load_simulated("rooftile.kernels.gluon.gemm.pad")


def drawn(
    rows: int,
    columns: int,
    between: int,
    before: int,
    dtype: torch.dtype,
    generator: torch.Generator,
) -> Tensor:
    """A matrix that begins and ends anywhere; what is between its rows is NaN."""
    stride = columns + between
    size = before + rows * stride - between
    memory = torch.full((size + size % 2,), torch.nan).to(dtype)  # kernels count in two bytes
    x = memory.as_strided((rows, columns), (stride, 1), before)
    x.copy_(torch.randn(rows, columns, generator=generator).to(dtype))
    return x


@settings(max_examples=60)
@given(
    shapes=st.lists(
        st.tuples(st.integers(1, 140), st.integers(1, 1200), st.integers(0, 9), st.integers(0, 20)),
        min_size=1,
        max_size=2,
    ),
    dtype=st.sampled_from([torch.bfloat16, torch.float16, torch.float8_e4m3fn]),
    seed=st.integers(0, 2**31),
)
def test_they_equal_the_matrices(
    shapes: list[tuple[int, int, int, int]], dtype: torch.dtype, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    matrices = [drawn(*shape, dtype, generator) for shape in shapes]
    with simulation(seed=seed):
        copies = PAD.padded(*matrices)
    for x, copy in zip(matrices, copies, strict=True):
        assert torch.equal(copy.float(), x.float())
        assert copy.stride(0) * copy.element_size() % 128 == 0
        assert copy.stride(1) == 1


def test_columns_are_copied_too() -> None:
    x = torch.randn(9, 5).bfloat16()
    with simulation():
        (copy,) = PAD.padded(x.T)
    assert torch.equal(copy, x.T)
