"""Every level of instructions computes what the best one of this machine does."""

from __future__ import annotations

import pytest
import torch

from rooftile.kernels.cpu import library
from rooftile.models.native import NativeStep
from rooftile.ops.linear import linear
from rooftile.ops.norm import rms_norm
from rooftile.ops.packed_weight import pack, unpack
from rooftile.ops.sampling import SamplingTensors, sample
from tests.kernels.test_cpu_attention import LEVELS
from tests.models.test_native import FEATURES, make, results

pytestmark = pytest.mark.skipif(library.refusal() is not None, reason=str(library.refusal()))
at_every_level = pytest.mark.parametrize("level", LEVELS)


@at_every_level
@pytest.mark.parametrize("format", ["tiled", "int8", "int4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_linear(level: str, format: str, dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(0)
    for rows, columns, tokens in ((75, 70, 1), (33, 96, 13), (16, 31, 40)):
        packed = pack(torch.randn(rows, columns, generator=g).to(dtype), format)
        x = torch.randn(tokens, columns, generator=g).to(dtype)
        expected = x.double() @ unpack(packed).double().T
        with library.at_level(level):
            out = linear(x, packed).double()
        error = (out - expected).norm() / expected.norm()
        # Queries of quantised weights become 8 bits.
        assert error < (0.01 if format != "tiled" else 1e-2 if dtype == torch.bfloat16 else 1e-5)


@at_every_level
@pytest.mark.parametrize("quantization", ["none", "int4"])
@pytest.mark.parametrize("name", ["llama", "gemma"])
def test_native_step(level: str, quantization: str, name: str) -> None:
    decoder = make(FEATURES[name], torch.float32, quantization)
    expected = results(NativeStep(decoder))
    with library.at_level(level):
        actual = results(NativeStep(decoder))
    rtol = 2e-4 if quantization == "none" else 2e-2
    for one, other in zip(expected, actual, strict=True):
        assert float((one - other).abs().max()) <= rtol * float(one.abs().max())


@at_every_level
def test_sampling_and_norm(level: str) -> None:
    g = torch.Generator().manual_seed(3)
    logits = 3 * torch.randn(6, 1003, generator=g)
    params = SamplingTensors(
        temperature=torch.tensor([0.0, 1.0, 0.7, 1.0, 1.0, 2.0]),
        top_k=torch.tensor([0, 0, 5, 0, 300, 0]),
        top_p=torch.tensor([1.0, 1.0, 0.9, 0.5, 1.0, 1.0]),
        min_p=torch.tensor([0.0, 0.0, 0.0, 0.0, 0.0, 0.2]),
        seeds=torch.arange(6),
        position=torch.arange(6),
    )
    expected = sample(logits, params, kernel="reference")
    x, weight = torch.randn(5, 70, generator=g), torch.randn(70, generator=g)
    with library.at_level(level):
        out = sample(logits, params, kernel="cpu")
        normed = rms_norm(x, weight, 1e-5)
    assert torch.equal(out.token_ids, expected.token_ids)
    torch.testing.assert_close(out.logprobs, expected.logprobs)
    torch.testing.assert_close(normed, torch.nn.functional.rms_norm(x, (70,), weight, 1e-5))
