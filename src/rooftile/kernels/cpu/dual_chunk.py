"""Dual chunk attention over pages, as three calls of the native attention over pages, merged.

Queries are cut into segments at the chunk borders; each class of a segment's keys is then a run of
whole pages, which the native kernel reads where they lie.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rooftile.kernels import Kernel
from rooftile.kernels.cpu.arguments import refusal
from rooftile.kernels.cpu.paged import paged_attention
from rooftile.kernels.reference.merge import merge_attention_states


@dataclass(frozen=True)
class Segment:
    """Queries of one request that stand in one chunk, and the keys that each class of it has."""

    request: int
    end: int  # of its query tokens; they begin where the segment before ends
    keys: tuple[range, range, range]  # of its own chunk, the one before, all earlier ones


def segments_of(ends: list[int], kv_lens: list[int], chunk_len: int) -> list[Segment]:
    """ends: cu_seqlens_q. Queries before the first key belong to the first chunk's segment."""
    found = []
    for request, kv_len in enumerate(kv_lens):
        token = ends[request]
        offset = kv_len - ends[request + 1]  # from a query's token to its position
        while token < ends[request + 1]:
            border = max(token + offset, 0) // chunk_len * chunk_len
            token = min(border + chunk_len - offset, ends[request + 1])
            before = max(border - chunk_len, 0)
            keys = (range(border, max(token + offset, 0)), range(before, border), range(before))
            found.append(Segment(request, token, keys))
    return found


def paged_dual_chunk_attention(
    q_intra: Tensor,  # [tokens, num_q_heads, k_dim]
    q_succ: Tensor,  # [tokens, num_q_heads, k_dim]
    q_inter: Tensor,  # [tokens, num_q_heads, k_dim]
    k_pages: Tensor,  # [num_pages, num_kv_heads, page_size, k_dim]
    v_pages: Tensor,  # [num_pages, num_kv_heads, page_size, v_dim]
    cu_seqlens_q: Tensor,  # [batch + 1]
    kv_lens: Tensor,  # [batch]
    page_table: Tensor,  # [batch, max_pages]
    max_q_len: int,
    max_kv_len: int,
    chunk_len: int,
    softcap: float,
    scale: float,
    plan: Tensor | None = None,  # this kernel follows none
    split: Sequence[int] = (),
) -> tuple[Tensor, Tensor]:  # [tokens, num_q_heads, v_dim], [tokens, num_q_heads]
    segments = segments_of(cu_seqlens_q.tolist(), kv_lens.tolist(), chunk_len)
    cu = torch.tensor([0, *(segment.end for segment in segments)], dtype=torch.int32)
    requests = torch.tensor([segment.request for segment in segments], dtype=torch.int64)
    page_size = k_pages.shape[2]
    outs, lses = [], []
    for kind, q in enumerate((q_intra, q_succ, q_inter)):
        keys = [segment.keys[kind] for segment in segments]
        longest = max(map(len, keys), default=0)
        if kind > 0 and longest == 0:
            continue
        first_pages = torch.tensor([k.start // page_size for k in keys], dtype=torch.int64)
        columns = first_pages[:, None] + torch.arange(-(-longest // page_size))
        table = page_table[requests[:, None], columns.clamp_(max=page_table.shape[1] - 1)]
        out, lse = paged_attention(
            q,
            k_pages,
            v_pages,
            cu,
            torch.tensor([len(k) for k in keys], dtype=torch.int32),
            table,
            max_q_len,
            longest,
            sink=None,
            left=-1,
            right=0 if kind == 0 else -1,
            softcap=softcap,
            scale=scale,
            k_scale=None,
            v_scale=None,
            batch_invariant=False,
            plan=None,
            split=[],
        )
        outs.append(out)
        lses.append(lse)
    if len(outs) == 1:
        return outs[0], lses[0]
    return merge_attention_states(torch.stack(outs), torch.stack(lses))


def supports(call: Any) -> str | None:
    if call.chunk_len % call.page_size:
        return f"chunks of {call.chunk_len} tokens are no whole pages of {call.page_size}"
    return refusal(call)


KERNELS = {
    "paged_dual_chunk_attention": Kernel(paged_dual_chunk_attention, supports, efficiency=0.5),
}
