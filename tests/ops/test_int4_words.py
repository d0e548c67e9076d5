"""Packed int4 weights for GPUs: packing, values, products by the reference, refusals."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rooftile.kernels.reference import int4_words
from rooftile.ops.gemm import matmul
from rooftile.ops.linear import linear
from rooftile.ops.packed_weight import pack, unpack
from rooftile.types import PackedWeight


def packed(weight: Tensor) -> PackedWeight:
    """As `pack` makes it for a GPU."""
    return PackedWeight("int4_words", int4_words.pack(weight), (weight.shape[0], weight.shape[1]))


@given(n=st.integers(1, 20), k=st.integers(1, 300), seed=st.integers(0, 2**32))
def test_values_are_near_the_weight(n: int, k: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(n, k, generator=generator)
    weight[0] = 0
    values = unpack(packed(weight))
    assert values.shape == weight.shape
    assert torch.equal(values, values.bfloat16().float())
    assert bool((values[0] == 0).all())
    for start in range(0, k, 32):
        group, got = weight[:, start : start + 32], values[:, start : start + 32]
        step = group.abs().amax(1, keepdim=True) / 8
        # Sixteen codes for both signs: the end that has no code of its own is a step away.
        assert bool(((got - group).abs() <= 1.7 * step + 1e-6).all())
        # No worse than the plain scale alone.
        assert float((got - group).square().sum()) <= float((step.square() / 3).sum() * 32 + 1e-6)


def test_the_words_lie_as_the_tensor_core_reads_them() -> None:
    """Word 4 q + w of a block has k = 32 w + 8 q and the seven after it, pairs 16 bits apart."""
    weight = torch.zeros(1, 256)
    weight[0, 0] = -8.0  # the scale of the first group is 1
    weight[0, 128 + 32 * 2] = -8.0
    weight[0, 128 + 32 * 2 + 8 * 3 + 5] = 3.0
    tensors = int4_words.pack(weight)
    scale = tensors["scale"][0]
    assert scale[0] == scale[6] == 1
    word = int(tensors["weight"][0, 16 + 4 * 3 + 2])
    assert [(word >> (4 * (e // 2) + 16 * (e % 2))) & 15 for e in range(8)] == [8] * 5 + [11, 8, 8]


@given(
    m=st.sampled_from([(), (1,), (5,), (2, 3), (0,)]),
    n=st.integers(1, 40),
    k=st.integers(1, 200),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 2**32),
)
def test_products_equal_those_of_the_values(
    m: tuple[int, ...], n: int, k: int, dtype: torch.dtype, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*m, k, generator=generator).to(dtype)
    bias = torch.randn(n, generator=generator).to(dtype)
    weight = packed(torch.randn(n, k, generator=generator))
    exact = x.double() @ unpack(weight).double().T + bias.double()
    total = x.double().abs() @ unpack(weight).double().abs().T + bias.double().abs() + 1
    allowed = torch.finfo(dtype).eps * exact.abs() + 1e-6 * total
    got = linear(x, weight, bias)
    assert bool(((got.double() - exact).abs() <= allowed).all())
    if len(m) == 1:
        got = matmul(x, weight, bias)
        assert bool(((got.double() - exact).abs() <= allowed).all())


def test_refusals() -> None:
    weight = packed(torch.randn(5, 40))
    with pytest.raises(NotImplementedError, match="for an NVIDIA GPU, not for 'cpu'; use format"):
        pack(torch.randn(5, 40), "int4_words")
    with pytest.raises(ValueError, match=r"a has shape \[3, 41\] and b \[40, 5\]; expected"):
        matmul(torch.randn(3, 41), weight)
    with pytest.raises(ValueError, match="scales are given with a packed weight"):
        matmul(torch.randn(3, 40), weight, scale_b=torch.ones(()))
    with pytest.raises(ValueError, match="b has format 'int8'; pack it as 'int4_words'"):
        matmul(torch.randn(3, 40), PackedWeight("int8", weight.tensors, (5, 40)))
    with pytest.raises(NotImplementedError, match="reads dense weights, not int4 codes"):
        matmul(torch.randn(3, 40), weight, kernel="torch")
    with pytest.raises(NotImplementedError, match="packed weight has no gradient"):
        matmul(torch.randn(3, 40, requires_grad=True), weight).sum().backward()


def test_compiles() -> None:
    x, weight = torch.randn(3, 40), packed(torch.randn(6, 40))
    run = torch.compile(lambda x: matmul(x, weight) * 2, fullgraph=True, backend="aot_eager")
    assert torch.equal(run(x), matmul(x, weight) * 2)
