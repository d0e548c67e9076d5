"""Paged attention on a CPU through torch's fused kernel, and writing into pages.

Decoding requests are gathered into one batch, their unused slots zeroed, and the query heads of a
group packed into rows. Requests with more queries take the fused kernel one by one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rooftile.kernels import Kernel
from rooftile.kernels.reference.attention import nothing_seen
from rooftile.kernels.reference.paged import append_kv as append_kv_by_index
from rooftile.kernels.reference.paged import first_visible
from rooftile.kernels.torch.attention import FUSED, add_sink, attend, supports
from rooftile.kernels.torch.rope import rotary_embedding

# Keys gathered at once: keeps the gathered copies in cache and their memory bounded.
GATHERED_BYTES = 1 << 20
# Padding requests to the longest of their batch may waste this many pages in all before a batch
# of their own is cheaper (measured with 3 heads of 64: a batch costs 100 us, a page 3 to 6 us).
WASTED_PAGES = 24


def paged_attention(
    q: Tensor,  # [tokens, num_q_heads, dim]
    k_pages: Tensor,  # [num_pages, num_kv_heads, page_size, dim]
    v_pages: Tensor,  # [num_pages, num_kv_heads, page_size, dim]
    cu_seqlens_q: Tensor,  # [batch + 1]
    kv_lens: Tensor,  # [batch]
    page_table: Tensor,  # [batch, max_pages]
    max_q_len: int,
    max_kv_len: int,
    sink: Tensor | None,  # [num_q_heads]
    left: int,
    right: int,
    softcap: float,
    scale: float,
    k_scale: Tensor | None,  # [num_kv_heads]
    v_scale: Tensor | None,  # [num_kv_heads]
    batch_invariant: bool,
    plan: Tensor | None,
    split: list[int],
    with_lse: bool = True,  # whether anybody reads it
) -> tuple[Tensor, Tensor]:  # [tokens, num_q_heads, dim], [tokens, num_q_heads]
    page_size = k_pages.shape[2]
    ends, lengths = cu_seqlens_q.tolist(), kv_lens.tolist()
    decoding: list[tuple[int, int, int]] = []  # pages, request, first page
    filling: list[tuple[int, int, int]] = []
    for i, kv_len in enumerate(lengths):
        q_len = ends[i + 1] - ends[i]
        if q_len and kv_len:
            first_page = first_visible(q_len, kv_len, left) // page_size
            item = (-(-kv_len // page_size) - first_page, i, first_page)
            (decoding if q_len == 1 else filling).append(item)
    page_bytes = k_pages[0].numel() * k_pages.element_size() if decoding else 1
    groups = _similar(decoding, GATHERED_BYTES // page_bytes)

    if len(groups) == 1 and len(decoding) == len(lengths) == q.shape[0]:
        # Every token decodes, in one batch: its results are the results.
        out, lse = _decode(q, k_pages, v_pages, page_table, lengths, groups[0], left, scale)
        add_sink(out, lse, sink)
        return out, lse

    out, lse = nothing_seen(q, v_pages.shape[-1])
    for pages, i, first_page in filling:
        queries = slice(ends[i], ends[i + 1])
        table = page_table[i, None, first_page : first_page + pages]
        used = slice(lengths[i] - first_page * page_size)
        k, v = (x[:, :, used] for x in _gather(table, k_pages, v_pages))
        results = (out[None, queries], lse[None, queries])
        attend(q[None, queries], k, v, left, right, scale, *results)
    for group in groups:
        requests = [i for _, i, _ in group]
        tokens = [ends[i] for i in requests]
        out[tokens], lse[tokens] = _decode(
            q[tokens],
            k_pages,
            v_pages,
            page_table[requests],
            [lengths[i] for i in requests],
            group,
            left,
            scale,
        )
    used = slice(ends[-1])
    add_sink(out[used], lse[used], sink)
    return out, lse


def _similar(
    decoding: list[tuple[int, int, int]], most_pages: int
) -> list[list[tuple[int, int, int]]]:
    """Batches of requests with about equally many pages, each in the order of requests."""
    if len(decoding) < 2:
        return [decoding] if decoding else []
    groups: list[list[tuple[int, int, int]]] = []
    for item in sorted(decoding, reverse=True):
        if groups:
            longest, members = groups[-1][0][0], len(groups[-1])
            wasted = sum(longest - pages for pages, _, _ in groups[-1]) + longest - item[0]
            if wasted <= WASTED_PAGES and longest * (members + 1) <= most_pages:
                groups[-1].append(item)
                continue
        groups.append([item])
    return [sorted(group, key=lambda item: item[1]) for group in groups]


def _decode(
    q: Tensor,  # [batch, num_q_heads, k_dim], one query a request
    k_pages: Tensor,  # [num_pages, num_kv_heads, page_size, k_dim]
    v_pages: Tensor,  # [num_pages, num_kv_heads, page_size, v_dim]
    page_table: Tensor,  # [batch, max_pages]
    lengths: list[int],  # > 0
    group: list[tuple[int, int, int]],  # pages, request, first page
    left: int,
    scale: float,
) -> tuple[Tensor, Tensor]:  # [batch, num_q_heads, v_dim], [batch, num_q_heads]
    batch, heads, page_size = len(lengths), k_pages.shape[1], k_pages.shape[2]
    pages, first_pages = max(item[0] for item in group), [item[2] for item in group]
    # Keys by their place among the gathered ones: [first_keys, end_keys) are visible.
    end_keys = [n - f * page_size for n, f in zip(lengths, first_pages, strict=True)]
    first_keys = [max(0, end - 1 - left) if left >= 0 else 0 for end in end_keys]
    mask = None
    if batch == 1:
        table = page_table[:, first_pages[0] : first_pages[0] + pages]
        seen = slice(first_keys[0], end_keys[0])
        k, v = (x[:, :, seen] for x in _gather(table, k_pages, v_pages))
    else:
        bounds = torch.tensor([end_keys, first_keys, first_pages])
        columns = torch.arange(pages)
        used = columns * page_size < bounds[0, :, None]
        if any(first_pages):
            columns = (columns + bounds[2, :, None]).clamp_(max=page_table.shape[1] - 1)
            table = page_table.gather(1, columns)
        else:
            table = page_table[:, :pages]
        k, v = _gather(table.where(used, 0), k_pages, v_pages)
        keys = torch.arange(pages * page_size)
        hidden = keys >= bounds[0, :, None]
        if any(first_keys):
            hidden |= keys < bounds[1, :, None]
        # What lies in a hidden slot may be NaN, which neither a mask nor a zero weight removes.
        rows = hidden[:, None].expand(-1, heads, -1).reshape(-1).nonzero().squeeze(1)
        for x in (k, v):
            x.view(-1, x.shape[-1]).index_fill_(0, rows, 0)
        mask = q.new_zeros(hidden.shape).masked_fill_(hidden, -torch.inf)[:, None, None]

    grouped = q.reshape(batch, heads, -1, q.shape[-1])  # a group's query heads as rows
    out, lse = FUSED(grouped, k, v, attn_mask=mask, scale=scale)
    if mask is None and bool((lse == 0).any()):  # as in attend: scores that are all NaN
        out, lse = FUSED(grouped, k, v, attn_mask=q.new_zeros(1, k.shape[2]), scale=scale)
    return out.reshape(batch, q.shape[1], -1), lse.reshape(batch, q.shape[1])


def _gather(table: Tensor, k_pages: Tensor, v_pages: Tensor) -> tuple[Tensor, Tensor]:
    """Copies [batch, heads, keys, dim] of the pages in table [batch, pages]."""
    batch, heads = table.shape[0], k_pages.shape[1]
    table, head = table[:, None].long(), torch.arange(heads)[:, None]
    k_raster, v_raster = _raster(k_pages), _raster(v_pages)
    k_rows = (table * k_raster + head).flatten()
    v_rows = k_rows if v_raster == k_raster else (table * v_raster + head).flatten()
    k = _rows(k_pages, k_raster).index_select(0, k_rows) if k_raster else k_pages[table, head]
    v = _rows(v_pages, v_raster).index_select(0, v_rows) if v_raster else v_pages[table, head]
    # Indexing keeps the order of strides; the fused kernel and zeroing by rows need dense ones.
    k, v = k.contiguous(), v.contiguous()
    shape = (batch, heads, -1)
    return k.view(*shape, k_pages.shape[3]), v.view(*shape, v_pages.shape[3])


def _rows(pages: Tensor, raster: int) -> Tensor:
    """One head's page a row: whole rows copy five times faster than indexed elements."""
    size = pages.shape[2] * pages.shape[3]
    return pages.as_strided(((pages.shape[0] - 1) * raster + pages.shape[1], size), (size, 1))


