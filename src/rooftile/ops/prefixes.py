"""Which requests of a batch begin with the same pages, found on the device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rooftile.ops.check import check_integers, check_shape, check_tensors, check_whole, require
from rooftile.ops.operator import Operator
from rooftile.types import PagedBatch, PrefixGroups


@dataclass(frozen=True)
class PrefixCall:
    """The static properties that choose a kernel."""

    device: str


def find_prefixes(
    batch: PagedBatch, page_size: int, *, min_keys: int = 256, kernel: str = "auto"
) -> PrefixGroups:
    """Groups of requests that follow each other and begin with the same pages, for `PagedBatch.prefix`.

    Two neighbours have in common the leading entries in which their rows of the page table agree,
    as far as these are whole pages before the first query of either. A request begins a new group
    where it has less than `min_keys` keys in common with the one before, or less than half of what
    either of the two has in common with its other neighbour. A group shares what all its
    neighbours have in common. Lengths and tables are read on the device, without waiting for it.

    Returns:
        As many groups as there are requests, those at the end being empty.

    Raises:
        ValueError: shapes or dtypes that do not fit together, a page size or `min_keys` below 1.
    """
    name = "find_prefixes"
    check_whole(name, 1, page_size=page_size, min_keys=min_keys)
    require(
        isinstance(batch, PagedBatch),
        lambda: f"{name}: batch is {batch!r:.80}; it must be a PagedBatch",
    )
    kv_lens = batch.kv_lens
    check_tensors(name, kv_lens=kv_lens)
    requests = kv_lens.shape[0]
    for field in ("cu_seqlens_q", "page_table"):
        check_integers(name, field, getattr(batch, field), kv_lens, "kv_lens")
    check_shape(name, "cu_seqlens_q", batch.cu_seqlens_q, (requests + 1,), "[batch + 1]")
    require(
        batch.page_table.dim() == 2 and batch.page_table.shape[0] == requests,
        lambda: (
            f"{name}: page_table has shape {list(batch.page_table.shape)}; "
            f"expected [batch, max_pages] with batch = {requests}"
        ),
    )
    return prefixes_of(batch, page_size, min_keys, kernel)


def prefixes_of(
    batch: PagedBatch, page_size: int, min_keys: int, kernel: str = "auto"
) -> PrefixGroups:
    """`find_prefixes` without checks."""
    first, lens = FIND_PREFIXES.handle(
        *(batch.cu_seqlens_q, batch.kv_lens, batch.page_table, page_size, min_keys, kernel)
    )
    return PrefixGroups(first, lens, batch.max_kv_len)


def _fake(cu_seqlens_q: Tensor, kv_lens: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    groups = kv_lens.shape[0]
    return (
        kv_lens.new_empty(groups + 1, dtype=torch.int32),
        kv_lens.new_empty(groups, dtype=torch.int32),
    )


FIND_PREFIXES = Operator(
    "find_prefixes",
    "(Tensor cu_seqlens_q, Tensor kv_lens, Tensor page_table, int page_size, int min_keys)"
    " -> (Tensor, Tensor)",
    module="prefixes",
    families=("triton", "reference"),
    call=lambda cu_seqlens_q, kv_lens, *_: PrefixCall(kv_lens.device.type),
    fake=_fake,
)
