"""Rotary position embedding in as few torch calls as it takes: on a CPU, calls are the cost."""

from __future__ import annotations

import torch
from torch import Tensor

from rooftile.kernels import Kernel, anything
from rooftile.kernels.reference.precision import widen


def rotary_embedding(
    x: Tensor, positions: Tensor, cos_sin: Tensor, interleaved: bool, inverse: bool
) -> Tensor:
    half = cos_sin.shape[-1]
    rotary_dim, head_dim = 2 * half, x.shape[-1]
    # [tokens, 1, half]
    cos, sin = cos_sin.index_select(0, positions).unsqueeze(2).unbind(1)
    if inverse:
        sin = -sin
    wide = widen(x if rotary_dim == head_dim else x[..., :rotary_dim])
    if interleaved:
        pairs = torch.complex(wide[..., 0::2], wide[..., 1::2])
        turned = torch.view_as_real(pairs * torch.complex(cos, sin).to(pairs.dtype)).flatten(-2)
    else:
        # first * cos - second * sin beside second * cos + first * sin
        partner = wide.roll(half, -1)
        turned = (wide * torch.cat((cos, cos), -1)).addcmul_(partner, torch.cat((-sin, sin), -1))
    turned = turned.to(x.dtype)
    return turned if rotary_dim == head_dim else torch.cat((turned, x[..., rotary_dim:]), -1)


KERNELS = {"rotary_embedding": Kernel(rotary_embedding, anything, efficiency=0.3)}
