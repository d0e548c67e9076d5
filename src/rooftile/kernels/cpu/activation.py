"""Gated activations."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rooftile.kernels import Kernel
from rooftile.kernels.cpu import library
from rooftile.kernels.cpu.arguments import ACTIVATIONS, DTYPES, refusal, rows_of


def gated_activation(x: Tensor, activation: str) -> Tensor:
    size = x.shape[-1] // 2
    out = x.new_empty((*x.shape[:-1], size))
    if out.numel():
        rows = rows_of(x)
        library.native().rooftile_gated(
            *(rows.data_ptr(), rows.stride(0), rows.shape[0], size, ACTIVATIONS[activation]),
            *(out.data_ptr(), DTYPES[x.dtype], torch.get_num_threads()),
        )
    return out


def supports(call: Any) -> str | None:
    if call.activation not in ACTIVATIONS:
        return f"it has no {call.activation!r}: the error function is torch's"
    return refusal(call)


KERNELS = {"gated_activation": Kernel(gated_activation, supports, efficiency=0.6)}
