"""linear against a float64 oracle, in every format: values, gradients, packing, refusals."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rooftile.ops.linear import FORMATS, LINEAR, best_format, linear, pack, unpack
from rooftile.types import PackedWeight
from tests.ops.accuracy import opcheck

HERE = [f for f in FORMATS if FORMATS[f].refusal("cpu", torch.float32) is None]


def assert_close(out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Within the rounding of the result and of a float32 sum of the absolute products.

    With a bias torch may round the product first, so that counts as well.
    """
    x, weight = x.double(), weight.double()
    expected, total = x @ weight.T, x.abs() @ weight.abs().T
    eps, sum_eps = torch.finfo(out.dtype).eps, torch.finfo(torch.float32).eps
    rounded = expected.abs()
    if bias is not None:
        expected, total = expected + bias.double(), total + bias.double().abs()
        rounded = rounded + expected.abs()
    allowed = eps * rounded + 4 * sum_eps * total + 1e-30
    assert out.shape == expected.shape
    assert bool(((out.double() - expected).abs() <= allowed).all())


@pytest.mark.parametrize("kernel", LINEAR.families)
@pytest.mark.parametrize("format", HERE)
@given(
    rows=st.sampled_from([(), (0,), (1,), (7,), (2, 3), (2, 0, 3), (33,)]),
    in_features=st.integers(1, 90),
    out_features=st.integers(1, 70),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    has_bias=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_equals_the_oracle(
    kernel: str,
    format: str,
    rows: tuple[int, ...],
    in_features: int,
    out_features: int,
    dtype: torch.dtype,
    has_bias: bool,
    seed: int,
) -> None:
    if FORMATS[format].refusal("cpu", dtype) is not None:
        pytest.skip("not on this machine")
    generator = torch.Generator().manual_seed(seed)
    # A slice of a wider tensor whose rest is NaN: not contiguous, and nothing else may be read.
    wide = torch.full((*rows, in_features + 5), torch.nan, dtype=dtype)
    wide[..., 2 : in_features + 2] = torch.randn(*rows, in_features, generator=generator)
    x = wide[..., 2 : in_features + 2]
    weight = torch.randn(in_features, out_features, generator=generator).to(dtype).T
    bias = torch.randn(out_features, generator=generator).to(dtype) if has_bias else None
    packed = pack(weight, format)
    assert packed.shape == (out_features, in_features)
    assert torch.equal(unpack(packed), weight)
    out = linear(x, packed, bias, kernel=kernel)
    assert out.dtype == dtype
    assert_close(out, x, weight, bias)


@pytest.mark.parametrize("kernel", LINEAR.families)
def test_half_precision_and_plain_tensors(kernel: str) -> None:
    x, weight = torch.randn(5, 24).half(), torch.randn(11, 24).half()
    out = linear(x, weight, kernel=kernel)
    assert_close(out, x, weight, None)
    assert torch.equal(out, linear(x, pack(weight, "dense"), kernel=kernel))


@pytest.mark.parametrize("kernel", LINEAR.families)
@pytest.mark.parametrize("shape", [(5,), (4, 5), (2, 3, 5), (0, 5)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_gradients(kernel: str, shape: tuple[int, ...], has_bias: bool) -> None:
    def tensor(*size: int) -> Tensor:
        return torch.randn(*size, dtype=torch.float64, requires_grad=True)

    inputs = [tensor(*shape), tensor(3, 5), *([tensor(3)] if has_bias else [])]
    assert torch.autograd.gradcheck(lambda *args: linear(*args, kernel=kernel), inputs)


def test_gradients_of_some_inputs_only() -> None:
    x, weight, bias = torch.randn(4, 5), torch.randn(3, 5), torch.randn(3, requires_grad=True)
    linear(x, weight, bias).sum().backward()
    assert torch.equal(bias.grad, torch.full((3,), 4.0))
    weight.requires_grad_()
    linear(x, weight).sum().backward()
    torch.testing.assert_close(weight.grad, x.sum(0).expand(3, 5))


@pytest.mark.parametrize("has_bias", [False, True])
def test_opcheck_and_compile(has_bias: bool) -> None:
    x, weight = torch.randn(4, 8, requires_grad=True), torch.randn(3, 8, requires_grad=True)
    bias = torch.randn(3, requires_grad=True) if has_bias else None
    opcheck(LINEAR, x, [weight], "dense", 3, bias)
    compiled = torch.compile(linear, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x, weight, bias), linear(x, weight, bias))
    for format in HERE:
        packed = pack(weight.detach(), format)
        with torch.no_grad():
            out = torch.compile(lambda x: linear(x, packed, bias) * 2, fullgraph=True)(x)  # noqa: B023
            torch.testing.assert_close(out, linear(x, packed, bias) * 2)


def test_best_format_is_one_that_this_machine_can_use() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        best = best_format("cpu", dtype)
        x, weight = torch.randn(2, 8).to(dtype), torch.randn(3, 8).to(dtype)
        assert linear(x, pack(weight, best)).shape == (2, 3)
    assert best_format(torch.device("cuda", 0), torch.bfloat16) == "dense"
    assert best_format("cpu", torch.float16) == "dense"


def test_packing_refuses_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(4, 8)
    with pytest.raises(ValueError, match="'int3' does not exist; choose one of 'dense', 'onednn'"):
        pack(weight, "int3")
    with pytest.raises(ValueError, match=r"weight has shape \[8\]; expected \[out_features, in"):
        pack(torch.randn(8), "dense")
    with pytest.raises(ValueError, match="weight has dtype torch.int64"):
        pack(torch.ones(4, 8, dtype=torch.long), "dense")
    with pytest.raises(NotImplementedError, match="not torch.float16; use format 'dense'"):
        pack(weight.half(), "onednn")
    with pytest.raises(NotImplementedError, match="for the CPU, not for 'meta'"):
        pack(weight.to("meta"), "onednn")
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    with pytest.raises(NotImplementedError, match="torch was built without oneDNN"):
        pack(weight, "onednn")
    assert best_format("cpu", torch.float32) == "dense"


@pytest.mark.skipif("onednn" not in HERE, reason="this torch has no oneDNN")
def test_packed_weights_have_no_gradient() -> None:
    x, weight = torch.randn(2, 8), torch.randn(4, 8)
    with pytest.raises(NotImplementedError, match="requires a gradient, which packed formats do"):
        pack(weight.clone().requires_grad_(), "onednn")
    with pytest.raises(NotImplementedError, match=r"is empty: \[0, 8\]"):
        pack(weight[:0], "onednn")
    packed = pack(weight, "onednn")
    x.requires_grad_()
    with pytest.raises(NotImplementedError, match="x requires a gradient, but .* pack it as 'den"):
        linear(x, packed)
    with pytest.raises(NotImplementedError, match="bias requires a gradient"):
        linear(x.detach(), packed, torch.zeros(4, requires_grad=True))
    with torch.no_grad():
        linear(x, packed)
    with pytest.raises(NotImplementedError, match="'onednn' has no gradient"):
        LINEAR.handle(x, list(packed.tensors.values()), "onednn", 4, None, "auto").sum().backward()


def test_calls_refuse_with_value_and_remedy() -> None:
    x, weight = torch.randn(2, 8), torch.randn(4, 8)
    with pytest.raises(ValueError, match=r"x has shape \[2, 7\]; expected .* in_features = 8"):
        linear(x[:, :7], weight)
    with pytest.raises(ValueError, match=r"x has shape \[\]; expected"):
        linear(torch.tensor(1.0), weight)
    with pytest.raises(ValueError, match=r"weight has shape \[8\]; expected"):
        linear(x, weight[0])
    with pytest.raises(ValueError, match="weight is torch.bfloat16 but x is torch.float32"):
        linear(x, weight.bfloat16())
    with pytest.raises(
        ValueError, match=r"bias has shape \[3\]; expected \[out_features\] = \[4\]"
    ):
        linear(x, weight, torch.zeros(3))
    with pytest.raises(ValueError, match="weight has format 'int3'; pack it as one of"):
        linear(x, PackedWeight("int3", {"weight": weight}, (4, 8)))
    with pytest.raises(ValueError, match="kernel='gluon' does not exist"):
        linear(x, weight, kernel="gluon")
    with pytest.raises(NotImplementedError, match="'torch' cannot run this call: it cannot read"):
        LINEAR.handle(x, [weight], "int3", 4, None, "torch")
