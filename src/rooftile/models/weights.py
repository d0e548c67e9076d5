"""The weights that a decoder needs, by our names, and where they can come from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor

from rooftile.models.config import DecoderConfig

WHOLE = slice(None)


class WeightSource(Protocol):
    """A checkpoint, spoken to in our names (see `weight_shapes`).

    shapes: of the tensors that it has.
    unexpected: its own names of tensors that no part of this model uses.
    """

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]: ...

    @property
    def unexpected(self) -> tuple[str, ...]: ...

    def label(self, name: str) -> str:
        """How the checkpoint itself calls this tensor, for messages."""

    def read(self, name: str, out: Tensor, rows: slice = WHOLE, columns: slice = WHOLE) -> None:
        """Write these rows (and columns, of a matrix) into `out`, in out's dtype and device."""


def weight_shapes(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor of the model, unfused and whole, by our names. Matrices are [out, in]."""
    hidden = config.hidden
    shapes: dict[str, tuple[int, ...]] = {"embedding": (config.vocab_size, hidden)}
    for index, layer in enumerate(config.layers):
        attention, mlp = layer.attention, layer.mlp
        q = attention.num_heads * attention.head_dim
        kv = attention.num_kv_heads * attention.head_dim
        matrices = {
            "q": (q, hidden, attention.qkv_bias),
            "k": (kv, hidden, attention.qkv_bias),
            "v": (kv, hidden, attention.qkv_bias),
            "o": (hidden, q, attention.out_bias),
            "gate": (mlp.intermediate, hidden, mlp.bias),
            "up": (mlp.intermediate, hidden, mlp.bias),
            "down": (hidden, mlp.intermediate, mlp.bias),
        }
        prefix = f"layers.{index}."
        for name, (out_features, in_features, has_bias) in matrices.items():
            shapes[f"{prefix}{name}"] = (out_features, in_features)
            if has_bias:
                shapes[f"{prefix}{name}.bias"] = (out_features,)
        shapes[f"{prefix}attention_norm"] = shapes[f"{prefix}mlp_norm"] = (hidden,)
        if attention.qk_norm:
            shapes[f"{prefix}q_norm"] = shapes[f"{prefix}k_norm"] = (attention.head_dim,)
    shapes["norm"] = (hidden,)
    if not config.tie_embeddings:
        shapes["head"] = (config.vocab_size, hidden)
    return shapes


def check_weights(config: DecoderConfig, source: WeightSource, where: str) -> None:
    """One error that lists every missing, unexpected and misshapen tensor of a checkpoint."""
    expected = weight_shapes(config)
    missing = [source.label(name) for name in expected if name not in source.shapes]
    unexpected = [
        *source.unexpected,
        *(source.label(name) for name in source.shapes if name not in expected),
    ]
    misshapen = [
        f"{source.label(name)} is {list(source.shapes[name])}, expected {list(shape)}"
        for name, shape in expected.items()
        if name in source.shapes and source.shapes[name] != shape
    ]
    problems = {"missing": missing, "unexpected": unexpected, "misshapen": misshapen}
    if any(problems.values()):
        lines = [
            f"  {len(names)} {kind}: {', '.join(names)}"
            for kind, names in problems.items()
            if names
        ]
        raise ValueError(
            f"{where}: the tensors do not fit the model that its configuration describes\n"
            + "\n".join(lines)
        )
