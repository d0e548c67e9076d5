"""Plans of paged attention made on the host: the pure-Python planner behind a tensor."""

from __future__ import annotations

import torch
from torch import Tensor

from rooftile.kernels import Kernel, anything
from rooftile.planning.split_kv import plan
from rooftile.types import SplitSpec


def split_kv(
    cu_seqlens_q: Tensor,  # [batch + 1]
    kv_lens: Tensor,  # [batch]
    split: list[int],
    first: Tensor | None = None,  # [groups + 1]
    shared: Tensor | None = None,  # [groups]
) -> Tensor:
    spec = SplitSpec.from_numbers(split)
    prefixes = [() if x is None else x.tolist() for x in (first, shared)]
    words = plan(spec, cu_seqlens_q.diff().tolist(), kv_lens.tolist(), *prefixes).words(spec)
    return torch.tensor(words, dtype=torch.int32, device=kv_lens.device)


KERNELS = {"split_kv": Kernel(split_kv, anything, efficiency=0.01)}
