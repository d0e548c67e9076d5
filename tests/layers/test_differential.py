"""The differential layers, as the two repositories and the paper write them, in a decoder of ours."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from rooftile.layers.differential import lambda_init
from rooftile.models.build import build_decoder
from rooftile.models.config import (
    AttentionSpec,
    DecoderConfig,
    DifferentialSpec,
    LayerSpec,
    MlpSpec,
)
from rooftile.models.weights import WHOLE, weight_shapes
from rooftile.ops.attention import attention
from rooftile.ops.rope import rotary_embedding
from rooftile.ops.rotary_table import RotaryConfig, rotary_table
from tests.models.paged import PagedRunner

HEADS, KV_HEADS, DIM, HIDDEN, LENGTH = 8, 4, 6, 20, 11
ROTARY = RotaryConfig(DIM, 100.0)


class Given:
    """Weights by our names, and all others random."""

    def __init__(self, config: DecoderConfig) -> None:
        self.tensors = {name: torch.randn(s) * 0.3 for name, s in weight_shapes(config).items()}

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[f"layers.0.{name}"].double()

    def read(self, name: str, out: Tensor, rows: slice = WHOLE, columns: slice = WHOLE) -> None:
        whole = self.tensors[name]
        out.copy_(whole[rows] if whole.dim() == 1 else whole[rows, columns])


def decoder_config(spec: DifferentialSpec, kv_heads: int = KV_HEADS) -> DecoderConfig:
    layer = LayerSpec(
        AttentionSpec(HEADS, kv_heads, DIM, ROTARY, differential=spec), MlpSpec(16), pre_norm=False
    )
    return DecoderConfig((layer,), HIDDEN, 30, LENGTH, norm_eps=1e-5)


def run(config: DecoderConfig, weights: Given, tokens: list[int], step: int) -> Tensor:
    """What the layer returns for these tokens, in steps of so many."""
    decoder = build_decoder(config, weights, dtype=torch.float32)
    runner, layer, seen = PagedRunner(decoder), decoder.layers[0].attention, []
    plain = type(layer).__call__

    def watched(self: object, *arguments: object) -> Tensor:
        seen.append(plain(layer, *arguments))  # type: ignore[arg-type]
        return seen[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(layer), "__call__", watched)
        for start in range(0, len(tokens), step):
            runner.run((0, tokens[start : start + step]))
    return torch.cat(seen).double()


def projected(weights: Given, tokens: list[int], kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Rotated queries and keys, and values, [tokens, heads, dim], in the checkpoint's order."""
    x = weights.tensors["embedding"].double()[tokens]
    at, table = torch.arange(len(tokens)), rotary_table(ROTARY, LENGTH)
    q = (x @ weights["q"].T).unflatten(1, (HEADS, DIM))
    k = (x @ weights["k"].T).unflatten(1, (kv_heads, DIM))
    v = (x @ weights["v"].T).unflatten(1, (kv_heads, DIM))
    return rotary_embedding(q, at, table), rotary_embedding(k, at, table), v


def one(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out = attention(q[None], k[None], v[None], causal=True, kernel="reference")
    assert isinstance(out, Tensor)
    return out[0]


def finish(out: Tensor, weights: Given, initial: float, norm_weight: Tensor | float) -> Tensor:
    out = out / torch.sqrt(out.square().mean(-1, keepdim=True) + 1e-5) * norm_weight
    return ((1 - initial) * out).flatten(1) @ weights["o"].T


def lam_of(weights: Given, initial: float) -> float:
    products = [float((weights[f"lambda_q{n}"] * weights[f"lambda_k{n}"]).sum()) for n in (1, 2)]
    return math.exp(products[0]) - math.exp(products[1]) + initial


TOKENS = torch.randint(0, 30, (LENGTH,), generator=torch.Generator().manual_seed(5)).tolist()


@pytest.mark.parametrize("step", [1, 4, LENGTH])
def test_microsofts_form(step: int) -> None:
    """Heads 2 p and 2 p + 1 make a pair, values have twice the width, the norm has a weight."""
    initial = lambda_init(0)
    config = decoder_config(DifferentialSpec(initial, halves=False, norm_weight=True))
    weights = Given(config)
    q, k, v = projected(weights, TOKENS, KV_HEADS)
    wide_v = v.flatten(1).unflatten(1, (KV_HEADS // 2, 2 * DIM))
    first = one(q[:, 0::2], k[:, 0::2], wide_v)
    second = one(q[:, 1::2], k[:, 1::2], wide_v)
    expected = finish(
        first - lam_of(weights, initial) * second, weights, initial, weights["head_norm"]
    )
    torch.testing.assert_close(run(config, weights, TOKENS, step), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("step", [1, 4, LENGTH])
def test_diffllamas_form(step: int) -> None:
    """Heads p and p + half make a pair, and so do key-value heads, whose values are concatenated."""
    initial = lambda_init(3)
    config = decoder_config(DifferentialSpec(initial))
    weights = Given(config)
    q, k, v = projected(weights, TOKENS, KV_HEADS)
    half, kv_half = HEADS // 2, KV_HEADS // 2
    wide_v = torch.cat((v[:, :kv_half], v[:, kv_half:]), -1)
    first = one(q[:, :half], k[:, :kv_half], wide_v)
    second = one(q[:, half:], k[:, kv_half:], wide_v)
    expected = finish(first - lam_of(weights, initial) * second, weights, initial, 1.0)
    torch.testing.assert_close(run(config, weights, TOKENS, step), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kv_heads", [2, 1])
@pytest.mark.parametrize("step", [1, LENGTH])
def test_the_second_version(kv_heads: int, step: int) -> None:
    """One attention, then the odd heads are subtracted, times the sigmoid of a projection."""
    config = decoder_config(DifferentialSpec(None), kv_heads)
    weights = Given(config)
    q, k, v = projected(weights, TOKENS, kv_heads)
    out = one(q, k, v)
    x = weights.tensors["embedding"].double()[TOKENS]
    lam = torch.sigmoid(x @ weights["lambda"].T)[..., None]
    expected = (out[:, 0::2] - lam * out[:, 1::2]).flatten(1) @ weights["o"].T
    torch.testing.assert_close(run(config, weights, TOKENS, step), expected, rtol=1e-4, atol=1e-4)


def test_lambda_begins_near_a_fifth_and_grows_with_depth() -> None:
    assert lambda_init(0) == pytest.approx(0.2)
    assert lambda_init(3) == pytest.approx(0.8 - 0.6 * math.exp(-0.9))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_kv_heads": 1}, "num_kv_heads is 1; it must be even, since heads come in pairs"),
        ({"softcap": 3.0}, "softcap is 3.0; differential attention has none"),
        (
            {"differential": DifferentialSpec(None), "num_heads": 4, "num_kv_heads": 4},
            "num_heads / num_kv_heads is 1; it must be even",
        ),
    ],
)
def test_specs_that_make_no_sense(change: dict[str, object], message: str) -> None:
    given = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8}
    given |= {"differential": DifferentialSpec(0.2)}
    with pytest.raises(ValueError, match=message):
        AttentionSpec(**(given | change))  # type: ignore[arg-type]
