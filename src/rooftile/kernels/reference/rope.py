"""Rotary position embedding in plain PyTorch, rotated in float32 or wider."""

from __future__ import annotations

import torch
from torch import Tensor

from rooftile.kernels import Kernel, anything
from rooftile.kernels.reference.precision import widen


def rotary_embedding(
    x: Tensor, positions: Tensor, cos_sin: Tensor, interleaved: bool, inverse: bool
) -> Tensor:
    half = cos_sin.shape[-1]
    # [tokens, 1, half]: every head turns by the same angles.
    cos, sin = cos_sin[positions].to(widen(x).dtype).unsqueeze(2).unbind(1)
    if inverse:
        sin = -sin
    rotated, rest = widen(x[..., : 2 * half]), x[..., 2 * half :]
    if interleaved:
        first, second = rotated[..., 0::2], rotated[..., 1::2]
    else:
        first, second = rotated[..., :half], rotated[..., half:]
    pair = (first * cos - second * sin, second * cos + first * sin)
    turned = torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)
    return torch.cat([turned.to(x.dtype), rest], -1)


KERNELS = {"rotary_embedding": Kernel(rotary_embedding, anything, efficiency=0.1)}
