"""Gradients of gradients: autograd looks into backwards that are made of PyTorch's operations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from rooftile import (
    attention,
    attention_varlen,
    differential_attention,
    differential_attention_varlen,
    gelu_and_mul,
    linear,
    matmul,
    merge_attention_states,
    rms_norm,
    rotary_embedding,
    silu_and_mul,
)

LENGTHS = torch.tensor([0, 2, 3])
ANGLES = torch.arange(3.0)
COS_SIN = torch.stack((ANGLES.cos(), ANGLES.sin()), 1)[:, :, None]

QKV = ((1, 3, 2, 4), (1, 3, 1, 4), (1, 3, 1, 4))
PAIRS = ((1, 3, 2, 4), (1, 3, 2, 4), (1, 3, 2, 4), (1, 3, 2, 4), (1, 3, 2, 8), (2,))


def ragged(shapes: tuple[tuple[int, ...], ...]) -> tuple[tuple[int, ...], ...]:
    return tuple(shape[1:] if len(shape) > 1 else shape for shape in shapes)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("run", "shapes"),
    [
        (lambda *x: attention(*x, causal=True, return_lse=True), QKV),
        (lambda *x: attention_varlen(*x, LENGTHS, LENGTHS, causal=True), ragged(QKV)),
        (lambda *x: differential_attention(*x, causal=True), PAIRS),
        (
            lambda *x: differential_attention_varlen(*x, LENGTHS, LENGTHS, causal=True),
            ragged(PAIRS),
        ),
        (merge_attention_states, ((2, 3, 2, 4), (2, 3, 2))),
        (rms_norm, ((3, 4), (4,))),
        (lambda x: rotary_embedding(x, torch.arange(3), COS_SIN), ((3, 2, 4),)),
        (silu_and_mul, ((3, 4),)),
        (gelu_and_mul, ((3, 4),)),
        (linear, ((3, 4), (2, 4))),
        (matmul, ((3, 4), (4, 2))),
    ],
    ids=[
        "attention",
        "attention_varlen",
        "differential_attention",
        "differential_attention_varlen",
        "merge_attention_states",
        "rms_norm",
        "rotary_embedding",
        "silu_and_mul",
        "gelu_and_mul",
        "linear",
        "matmul",
    ],
)
def test_second_derivatives(run: Callable[..., Any], shapes: tuple[tuple[int, ...], ...]) -> None:
    torch.manual_seed(0)
    inputs: list[Tensor] = [
        torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes
    ]
    assert torch.autograd.gradgradcheck(run, inputs, fast_mode=True)
