"""linear against a float64 oracle, in every format: values, gradients, packing, refusals."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rooftile.kernels.cpu import library
from rooftile.ops.linear import LINEAR, LinearCall, linear
from rooftile.ops.packed_weight import FORMATS, best_format, pack, unpack
from rooftile.types import PackedWeight
from tests.ops.accuracy import opcheck

HERE = [f for f in FORMATS if FORMATS[f].refusal("cpu", torch.float32) is None]
EXACT = [f for f in HERE if FORMATS[f].is_exact]
QUANTISED = [f for f in HERE if not FORMATS[f].is_exact]
# Largest code of each quantised format's range, from the least value of a group to the largest.
STEPS = {"int8": 254, "int8_blocks": 254, "int4": 15}


def skip_unless_possible(kernel: str, format: str, dtype: torch.dtype) -> None:
    if FORMATS[format].refusal("cpu", dtype) is not None:
        pytest.skip("not on this machine")
    if LINEAR.refusal(LinearCall("cpu", dtype, format), kernel) is not None:
        pytest.skip("not for this kernel")


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
@pytest.mark.parametrize("format", EXACT)
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
    skip_unless_possible(kernel, format, dtype)
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


@pytest.mark.parametrize("format", QUANTISED)
@given(
    in_features=st.integers(1, 90),
    out_features=st.integers(1, 70),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    seed=st.integers(0, 2**32),
)
def test_quantised_weights_are_half_a_step_away_at_most(
    format: str, in_features: int, out_features: int, dtype: torch.dtype, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(in_features, out_features, generator=generator).to(dtype).T
    weight[0] = 0.25  # a row without a range
    packed = pack(weight, format)
    values = unpack(packed)
    assert values.dtype == torch.float32
    assert values.shape == weight.shape == packed.shape
    span = in_features if format == "int8" else 32
    for start in range(0, in_features, span):
        group, got = weight[:, start : start + span].double(), values[:, start : start + span]
        low, high = group.amin(1, keepdim=True), group.amax(1, keepdim=True)
        if format != "int4":
            high = group.abs().amax(1, keepdim=True)
            low = -high
        # The search trades the ends of a range for its middle; scales have 16 bits, and those of
        # the smallest weights are multiples of 2^-24, of which a weight is up to 127.
        most = (0.5 if format != "int4" else 2.5) * (high - low) / STEPS[format]
        rounding = 1e-3 * group.abs() + 127 * 2**-25
        assert bool(((got - group).abs() <= 1.02 * most + rounding).all())
        plain = (high - low) / STEPS[format]
        whole = (plain.square() / 4 + rounding.square()).sum()
        assert float((got - group).square().sum()) <= float(whole)


@pytest.mark.parametrize("kernel", ["cpu", "reference"])
@pytest.mark.parametrize("format", QUANTISED)
@given(
    rows=st.sampled_from([(), (0,), (1,), (2,), (5,), (7,), (2, 3), (33,), (200,)]),
    in_features=st.integers(1, 150),
    out_features=st.integers(1, 70),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    has_bias=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_quantised_products_equal_those_of_the_dequantised_weight(
    kernel: str,
    format: str,
    rows: tuple[int, ...],
    in_features: int,
    out_features: int,
    dtype: torch.dtype,
    has_bias: bool,
    seed: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    wide = torch.full((*rows, in_features + 5), torch.nan, dtype=dtype)
    wide[..., 2 : in_features + 2] = torch.randn(*rows, in_features, generator=generator)
    x = wide[..., 2 : in_features + 2]
    weight = torch.randn(out_features, in_features, generator=generator)
    bias = torch.randn(out_features, generator=generator).to(dtype) if has_bias else None
    packed = pack(weight, format)
    out = linear(x, packed, bias, kernel=kernel).double()
    dense, exact = unpack(packed).double(), x.double()
    expected = exact @ dense.T if bias is None else exact @ dense.T + bias.double()
    # Activations are rounded to 127 steps of the largest among 32.
    step = torch.zeros_like(exact)
    for start in range(0, in_features, 32):
        group = exact[..., start : start + 32]
        step[..., start : start + 32] = group.abs().amax(-1, keepdim=True) / 127
    noise = 0 if kernel == "reference" else 0.5 * step @ dense.abs().T
    total = exact.abs() @ dense.abs().T + 1
    allowed = 1.01 * noise + torch.finfo(dtype).eps * (expected.abs() + 0.1) + 4e-6 * total
    assert bool(((out - expected).abs() <= allowed).all())


@pytest.mark.parametrize("format", QUANTISED)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_does_not_look_finite_afterwards(format: str, bad: float) -> None:
    x, packed = torch.randn(5, 70), pack(torch.randn(20, 70), format)
    clean = linear(x, packed)
    x[3, 40] = bad
    out = linear(x, packed)
    assert not bool(out[3].isfinite().any())
    others = [0, 1, 2, 4]
    assert torch.equal(out[others], clean[others])


@pytest.mark.parametrize("format", [f for f in HERE if f not in ("dense", "onednn")])
def test_results_do_not_depend_on_threads(format: str) -> None:
    x, packed = torch.randn(70, 200), pack(torch.randn(333, 200), format)
    threads, results = torch.get_num_threads(), []
    try:
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            results.append(linear(x, packed, kernel="cpu"))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@pytest.mark.parametrize("kernel", ["torch", "reference"])
def test_half_precision_and_plain_tensors(kernel: str) -> None:
    x, weight = torch.randn(5, 24).half(), torch.randn(11, 24).half()
    out = linear(x, weight, kernel=kernel)
    assert_close(out, x, weight, None)
    assert torch.equal(out, linear(x, pack(weight, "dense"), kernel=kernel))


@pytest.mark.parametrize("kernel", ["torch", "reference"])
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
        torch._dynamo.reset()  # each format compiles anew
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
    monkeypatch.setattr(library, "load", lambda: "there is no compiler")
    with pytest.raises(NotImplementedError, match="'int4': there is no compiler; use format 'dens"):
        pack(weight, "int4")
    call = LinearCall("cpu", torch.float32, "tiled")
    assert LINEAR.refusal(call, "cpu") == "there is no compiler"
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
    with pytest.raises(ValueError, match="kernel='cutlass' does not exist"):
        linear(x, weight, kernel="cutlass")
    with pytest.raises(NotImplementedError, match="'torch' cannot run this call: it reads weights"):
        LINEAR.handle(x, [weight], "int3", 4, None, "torch")
