"""What a decoder is made of, as plain data: no weights, no framework of any checkpoint format."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rooftile.ops.dual_chunk_rotary import DualChunkConfig
    from rooftile.ops.rotary_table import RotaryConfig

ACTIVATIONS = ("silu", "gelu", "gelu_tanh")
QK_NORMS = (None, "head", "projection")


@dataclass(frozen=True)
class DifferentialSpec:
    """Heads in pairs whose softmaxes are subtracted (`ops.differential`).

    lambda_init: what lambda begins with in this layer, learned as four vectors of head_dim; `None`:
        the second version, where lambda is the sigmoid of a projection for each token and pair,
        and the queries of a pair meet the same keys and values.
    halves: heads p and p + half of all are a pair in the checkpoint (DiffLlama), queries, keys and
        values alike; else 2 p and 2 p + 1 are (Microsoft). Here pairs are always adjacent.
    norm_weight: whether the norm of each pair's output has a weight.
    """

    lambda_init: float | None
    halves: bool = True
    norm_weight: bool = False


@dataclass(frozen=True)
class AttentionSpec:
    """Grouped-query attention of one layer.

    window: how many earlier tokens a token sees beside itself; `None`: all of them. A model card's
        "sliding window of 4096" counts the token itself: window=4095.
    softmax_scale: `None` means head_dim ** -0.5.
    softcap: scores become softcap * tanh(score / softcap); 0: they stay as they are.
    qk_norm: RMS norms of q and k before the rotation, over each "head" or over all heads of a
        "projection" together; `None`: there are none.
    dual_chunk: positions and queries are those of dual chunk attention.
    differential: num_heads and num_kv_heads count both heads of a pair.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary: RotaryConfig | None = None
    window: int | None = None
    softmax_scale: float | None = None
    softcap: float = 0.0
    qk_norm: str | None = None
    qkv_bias: bool = False
    out_bias: bool = False
    dual_chunk: DualChunkConfig | None = None
    differential: DifferentialSpec | None = None

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
        if self.qk_norm not in QK_NORMS:
            raise ValueError(
                f"AttentionSpec: qk_norm is {self.qk_norm!r}; choose one of {QK_NORMS}"
            )
        self._check_dual_chunk()
        self._check_differential()

    def _check_dual_chunk(self) -> None:
        if self.dual_chunk is None:
            return
        if self.rotary is None or self.window is not None or self.differential is not None:
            raise ValueError(
                "AttentionSpec: dual_chunk is given, which needs rotary, and neither window nor "
                "differential"
            )

    def _check_differential(self) -> None:
        if self.differential is None:
            return
        if self.softcap:
            raise ValueError(
                f"AttentionSpec: softcap is {self.softcap}; differential attention has none"
            )
        name, count = "num_kv_heads", self.num_kv_heads
        if self.differential.lambda_init is None:  # the queries of a pair are of one group
            name, count = "num_heads / num_kv_heads", self.num_heads // self.num_kv_heads
        if count % 2:
            raise ValueError(
                f"AttentionSpec: {name} is {count}; it must be even, since heads come in pairs"
            )


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
class MoeSpec:
    """A mixture of experts: each token goes to the `top_k` gated MLPs that its router favours.

    The router's softmax is over all experts; with `renormalise` the weights of those chosen are
    then divided by their sum. intermediate: of one expert.
    """

    num_experts: int
    top_k: int
    intermediate: int
    activation: str = "silu"
    renormalise: bool = True

    def __post_init__(self) -> None:
        MlpSpec(self.intermediate, self.activation)
        if not 1 <= self.top_k <= self.num_experts:
            raise ValueError(
                f"MoeSpec: top_k is {self.top_k}; it must be at least 1 and at most the "
                f"{self.num_experts} experts"
            )


@dataclass(frozen=True)
class LayerSpec:
    """pre_norm: norms before attention and mlp; post_norm: after each, before the residual add."""

    attention: AttentionSpec
    mlp: MlpSpec | MoeSpec
    pre_norm: bool = True
    post_norm: bool = False


@dataclass(frozen=True)
class DecoderConfig:
    """A decoder: embedding, layers around a residual stream, final norm, head.

    max_position: the longest sequence in tokens that rotary tables are made for.
    norm_offset: every norm multiplies by weight + norm_offset.
    embedding_scale: multiplies embeddings (not the head that shares their matrix).
    residual_scale: multiplies what attention and mlp add to the stream.
    logits_scale, logits_softcap: logits are multiplied, then become cap * tanh(logit / cap); 0: no cap.
    """

    layers: tuple[LayerSpec, ...]
    hidden: int
    vocab_size: int
    max_position: int
    norm_eps: float = 1e-6
    tie_embeddings: bool = False
    norm_offset: float = 0.0
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logits_scale: float = 1.0
    logits_softcap: float = 0.0

    def __post_init__(self) -> None:
        for name in ("hidden", "vocab_size", "max_position"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"DecoderConfig: {name} is {getattr(self, name)}; it must be at least 1"
                )
        if not self.layers:
            raise ValueError("DecoderConfig: there are no layers")

    @property
    def depends_on_prompt_length(self) -> bool:
        """Whether what a token's KV is depends on how long its whole prompt is."""
        chunks = (layer.attention.dual_chunk for layer in self.layers)
        return any(chunk is not None and chunk.length_factor == "prompt" for chunk in chunks)
