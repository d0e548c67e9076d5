"""The gated feed-forward layer."""

from __future__ import annotations

from torch import Tensor

from rooftile.layers.linear import Linear, RowParallelLinear
from rooftile.ops.activation import GATED_ACTIVATION


class GatedMlp:
    """down(activation(gate(x)) * up(x)); gate and up are one matrix, gate's rows first.

    activation: "silu", "gelu" or "gelu_tanh".
    """

    def __init__(self, gate_up: Linear, down: RowParallelLinear, activation: str) -> None:
        self.gate_up = gate_up
        self.down = down
        self.activation = activation

    def __call__(self, x: Tensor) -> Tensor:  # [tokens, hidden]
        return self.down(GATED_ACTIVATION.handle(self.gate_up(x), self.activation, "auto"))
