"""The weights that a decoder needs, by our names, and where they can come from."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from torch import Tensor

from rooftile.models.config import DecoderConfig, LayerSpec, MoeSpec

if TYPE_CHECKING:
    import numpy as np

WHOLE = slice(None)
LAMBDAS = ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2")  # of differential attention


class WeightSource(Protocol):
    """A checkpoint, spoken to in our names (see `weight_shapes`)."""

    def read(self, name: str, out: Tensor, rows: slice = WHOLE, columns: slice = WHOLE) -> None:
        """Write these rows (and columns, of a matrix) into `out`, in out's dtype and device."""


@dataclass(frozen=True)
class Blocks:
    """Rows of a matrix as a GGUF file stores them: quantised blocks of 32 columns of a row.

    data: [stored rows, bytes of a row] uint8; order: our row i is stored row order[i]; None: row i.
    """

    kind: str
    data: np.ndarray
    order: np.ndarray | None


@runtime_checkable
class BlockSource(Protocol):
    """A checkpoint whose matrices may be quantised already."""

    def blocks(self, name: str, rows: slice = WHOLE) -> Blocks | None:
        """These rows of a matrix, or `None` where it has no blocks of 32."""


def weight_shapes(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor of the model, unfused and whole, by our names. Matrices are [out, in]."""
    shapes: dict[str, tuple[int, ...]] = {"embedding": (config.vocab_size, config.hidden)}
    for index, layer in enumerate(config.layers):
        for name, shape in _layer_shapes(layer, config.hidden).items():
            shapes[f"layers.{index}.{name}"] = shape
    shapes["norm"] = (config.hidden,)
    if not config.tie_embeddings:
        shapes["head"] = (config.vocab_size, config.hidden)
    return shapes


def num_parameters(config: DecoderConfig) -> int:
    """Without a list of them all: a configuration may ask for more than can be listed."""
    count = config.hidden + config.vocab_size * config.hidden * (1 if config.tie_embeddings else 2)
    for layer, times in Counter(config.layers).items():
        count += times * sum(prod(shape) for shape in _layer_shapes(layer, config.hidden).values())
    return count


def _layer_shapes(layer: LayerSpec, hidden: int) -> dict[str, tuple[int, ...]]:
    attention, mlp = layer.attention, layer.mlp
    q = attention.num_heads * attention.head_dim
    differential = attention.differential
    # In the second version of differential attention two queries make one output.
    out = q // 2 if differential is not None and differential.lambda_init is None else q
    kv = attention.num_kv_heads * attention.head_dim
    matrices = {
        "q": (q, hidden, attention.qkv_bias),
        "k": (kv, hidden, attention.qkv_bias),
        "v": (kv, hidden, attention.qkv_bias),
        "o": (hidden, out, attention.out_bias),
    }
    if differential is not None and differential.lambda_init is None:
        matrices["lambda"] = (attention.num_heads // 2, hidden, False)
    inner = mlp.intermediate
    if isinstance(mlp, MoeSpec):
        matrices["router"] = (mlp.num_experts, hidden, False)
        for expert in range(mlp.num_experts):
            matrices[f"experts.{expert}.gate"] = (inner, hidden, False)
            matrices[f"experts.{expert}.up"] = (inner, hidden, False)
            matrices[f"experts.{expert}.down"] = (hidden, inner, False)
    else:
        matrices["gate"] = (inner, hidden, mlp.bias)
        matrices["up"] = (inner, hidden, mlp.bias)
        matrices["down"] = (hidden, inner, mlp.bias)
    shapes: dict[str, tuple[int, ...]] = {}
    for name, (out_features, in_features, has_bias) in matrices.items():
        shapes[name] = (out_features, in_features)
        if has_bias:
            shapes[f"{name}.bias"] = (out_features,)
    if layer.pre_norm:
        shapes["attention_norm"] = shapes["mlp_norm"] = (hidden,)
    if layer.post_norm:
        shapes["attention_post_norm"] = shapes["mlp_post_norm"] = (hidden,)
    if attention.qk_norm == "head":
        shapes["q_norm"] = shapes["k_norm"] = (attention.head_dim,)
    elif attention.qk_norm == "projection":
        shapes["q_norm"], shapes["k_norm"] = (q,), (kv,)
    if differential is not None and differential.lambda_init is not None:
        for name in LAMBDAS:
            shapes[name] = (attention.head_dim,)
        if differential.norm_weight:
            shapes["head_norm"] = (2 * attention.head_dim,)
    return shapes