def _raster(pages: Tensor) -> int:
    """How many times one head's page fits between two pages.

    0 where heads' pages are not contiguous, do not follow each other or lie on no such raster.
    """
    _, heads, page_size, dim = pages.shape
    page, head, slot, element = pages.stride()
    size = page_size * dim
    whole = element == 1 and slot == dim and (head == size or heads == 1)
    return page // size if whole and page % size == 0 and page >= heads * size else 0


def append_kv(
    k: Tensor,  # [tokens, heads, k_dim]
    v: Tensor,  # [tokens, heads, v_dim]
    k_pages: Tensor,  # [num_pages, heads, page_size, k_dim]
    v_pages: Tensor,  # [num_pages, heads, page_size, v_dim]
    slots: Tensor,  # [tokens]
    positions: Tensor | None,  # [tokens]
    cos_sin: Tensor | None,  # [max_position, 2, rotary_dim / 2]
    interleaved: bool,
    k_scale: Tensor | None,  # [heads]
    v_scale: Tensor | None,  # [heads]
) -> None:
    if slots.numel() == 0:
        return
    if not (_raster(k_pages) and _raster(v_pages)):
        append_kv_by_index(
            k, v, k_pages, v_pages, slots, positions, cos_sin, interleaved, k_scale, v_scale
        )
        return
    if int(slots.min()) < 0:
        written = slots >= 0
        slots, k, v = slots[written], k[written], v[written]
        positions = None if positions is None else positions[written]
    if positions is not None and cos_sin is not None:
        k = rotary_embedding(k, positions, cos_sin, interleaved, False)
    _, heads, page_size, _ = k_pages.shape
    head = torch.arange(heads) * page_size
    pages = slots.long() // page_size
    indices, indexed = slots, 0
    for pool, x in ((k_pages, k), (v_pages, v)):
        raster = _raster(pool)
        if raster != indexed:
            # Slots as rows: head h of page p begins at (p * raster + h) * page_size.
            indices = ((pages * ((raster - 1) * page_size) + slots)[:, None] + head).flatten()
            indexed = raster
        rows = _rows(pool, raster).view(-1, pool.shape[3])
        rows.index_copy_(0, indices, x.reshape(-1, pool.shape[3]))


def paged_supports(call: Any) -> str | None:
    if call.kv_dtype is not None:
        return f"it has no pages of {call.kv_dtype}"
    if call.batch_invariant:
        return "requests are padded to the longest of their batch"
    return supports(call)


def append_supports(call: Any) -> str | None:
    if call.kv_dtype is not None:
        return f"it has no pages of {call.kv_dtype}"
    return None if call.device == "cpu" else "it reads the slots on the host; use a GPU kernel"


KERNELS = {
    "paged_attention": Kernel(paged_attention, paged_supports, efficiency=0.3),
    "append_kv": Kernel(append_kv, append_supports, efficiency=0.3),
}
