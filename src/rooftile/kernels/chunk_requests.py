"""Requests whose queries lie in several chunks, as one request for each of these chunks.

So a kernel of dual chunk attention that follows a plan never has queries of two chunks in one tile,
and its planner need not know of chunks: a piece's last query stands at its last key, as a request's.
"""

from __future__ import annotations

import torch
from torch import Tensor


def cut_at_chunks(
    cu_seqlens_q: Tensor,  # [batch + 1]
    kv_lens: Tensor,  # [batch]
    page_table: Tensor,  # [batch, max_pages]
    tokens: int,  # query tokens of all requests, at most
    chunk_len: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """cu_seqlens_q [pieces + 1], kv_lens [pieces] and page_table [pieces, max_pages] of the pieces, whose
    number depends on capacities alone; those at the end may have no queries. Nothing waits for the
    device. batch must not be 0.
    """
    batch = kv_lens.shape[0]
    begin, end = cu_seqlens_q[:-1].long(), cu_seqlens_q[1:].long()
    offset = kv_lens.long() - (end - begin)  # of a query's position from its number
    first = offset.clamp(min=0) // chunk_len
    last = (kv_lens.long() - 1).clamp(min=0) // chunk_len
    count = torch.where(end > begin, last - first + 1, 0)
    ends = count.cumsum(0)
    # m queries touch at most (m - 1) // chunk_len + 2 chunks.
    piece = torch.arange(2 * batch + tokens // chunk_len, device=kv_lens.device)
    request = torch.searchsorted(ends, piece, right=True)
    idle = request == batch
    request = request.clamp(max=batch - 1)
    chunk = first[request] + piece - (ends - count)[request]
    border = chunk * chunk_len
    # Queries before the first key, which see nothing, belong to the first piece.
    q_begin = begin[request] + torch.where(chunk == first[request], 0, border - offset[request])
    q_begin = torch.where(idle, end[-1], q_begin)
    lens = torch.minimum(border + chunk_len, kv_lens[request]).masked_fill(idle, 0)
    cu = torch.cat((q_begin, end[-1:]))
    return cu.to(torch.int32), lens.to(torch.int32), page_table.index_select(0, request)
