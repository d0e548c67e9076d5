"""What a decoder is made of, as plain data: no weights, no framework of any checkpoint format."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rooftile.ops.rotary_table import RotaryConfig

ACTIVATIONS = ("silu", "gelu", "gelu_tanh")


@dataclass(frozen=True)
class AttentionSpec:
    """Grouped-query attention of one layer.

    window: how many earlier tokens a token sees beside itself; `None`: all of them. A model card's
        "sliding window of 4096" counts the token itself: window=4095.
    softmax_scale: `None` means head_dim ** -0.5.
    qk_norm: RMS norms over each head of q and k, before the rotation.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary: RotaryConfig | None = None
    window: int | None = None
    softmax_scale: float | None = None
    qk_norm: bool = False
    qkv_bias: bool = False
    out_bias: bool = False

    def __post_init__(self) -> None:
        for name in ("num_heads", "num_kv_heads", "head_dim"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"AttentionSpec: {name} is {getattr(self, name)}; it must be at least 1"
                )
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"AttentionSpec: num_heads = {self.num_heads} is not a multiple of "
                f"num_kv_heads = {self.num_kv_heads}"
            )
        if self.window is not None and self.window < 0:
            raise ValueError(f"AttentionSpec: window is {self.window}; it must not be negative")


@dataclass(frozen=True)
class MlpSpec:
    """down(activation(gate(x)) * up(x))."""

    intermediate: int
    activation: str = "silu"
    bias: bool = False

    def __post_init__(self) -> None:
        if self.intermediate < 1:
            raise ValueError(f"MlpSpec: intermediate is {self.intermediate}; it must be at least 1")
        if self.activation not in ACTIVATIONS:
            raise ValueError(
                f"MlpSpec: activation is {self.activation!r}; choose one of {', '.join(ACTIVATIONS)}"
            )


@dataclass(frozen=True)
class LayerSpec:
    attention: AttentionSpec
    mlp: MlpSpec


@dataclass(frozen=True)
class DecoderConfig:
    """A decoder: embedding, pre-norm layers, final norm, head.

    max_position: the longest sequence in tokens that rotary tables are made for.
    """

    layers: tuple[LayerSpec, ...]
    hidden: int
    vocab_size: int
    max_position: int
    norm_eps: float = 1e-6
    tie_embeddings: bool = False

    def __post_init__(self) -> None:
        for name in ("hidden", "vocab_size", "max_position"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"DecoderConfig: {name} is {getattr(self, name)}; it must be at least 1"
                )
        if not self.layers:
            raise ValueError("DecoderConfig: there are no layers")
