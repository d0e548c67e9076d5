"""Attention of requests that share a prefix: once over what is shared, once over the rest.

Juravsky et al. 2024 (Hydragen) and Ye et al. 2025 (FlashInfer, cascade): the keys of a shared prefix
are read once for the queries of all requests that have it, as one matrix product with many rows, and
both results are merged by their lse.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rooftile.ops.attention import check_integers
from rooftile.ops.check import check_shape, check_whole, require
from rooftile.ops.merge import MERGE
from rooftile.ops.operator import contents_checked
from rooftile.types import PagedBatch, PrefixGroups

# Keys that sharing must spare reading, below which two passes and a merge take longer than one.
LEAST_SAVED = 4096


def split_batch(
    batch: PagedBatch, prefix: PrefixGroups, page_size: int
) -> tuple[PagedBatch, PagedBatch]:
    """The prefixes as a batch with a request for each group, and the rest of every request.

    Which groups share enough to be worth it is decided on the device, from the lengths.
    """
    first = prefix.first.long()
    members = first.diff()
    lens = torch.where((members - 1) * prefix.lens >= LEAST_SAVED, prefix.lens, 0).int()
    groups = PagedBatch(
        batch.cu_seqlens_q[first],
        lens,
        batch.page_table[first[:-1].clamp(max=max(batch.page_table.shape[0] - 1, 0))],
        max_q_len=batch.max_q_len * batch.kv_lens.shape[0],
        max_kv_len=prefix.max_len,
    )
    requests = torch.arange(batch.kv_lens.shape[0], device=first.device)
    group = torch.searchsorted(first, requests, right=True) - 1
    shared = lens[group]
    columns = torch.arange(batch.page_table.shape[1], device=first.device)
    columns = columns + (shared // page_size)[:, None]
    table = batch.page_table.gather(1, columns.clamp_(max=batch.page_table.shape[1] - 1).long())
    rest = PagedBatch(
        batch.cu_seqlens_q, batch.kv_lens - shared, table, batch.max_q_len, batch.max_kv_len
    )
    return groups, rest


def merge_two(
    prefix: tuple[Tensor, Tensor],  # [tokens, heads, v_dim], [tokens, heads]
    rest: tuple[Tensor, Tensor],
) -> tuple[Tensor, Tensor]:
    merged: tuple[Tensor, Tensor] = MERGE.handle(
        torch.stack([prefix[0], rest[0]]), torch.stack([prefix[1], rest[1]]), "auto"
    )
    return merged


def check_prefix(name: str, batch: PagedBatch, prefix: PrefixGroups, page_size: int) -> None:
    for field, tensor in (("first", prefix.first), ("lens", prefix.lens)):
        check_integers(name, f"prefix.{field}", tensor, batch.kv_lens, "kv_lens")
    check_whole(name, 0, **{"prefix.max_len": prefix.max_len})
    require(
        prefix.first.dim() == 1 and prefix.first.shape[0] >= 1,
        lambda: f"{name}: prefix.first has shape {list(prefix.first.shape)}; expected [groups + 1]",
    )
    check_shape(name, "prefix.lens", prefix.lens, (prefix.first.shape[0] - 1,), "[groups]")
    if not contents_checked(prefix.first):
        return
    first, lens = prefix.first.tolist(), prefix.lens.tolist()
    requests = batch.kv_lens.shape[0]
    require(
        first[0] == 0 and first[-1] == requests and first == sorted(first),
        lambda: (
            f"{name}: prefix.first is {first}; it must go up from 0 to the number of requests, {requests}"
        ),
    )
    tables = batch.page_table.tolist()
    before = (batch.kv_lens - batch.cu_seqlens_q.diff()).tolist()
    for group, length in enumerate(lens):
        members = range(first[group], first[group + 1])
        fits = min((before[i] for i in members), default=length)
        if length % page_size or not 0 <= length <= min(prefix.max_len, max(fits, 0)):
            raise ValueError(
                f"{name}: prefix.lens[{group}] is {length}; it must be whole pages of {page_size}, at "
                f"most max_len = {prefix.max_len}, and before every member's queries, {fits}"
            )
        pages = length // page_size
        different = [i for i in members if tables[i][:pages] != tables[members[0]][:pages]]
        if different:
            raise ValueError(
                f"{name}: request {different[0]} does not begin with the same {pages} pages as "
                f"request {members[0]} of its group; leave it out of the group"
            )
