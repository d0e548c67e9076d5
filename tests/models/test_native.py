"""The native step equals the decoder that runs operator by operator, and says what it cannot run."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from rooftile.kernels.cpu import library
from rooftile.layers.mlp import GatedMlp
from rooftile.models.build import build_decoder
from rooftile.models.config import AttentionSpec, DecoderConfig, LayerSpec, MlpSpec, MoeSpec
from rooftile.models.decoder import Decoder
from rooftile.models.native import NativeStep, refusal
from rooftile.models.random_weights import RandomWeights
from rooftile.ops.rotary_table import RotaryConfig
from tests.models.paged import PagedRunner

pytestmark = pytest.mark.skipif(library.refusal() is not None, reason=str(library.refusal()))

ROTARY = RotaryConfig(16, base=100.0)
PLAIN = LayerSpec(AttentionSpec(6, 2, 16, rotary=ROTARY), MlpSpec(48))
LLAMA = DecoderConfig((PLAIN, PLAIN), hidden=40, vocab_size=75, max_position=64)
FEATURES = {
    "llama": LLAMA,
    "tied": replace(LLAMA, tie_embeddings=True),
    "no rotation, 9/3 heads, odd sizes": replace(
        LLAMA, layers=(LayerSpec(AttentionSpec(9, 3, 10), MlpSpec(16)),) * 2, hidden=33
    ),
    "biases and norms of heads": replace(
        LLAMA,
        layers=(
            LayerSpec(
                AttentionSpec(
                    *(5, 5, 16), rotary=ROTARY, qk_norm="head", qkv_bias=True, out_bias=True
                ),
                MlpSpec(32, bias=True),
            ),
        )
        * 2,
    ),
    "gemma": replace(
        LLAMA,
        layers=(
            LayerSpec(
                AttentionSpec(*(4, 1, 16), rotary=ROTARY, window=5, softcap=3.0, softmax_scale=0.3),
                MlpSpec(48, "gelu_tanh"),
                post_norm=True,
            ),
            LayerSpec(
                AttentionSpec(7, 1, 16, rotary=ROTARY), MlpSpec(48, "gelu_tanh"), post_norm=True
            ),
        ),
        norm_offset=1.0,
        embedding_scale=6.3,
        logits_softcap=0.5,
    ),
    "scales": replace(LLAMA, embedding_scale=3.0, residual_scale=0.4, logits_scale=0.25),
}


def make(config: DecoderConfig, dtype: torch.dtype, quantization: str = "none") -> Decoder:
    decoder = build_decoder(
        config, RandomWeights(config, 3), dtype=dtype, quantization=quantization
    )
    for layer in decoder.layers:  # random norms and larger scores than random weights give
        for norm in (layer.attention_norm, layer.mlp_norm, layer.attention_post_norm):
            if norm is not None:
                norm.weight.uniform_(0.5, 2.0)  # type: ignore[union-attr]
    return decoder


def results(model: Decoder | NativeStep) -> list[Tensor]:
    """Prefill of two sequences, a mixed step, decoding of both, and a sequence on shared pages."""
    runner = PagedRunner(model, sequences=3)  # type: ignore[arg-type]
    tokens = [(7 * i + 3) % 75 for i in range(40)]
    out = runner.run((0, tokens[:19]), (1, tokens[5:12]))
    out += runner.run((1, tokens[20:21]), (0, tokens[19:30]))
    for i in range(3):
        out += runner.run((0, [i]), (1, [i + 50]))
    runner.share_prefix(0, 2, 16)
    return out + runner.run((2, [9, 8, 7]))


@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
@pytest.mark.parametrize("name", FEATURES)
def test_equals_the_decoder(name: str, quantization: str) -> None:
    decoder = make(FEATURES[name], torch.float32, quantization)
    expected, actual = results(decoder), results(NativeStep(decoder))
    # Quantised activations may round to another step where two computations differ in a last bit.
    rtol = 2e-4 if quantization == "none" else 2e-2
    for one, other in zip(expected, actual, strict=True):
        assert one.shape == other.shape
        assert float((one - other).abs().max()) <= rtol * float(one.abs().max())


@pytest.mark.parametrize("name", ["llama", "gemma"])
@pytest.mark.parametrize("dtype", [torch.bfloat16])
def test_is_nearer_to_float32_than_the_decoder(name: str, dtype: torch.dtype) -> None:
    """In 16 bits both round, the native step less often."""
    decoder = make(FEATURES[name], dtype)
    exact = make(FEATURES[name], torch.float32)
    _copy_weights(exact, decoder)
    references = results(NativeStep(exact))

    def error(model: Decoder | NativeStep) -> float:
        pairs = zip(results(model), references, strict=True)
        return float(torch.stack([(a - b).square().mean() for a, b in pairs]).mean().sqrt())

    assert error(NativeStep(decoder)) <= 1.05 * error(decoder)


def _copy_weights(to: Decoder, source: Decoder) -> None:
    """Give a float32 decoder the exact values of a 16-bit one of the same shape."""
    from rooftile.ops.packed_weight import pack, unpack

    to.embedding.weight.copy_(source.embedding.weight)  # type: ignore[union-attr, arg-type]
    pairs = [(to.head.linear, source.head.linear)]
    norms = [(to.norm, source.norm)]
    for a, b in zip(to.layers, source.layers, strict=True):
        pairs += [(a.attention.qkv, b.attention.qkv), (a.attention.out, b.attention.out)]  # type: ignore[list-item]
        pairs += [(a.mlp.gate_up, b.mlp.gate_up), (a.mlp.down, b.mlp.down)]  # type: ignore[union-attr, list-item]
        for name in ("attention_norm", "attention_post_norm", "mlp_norm", "mlp_post_norm"):
            norms.append((getattr(a, name), getattr(b, name)))
    for mine, other in pairs:
        mine.weight = pack(unpack(other.weight).float(), mine.weight.format)
        mine._tensors = list(mine.weight.tensors.values())
    for mine_norm, other_norm in norms:
        if mine_norm is not None:
            mine_norm.weight.copy_(other_norm.weight)


def test_results_do_not_depend_on_threads() -> None:
    decoder = make(FEATURES["gemma"], torch.bfloat16)
    threads, outputs = torch.get_num_threads(), []
    try:
        for count in (1, 2, 7):
            torch.set_num_threads(count)
            outputs.append(torch.cat(results(NativeStep(decoder))))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0], outputs[2])


def test_refusals_give_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    assert refusal(make(LLAMA, torch.float32)) is None
    for message, layer in {
        "layer 0: its feed-forward layer is a mixture": replace(PLAIN, mlp=MoeSpec(4, 2, 16)),
        "layer 0: it has no norms before": replace(PLAIN, pre_norm=False, post_norm=True),
        "layer 0: its activation is 'gelu'": replace(PLAIN, mlp=MlpSpec(48, "gelu")),
        "a width that is no multiple of 16": replace(PLAIN, mlp=MlpSpec(50)),
        "norms of q and k span all heads": replace(
            PLAIN, attention=replace(PLAIN.attention, qk_norm="projection")
        ),
    }.items():
        config = replace(LLAMA, layers=(layer,))
        decoder = build_decoder(config, RandomWeights(config, 0), dtype=torch.float32)
        with pytest.raises(NotImplementedError, match=message):
            NativeStep(decoder)
    half = build_decoder(LLAMA, RandomWeights(LLAMA, 0), dtype=torch.float16)
    assert "format 'dense'" in str(refusal(half))
    monkeypatch.setattr(library, "load", lambda: "there is no compiler")
    assert refusal(half) == "there is no compiler"


def test_four_bits_where_they_harm_least() -> None:
    layer = make(LLAMA, torch.float32, "int4").layers[0]
    attention, mlp = layer.attention, layer.mlp
    assert isinstance(mlp, GatedMlp)
    formats = [x.weight.format for x in (attention.qkv, attention.out, mlp.gate_up, mlp.down)]
    assert formats == ["int8_blocks", "int4", "int4", "int8_blocks"]
