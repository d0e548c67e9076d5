"""Rotary position embedding."""

from __future__ import annotations

import torch
from torch import Tensor

from rooftile.kernels import Kernel
from rooftile.kernels.cpu import library
from rooftile.kernels.cpu.arguments import DTYPES, refusal


def rotary_embedding(
    x: Tensor, positions: Tensor, cos_sin: Tensor, interleaved: bool, inverse: bool
) -> Tensor:
    tokens, heads, dim = x.shape
    if x.stride(2) != 1 and dim > 1:
        x = x.contiguous()
    positions, cos_sin = positions.long().contiguous(), cos_sin.contiguous()
    out = torch.empty(x.shape, dtype=x.dtype)
    library.native().rooftile_rotary(
        *(x.data_ptr(), x.stride(0), x.stride(1), positions.data_ptr(), cos_sin.data_ptr()),
        *(cos_sin.shape[2], interleaved, inverse, tokens, heads, dim),
        *(out.data_ptr(), DTYPES[x.dtype], torch.get_num_threads()),
    )
    return out


KERNELS = {"rotary_embedding": Kernel(rotary_embedding, refusal, efficiency=0.6)}
