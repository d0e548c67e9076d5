"""Shared prefixes, found on the host."""

from __future__ import annotations

import torch
from torch import Tensor

from rooftile.kernels import Kernel, anything


def find_prefixes(
    cu_seqlens_q: Tensor,  # [batch + 1]
    kv_lens: Tensor,  # [batch]
    page_table: Tensor,  # [batch, max_pages]
    page_size: int,
    least: int,
) -> tuple[Tensor, Tensor]:  # first [batch + 1], lens [batch] int32, see ops.prefixes
    tables = page_table.tolist()
    whole = ((kv_lens - cu_seqlens_q.diff()) // page_size).clamp(min=0).tolist()
    requests = len(tables)
    common = [0] * (requests + 1)  # pages that request i has in common with i - 1
    for i in range(1, requests):
        pages = list(zip(tables[i - 1], tables[i], strict=True))[: min(whole[i - 1], whole[i])]
        common[i] = next((n for n, (a, b) in enumerate(pages) if a != b), len(pages))
    first: list[int] = []
    lens: list[int] = []
    for i in range(requests):
        pages_too_few = common[i] * page_size < least
        if not i or pages_too_few or 2 * common[i] < max(common[i - 1], common[i + 1]):
            first.append(i)
            lens.append(0)
        else:
            keys = common[i] * page_size
            lens[-1] = keys if first[-1] == i - 1 else min(lens[-1], keys)
    first += [requests] * (requests + 1 - len(first))
    lens += [0] * (requests - len(lens))
    results = (torch.tensor(x, dtype=torch.int32, device=kv_lens.device) for x in (first, lens))
    return tuple(results)  # type: ignore[return-value]


KERNELS = {"find_prefixes": Kernel(find_prefixes, anything, efficiency=0.01)}
