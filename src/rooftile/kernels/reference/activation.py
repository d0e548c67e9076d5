"""Gated activations in plain PyTorch, computed in float32 or wider."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rooftile.kernels import Kernel, anything
from rooftile.kernels.reference.precision import widen

TANH_SCALE = math.sqrt(2 / math.pi)
TANH_CUBIC = 0.044715


def gated_activation(x: Tensor, activation: str) -> Tensor:
    gate, value = widen(x).chunk(2, -1)
    return (_activate(gate, activation) * value).to(x.dtype)


def gated_activation_backward(grad_out: Tensor, x: Tensor, activation: str) -> Tensor:
    grad = widen(grad_out)
    gate, value = widen(x).chunk(2, -1)
    grad_gate = grad * value * _slope(gate, activation)
    return torch.cat([grad_gate, grad * _activate(gate, activation)], -1).to(x.dtype)


def _activate(gate: Tensor, activation: str) -> Tensor:
    if activation == "silu":
        return gate * torch.sigmoid(gate)
    if activation == "gelu":
        return gate * _normal_cdf(gate)
    return gate * _tanh_cdf(gate)


def _slope(gate: Tensor, activation: str) -> Tensor:
    if activation == "silu":
        s = torch.sigmoid(gate)
        return s * (1 + gate * (1 - s))
    if activation == "gelu":
        density = torch.exp(-0.5 * gate**2) / math.sqrt(2 * math.pi)
        return _normal_cdf(gate) + gate * density
    s = _tanh_cdf(gate)
    inner = TANH_SCALE * (1 + 3 * TANH_CUBIC * gate**2)
    return s + 2 * gate * s * (1 - s) * inner


def _normal_cdf(x: Tensor) -> Tensor:
    # erfc keeps the left tail, where 1 + erf cancels.
    return 0.5 * torch.erfc(-x * math.sqrt(0.5))


def _tanh_cdf(x: Tensor) -> Tensor:
    # (1 + tanh(u)) / 2 is sigmoid(2 u), which keeps the left tail, where 1 + tanh cancels.
    return torch.sigmoid(2 * TANH_SCALE * (x + TANH_CUBIC * x**3))


KERNELS = {
    "gated_activation": Kernel(gated_activation, anything, efficiency=0.1),
    "gated_activation_backward": Kernel(gated_activation_backward, anything, efficiency=0.1),
}
