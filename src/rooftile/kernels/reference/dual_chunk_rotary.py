"""The three queries of dual chunk attention in plain PyTorch, turned in float32 or wider."""

from __future__ import annotations

import torch
from torch import Tensor

from rooftile.kernels import Kernel, anything
from rooftile.kernels.reference.precision import widen
from rooftile.kernels.reference.rope import rotary_embedding


def dual_chunk_rotary(
    q: Tensor,  # [tokens, heads, head_dim]
    positions: Tensor,  # [tokens]
    lengths: Tensor | None,  # [tokens]
    cos_sin: Tensor,  # [positions, 2, rotary_dim / 2]
    interleaved: bool,
    chunk_size: int,
    local_size: int,
    original_max_position: int,  # 0: no length factor
) -> Tensor:  # [3, tokens, heads, head_dim]
    chunk_len = chunk_size - local_size
    positions = positions.long()
    wide = widen(q)
    if original_max_position:
        length = positions + 1 if lengths is None else lengths
        # A logarithm is at its worst near 1, where float32 would lose the factor's last digits.
        growth = 0.1 * torch.log(length.double() / original_max_position) + 1
        wide = wide * growth.clamp(min=1).square().to(wide.dtype)[:, None, None]
    own = positions % chunk_len
    after = (own + chunk_len).clamp(max=chunk_size)
    far = torch.full_like(own, min(2 * chunk_len - 1, chunk_size))
    return torch.stack(
        [
            rotary_embedding(wide, at, cos_sin, interleaved, False).to(q.dtype)
            for at in (own, after, far)
        ]
    )


KERNELS = {"dual_chunk_rotary": Kernel(dual_chunk_rotary, anything, efficiency=0.1)}
