"""int4 weights for the tensor core: symmetric codes in groups of 32, eight to a word.

A weight [n, k] is codes 0 to 15 and a bfloat16 scale for every 32 along k; its values are
(code - 8) scale, rounded to bfloat16. The codes of 128 along k are 16 words of 32 bits: word
4 q + w has those of k = 32 w + 8 q to 32 w + 8 q + 7, of which element 2 p is bits 4 p to 4 p + 3,
and element 2 p + 1 the same bits 16 further up. So the four words that a thread reads at a time are
in the four groups of 128, and a pair of codes is one operation away from two bfloat16 numbers
(kernels/gluon/gemm/codes.py).
"""

from __future__ import annotations

import torch
from torch import Tensor

GROUP = 32  # along k, with one scale
BLOCK = 128  # along k, whose words lie together
_ZERO = 8  # the code of 0
# Scales that are tried, in units of that by which the value of largest magnitude has code 0.
_TRIED = (1.0, 0.96, 0.92, 0.88, 0.84, 8 / 7, 8 / 7.5)


def layout(n: int, k: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shape and dtype of what `pack` makes of a weight [n, k]."""
    blocks = -(-k // BLOCK)
    return {
        "weight": ((n, blocks * BLOCK // 8), torch.int32),
        "scale": ((n, blocks * BLOCK // GROUP), torch.bfloat16),
    }


def pack(weight: Tensor) -> dict[str, Tensor]:  # [n, k]
    """weight: words [n, k / 8] int32, scale: [n, k / 32] bfloat16; k padded to a multiple of 128.

    Each group takes the scale, of some tried, with the least squared error.
    """
    n, k = weight.shape
    blocks = -(-k // BLOCK)
    values = torch.zeros(n, blocks * BLOCK, dtype=torch.float32, device=weight.device)
    values[:, :k] = weight.detach()
    codes, scale = _quantise(values.view(n, blocks * (BLOCK // GROUP), GROUP))
    # [n, block, w, q, pair, element of it] -> [n, block, q, w, ...]
    ordered = codes.view(n, blocks, 4, 4, 4, 2).transpose(2, 3).long()
    shifts = 4 * torch.arange(4)[:, None] + 16 * torch.arange(2)[None, :]
    words = (ordered << shifts.to(weight.device)).sum((-1, -2))
    words = torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)
    return {"weight": words.view(n, blocks * BLOCK // 8), "scale": scale}


def _quantise(groups: Tensor) -> tuple[Tensor, Tensor]:  # [n, groups, 32] float32
    """Codes [n, groups, 32] int32 and scales [n, groups] bfloat16."""
    largest = groups.gather(-1, groups.abs().argmax(-1, keepdim=True))
    best_codes = torch.full(groups.shape, _ZERO, dtype=torch.int32, device=groups.device)
    best_scale = torch.zeros_like(largest, dtype=torch.bfloat16)
    best_error = torch.full_like(largest, torch.inf)
    for share in _TRIED:
        scale = (largest / -_ZERO * share).bfloat16()
        wide = scale.float()
        codes = torch.round(groups / torch.where(wide == 0, 1, wide)) + _ZERO
        codes = codes.clamp(0, 2 * _ZERO - 1)
        error = (_values(codes, wide) - groups).square().sum(-1, keepdim=True)
        better = error < best_error
        best_codes = torch.where(better, codes.to(torch.int32), best_codes)
        best_scale = torch.where(better, scale, best_scale)
        best_error = torch.where(better, error, best_error)
    return best_codes, best_scale[..., 0]


def _values(codes: Tensor, scale: Tensor) -> Tensor:
    """What the kernels multiply with, float32."""
    return ((codes - _ZERO) * scale).bfloat16().float()


def unpack(words: Tensor, scale: Tensor, k: int) -> Tensor:
    """[n, k] float32 of words [n, ...] and scale [n, ...]."""
    n = words.shape[0]
    shifts = 4 * torch.arange(4)[:, None] + 16 * torch.arange(2)[None, :]
    codes = (words.view(n, -1, 4, 4, 1, 1) >> shifts.to(words.device)) & 15
    groups = codes.transpose(2, 3).reshape(n, scale.shape[1], GROUP)
    return _values(groups, scale.float()[..., None]).view(n, -1)[:, :k]
