"""Checks of pages, batches, scales and slots: what paged operators ask of their arguments."""

from __future__ import annotations

import torch
from torch import Tensor

from rooftile.ops.attention_check import check_cu_seqlens, check_heads
from rooftile.ops.check import (
    check_device,
    check_float,
    check_integers,
    check_same,
    check_shape,
    check_tensors,
    check_whole,
    require,
)
from rooftile.ops.operator import contents_checked
from rooftile.types import PagedBatch, PrefixGroups

QUANTISED = (torch.float8_e4m3fn,)  # dtypes of pages that need scales


def check_pages(
    name: str,
    tokens: Tensor,
    tokens_name: str,
    k_pages: Tensor,
    v_pages: Tensor,
    takes_scales: bool = True,
) -> None:
    check_tensors(name, **{tokens_name: tokens}, k_pages=k_pages, v_pages=v_pages)
    require(
        tokens.dim() == 3,
        lambda: (
            f"{name}: {tokens_name} has shape {list(tokens.shape)}; expected [tokens, heads, dim]"
        ),
    )
    for pages_name, pages in (("k_pages", k_pages), ("v_pages", v_pages)):
        if pages.dim() != 4 or pages.shape[2] == 0 or pages.shape[3] == 0:
            raise ValueError(
                f"{name}: {pages_name} has shape {list(pages.shape)}; "
                f"expected [num_pages, heads, page_size, dim]"
            )
    check_float(name, **{tokens_name: tokens})
    if takes_scales and k_pages.dtype in QUANTISED:
        check_same(name, k_pages=k_pages, v_pages=v_pages)
        check_device(name, **{tokens_name: tokens, "k_pages": k_pages})
    else:
        check_same(name, **{tokens_name: tokens, "k_pages": k_pages, "v_pages": v_pages})
    require(
        k_pages.shape[:3] == v_pages.shape[:3],
        lambda: (
            f"{name}: k_pages has shape {list(k_pages.shape)} and v_pages {list(v_pages.shape)}; "
            f"all but the last dimension must be equal"
        ),
    )


def check_keys(name: str, q: Tensor, k_pages: Tensor) -> None:
    """Queries [tokens, num_q_heads, k_dim] that fit the keys of pages."""
    require(
        q.shape[-1] == k_pages.shape[-1],
        lambda: (
            f"{name}: q has dim {q.shape[-1]} but k_pages has dim {k_pages.shape[-1]}; "
            f"they must be equal"
        ),
    )
    check_heads(name, q.shape[1], k_pages.shape[1])


def check_batch(
    name: str, q: Tensor, k_pages: Tensor, batch: PagedBatch, left: int, q_name: str = "q"
) -> None:
    require(
        isinstance(batch, PagedBatch),
        lambda: f"{name}: batch is {batch!r:.80}; it must be a PagedBatch",
    )
    check_whole(name, 0, max_kv_len=batch.max_kv_len)
    longest = batch.max_q_len
    check_cu_seqlens(name, "cu_seqlens_q", batch.cu_seqlens_q, q_name, q, longest, "max_q_len")
    check_integers(name, "kv_lens", batch.kv_lens, q, q_name)
    check_integers(name, "page_table", batch.page_table, q, q_name)
    requests = batch.cu_seqlens_q.shape[0] - 1
    check_shape(name, "kv_lens", batch.kv_lens, (requests,), "[batch]")
    require(
        batch.page_table.dim() == 2 and batch.page_table.shape[0] == requests,
        lambda: (
            f"{name}: page_table has shape {list(batch.page_table.shape)}; "
            f"expected [batch, max_pages] with batch = {requests}"
        ),
    )
    if requests == 0 or not contents_checked(q):
        return
    page_size, reach = k_pages.shape[2], batch.page_table.shape[1] * k_pages.shape[2]
    low, high = (int(x) for x in torch.aminmax(batch.kv_lens))
    require(low >= 0, lambda: f"{name}: kv_lens holds {low}; lengths must be >= 0")
    require(
        high <= batch.max_kv_len,
        lambda: (
            f"{name}: kv_lens holds {high} but max_kv_len is {batch.max_kv_len}; give an upper bound"
        ),
    )
    require(
        high <= reach,
        lambda: (
            f"{name}: kv_lens holds {high} but page_table reaches {reach} tokens "
            f"({batch.page_table.shape[1]} pages of {page_size}); widen the table"
        ),
    )
    q_lens = batch.cu_seqlens_q.diff()
    starts = torch.arange(batch.page_table.shape[1], device=q.device) * page_size
    used = (starts < batch.kv_lens[:, None]) & (q_lens > 0)[:, None]
    if left >= 0:
        used &= starts + page_size > (batch.kv_lens - q_lens - left)[:, None]
    wrong = used & ((batch.page_table < 0) | (batch.page_table >= k_pages.shape[0]))
    if bool(wrong.any()):
        request, column = wrong.nonzero()[0].tolist()
        raise ValueError(
            f"{name}: page_table[{request}, {column}] is {int(batch.page_table[request, column])}, "
            f"in use by request {request} with {int(batch.kv_lens[request])} tokens; "
            f"it must name one of {k_pages.shape[0]} pages"
        )


def check_prefix(name: str, batch: PagedBatch, prefix: PrefixGroups, page_size: int) -> None:
    require(
        isinstance(prefix, PrefixGroups),
        lambda: f"{name}: batch.prefix is {prefix!r:.80}; pass what find_prefixes returned",
    )
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


def check_scales(
    name: str, k_pages: Tensor, v_pages: Tensor, k_scale: Tensor | None, v_scale: Tensor | None
) -> None:
    quantised = k_pages.dtype in QUANTISED
    for scale_name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        if (scale is not None) != quantised:
            raise ValueError(
                f"{name}: {scale_name} is {'missing' if quantised else 'given'} and pages are "
                f"{k_pages.dtype}; pages of {QUANTISED[0]} need both scales, others take none"
            )
        if scale is not None:
            check_shape(name, scale_name, scale, (k_pages.shape[1],), "[num_kv_heads]")
            check_float(name, **{scale_name: scale})
            check_device(name, k_pages=k_pages, **{scale_name: scale})


def check_slots(
    name: str,
    slots: Tensor,
    num_slots: int,
    positions: Tensor | None,
    cos_sin: Tensor | None,
) -> None:
    written = slots >= 0
    wrong = slots[(slots < -1) | (slots >= num_slots)]
    require(
        wrong.numel() == 0,
        lambda: (
            f"{name}: slots holds {wrong[:1].tolist()}; a slot must be -1 or below num_pages * "
            f"page_size = {num_slots}"
        ),
    )
    targets = slots[written].sort().values
    repeated = targets[1:][targets.diff() == 0]
    require(
        repeated.numel() == 0,
        lambda: (
            f"{name}: slot {repeated[:1].tolist()} occurs twice; each token needs a slot of its own"
        ),
    )
    if positions is not None and cos_sin is not None:
        used = positions[written]
        wrong = used[(used < 0) | (used >= cos_sin.shape[0])]
        require(
            wrong.numel() == 0,
            lambda: (
                f"{name}: positions holds {wrong[:1].tolist()}; cos_sin has {cos_sin.shape[0]} "
                f"positions, enlarge it"
            ),
        )
