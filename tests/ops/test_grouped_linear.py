"""grouped_linear against a float64 oracle, group by group: values, contracts, refusals."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from rooftile.ops.grouped_linear import GROUPED_LINEAR, grouped_linear
from tests.ops.accuracy import dtype_for, kernels_to_test, opcheck

KERNELS = kernels_to_test(GROUPED_LINEAR)


@pytest.mark.parametrize("kernel", KERNELS)
@example([40, 33, 9, 40, 0, 40, 40], 7, 150, torch.float32, torch.int64, 0)  # sections of tiles
@given(
    sizes=st.lists(st.sampled_from([0, 1, 2, 5, 9, 16, 40]), min_size=1, max_size=7),
    in_features=st.integers(1, 40),
    out_features=st.one_of(st.integers(1, 30), st.just(150)),  # more than a tile's too
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
    index=st.sampled_from([torch.int32, torch.int64]),
    seed=st.integers(0, 2**32),
)
def test_equals_the_oracle(
    kernel: str,
    sizes: list[int],
    in_features: int,
    out_features: int,
    dtype: torch.dtype,
    index: torch.dtype,
    seed: int,
) -> None:
    if kernel == "triton" and dtype == torch.bfloat16:
        dtype = torch.float16  # which its interpreter multiplies
    dtype = dtype_for(kernel, dtype)
    generator = torch.Generator().manual_seed(seed)
    # Slices of wider tensors whose rest is NaN; so are the matrices of groups without rows.
    x = torch.full((sum(sizes), in_features + 3), torch.nan, dtype=dtype)[:, 1:-2]
    x.copy_(torch.randn(x.shape, generator=generator))
    weight = torch.full((len(sizes), out_features, in_features + 2), torch.nan, dtype=dtype)
    weight = weight[..., :-2]
    for group, size in enumerate(sizes):
        if size:
            weight[group] = torch.randn(weight.shape[1:], generator=generator)
    out = grouped_linear(x, weight, torch.tensor(sizes, dtype=index), kernel=kernel)
    assert out.shape == (sum(sizes), out_features)
    assert out.dtype == dtype
    rows = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes)).tolist()
    eps, sum_eps = (
        torch.finfo(dtype).eps,
        torch.finfo(torch.promote_types(dtype, torch.float32)).eps,
    )
    for row, group in enumerate(rows):
        matrix, vector = weight[group].double(), x[row].double()
        expected, total = matrix @ vector, matrix.abs() @ vector.abs()
        allowed = eps * expected.abs() + 4 * sum_eps * total + 1e-30
        assert bool(((out[row].double() - expected).abs() <= allowed).all())


@pytest.mark.skipif(KERNELS == ["triton"], reason="opcheck runs what 'auto' takes")
def test_opcheck_and_compile() -> None:
    x, weight, sizes = torch.randn(5, 8), torch.randn(3, 4, 8), torch.tensor([2, 0, 3])
    opcheck(GROUPED_LINEAR, x, weight, sizes)
    compiled = torch.compile(grouped_linear, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x, weight, sizes), grouped_linear(x, weight, sizes))


def test_refusals_name_the_value_and_the_remedy() -> None:
    x, weight, sizes = torch.randn(5, 8), torch.randn(2, 4, 8), torch.tensor([2, 3])
    with pytest.raises(ValueError, match=r"group_sizes is \[2, 2\]; .* the 5 rows of x"):
        grouped_linear(x, weight, torch.tensor([2, 2]))
    with pytest.raises(ValueError, match=r"group_sizes is \[-1, 6\]; sizes must not be negative"):
        grouped_linear(x, weight, torch.tensor([-1, 6]))
    with pytest.raises(
        ValueError, match=r"group_sizes has shape \[3\]; expected \[groups\] = \[2\]"
    ):
        grouped_linear(x, weight, torch.tensor([2, 3, 0]))
    with pytest.raises(ValueError, match=r"dtype torch.float32; convert it to torch.int64"):
        grouped_linear(x, weight, sizes.float())
    with pytest.raises(ValueError, match=r"x has shape \[5, 7\]; expected .* in_features = 8"):
        grouped_linear(x[:, 1:], weight, sizes)
    with pytest.raises(ValueError, match=r"weight has shape \[4, 8\]; expected \[groups, out"):
        grouped_linear(x, weight[0], sizes)
    with pytest.raises(ValueError, match="weight is torch.float64 but x is torch.float32"):
        grouped_linear(x, weight.double(), sizes)
    with pytest.raises(NotImplementedError, match="requires a gradient.*`linear` for each group"):
        grouped_linear(x.requires_grad_(), weight, sizes)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("mean", [1, 12, 40, 64, 300])  # rows a group: each shape of tiles
def test_on_a_gpu(mean: int, dtype: torch.dtype) -> None:
    generator = torch.Generator("cuda").manual_seed(mean)
    sizes = torch.tensor([mean, 0, 2 * mean, mean - 1, 1, 3 * mean + 1, 0, mean], device="cuda")
    x = torch.randn((int(sizes.sum()), 200), generator=generator, device="cuda").to(dtype)
    weight = torch.randn((len(sizes), 520, 200), generator=generator, device="cuda").to(dtype)
    weight[sizes == 0] = torch.nan
    out = grouped_linear(x, weight, sizes, kernel="triton")
    exact = grouped_linear(x.double(), weight.double(), sizes, kernel="torch")
    total = grouped_linear(x.double().abs(), weight.double().abs(), sizes, kernel="torch")
    allowed = torch.finfo(dtype).eps * exact.abs() + 4 * torch.finfo(torch.float32).eps * total
    assert bool(((out.double() - exact).abs() <= allowed).all())
