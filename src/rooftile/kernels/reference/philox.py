"""Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3").

A counter-based generator: the numbers of a request depend on its key and counter alone, so they
are the same in whichever row of a batch, and on whichever machine, it stands.
"""

from __future__ import annotations

import torch
from torch import Tensor

ROUNDS = 10
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
LOW = 0xFFFFFFFF


def philox4x32(counter: Tensor, key: Tensor) -> Tensor:
    """Four random words for each row.

    counter: [4, rows] int64, each a 32-bit word; key: [2, rows] alike. Returns [4, rows] alike.
    """
    device = counter.device
    multipliers = torch.tensor(MULTIPLIERS[::-1], device=device).unsqueeze(1)
    steps = torch.tensor(KEY_STEPS, device=device) * torch.arange(ROUNDS, device=device).unsqueeze(
        1
    )
    keys = key + steps.unsqueeze(2)  # [ROUNDS, 2, rows]
    even, odd = counter[0::2], counter[1::2]
    for round_key in keys.unbind():
        # Products wrap in int64, which keeps both their halves right; what words carry above 32
        # bits is cut off where it would count: before a product, and at the end.
        product = even.flip(0) * multipliers
        even, odd = ((product >> 32) ^ odd ^ round_key) & LOW, product
    odd = odd & LOW
    return torch.stack((even[0], odd[0], even[1], odd[1]))


def uniform(seeds: Tensor, sample_index: Tensor, positions: Tensor) -> Tensor:
    """[rows] int64 each -> [rows] float64 in [0, 1), multiples of 2^-53.

    The key is the seed; the counter is (sample_index, position), low words first.
    """
    words = torch.stack((sample_index, positions, seeds))
    low, high = words & LOW, (words >> 32) & LOW
    counter = torch.stack((low[0], high[0], low[1], high[1]))
    random = philox4x32(counter, torch.stack((low[2], high[2])))
    return ((random[0] << 21) | (random[1] >> 11)).double() * 2.0**-53
