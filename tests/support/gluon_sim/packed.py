"""Assembly on 32-bit words that hold several small numbers: which logical elements it makes of which.

Elements that a thread passes together are the last of a tensor, in the order of its registers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.support.gluon_sim.memory import tile


def run(asm: str, args: list[Any]) -> Any:
    """What the instructions leave, or `None` for others."""
    if "prmt.b32" in asm and "0x80808080" in asm:
        return _digits(*(_plain(x) for x in args))
    if asm.startswith("mov.b32 $0, $4;"):
        word = _plain(args[0])
        bytes = word.view(torch.int8).view(*word.shape[:-2], 4, *word.shape[-2:])
        return tuple(tile(x) for x in bytes.unbind(-3))
    if "0x80808080, 0xf0f0f0f0, 0x28" in asm:
        bytes = _plain(args[0]).view(torch.int8).unflatten(-1, (4, 4))
        halves = (bytes & 15, (bytes ^ -128) & -16)
        return tuple(tile(half[..., word, :]) for word in range(4) for half in halves)
    return None


def _plain(x: Tensor) -> Tensor:
    return x.as_subclass(Tensor).contiguous()


def _digits(*words: Tensor) -> Tensor:
    """Two int32 [.., 2, 2] -> words [.., 2, 2]: the second bytes of all four of the first tensor in the
    order 0, 2, 1, 3, their first bytes with the highest bit turned, and those of the second tensor."""
    bytes = [x.flatten(-2)[..., [0, 2, 1, 3]].view(torch.int8).unflatten(-1, (4, 4)) for x in words]
    digits = torch.stack([y for x in bytes for y in (x[..., 1], x[..., 0] ^ -128)], -2)
    return tile(digits.contiguous().view(torch.int32).view(words[0].shape))
