"""Decoding with dual chunk attention on Hopper: three requests to the paged kernel for each of ours.

A decoding request has one query in each class, whose keys are a run of whole pages. One small kernel
writes the three queries, lengths and rows of page numbers, one launch of the paged kernel attends to
them all, one more merges each request's three results.
"""
# mypy: disable-error-code="no-untyped-def"

import torch
import triton
import triton.language as tl
from torch import Tensor

from rooftile.kernels.gluon import paged

CLASSES = 3


# A batch's size is no reason to compile anew.
_UNSPECIALISED = ["batch", "tokens", "max_pages", "table_stride", "chunk_len"]


@triton.jit(do_not_specialize=_UNSPECIALISED)
def _part_kernel(
    q_intra,
    q_succ,
    q_inter,
    cu_seqlens_q,
    kv_lens,
    page_table,
    q,  # [3 * batch, heads, dim]
    lens,  # [3 * batch]
    table,  # [3 * batch, max_pages]
    q_stride,
    q_head_stride,
    table_stride,
    batch,
    max_pages,
    heads,
    dim,
    chunk_len,
    page_size: tl.constexpr,
    heads_tile: tl.constexpr,
    dim_tile: tl.constexpr,
    pages_tile: tl.constexpr,
):
    """Program (request, class)."""
    request = tl.program_id(0)
    kind = tl.program_id(1)
    token = tl.load(cu_seqlens_q + request)
    present = tl.load(cu_seqlens_q + request + 1) > token
    kv_len = tl.load(kv_lens + request)
    own = tl.maximum(kv_len - 1, 0) // chunk_len * chunk_len
    before = tl.maximum(own - chunk_len, 0)
    queries = q_intra
    first = own
    last = kv_len
    if kind == 1:
        queries = q_succ
        first = before
        last = own
    elif kind == 2:
        queries = q_inter
        first = own * 0
        last = before
    row = kind * batch + request
    count = tl.where(present, last - first, 0)
    tl.store(lens + row, count)
    head = tl.arange(0, heads_tile)[:, None]
    column = tl.arange(0, dim_tile)[None, :]
    inside = (head < heads) & (column < dim)
    at = queries + token.to(tl.int64) * q_stride + head * q_head_stride + column
    values = tl.load(at, mask=inside & present & (count > 0), other=0.0)
    tl.store(q + (row.to(tl.int64) * heads + head) * dim + column, values, mask=inside)
    pages = (count + page_size - 1) // page_size
    source = page_table + request.to(tl.int64) * table_stride + first // page_size
    target = table + row.to(tl.int64) * max_pages
    for start in range(0, pages, pages_tile):
        page = start + tl.arange(0, pages_tile)
        number = tl.load(source + page, mask=page < pages, other=0)
        tl.store(target + page, number, mask=page < pages)


@triton.jit(do_not_specialize=_UNSPECIALISED)
def _join_kernel(
    parts,  # [3 * batch, heads, dim]
    part_lse,  # [3 * batch, heads]
    cu_seqlens_q,
    out,  # [tokens, heads, dim]
    lse,
    batch,
    tokens,
    heads,
    dim,
    heads_tile: tl.constexpr,
    dim_tile: tl.constexpr,
):
    """Program: a request; those after the last clear padding."""
    request = tl.program_id(0)
    head = tl.arange(0, heads_tile)
    column = tl.arange(0, dim_tile)
    present = head < heads
    inside = present[:, None] & (column < dim)[None, :]
    if request >= batch:
        token = tl.load(cu_seqlens_q + batch) + request - batch
        if token < tokens:
            at = token.to(tl.int64) * heads + head
            zero = tl.zeros([heads_tile, dim_tile], out.dtype.element_ty)
            tl.store(out + at[:, None] * dim + column[None, :], zero, mask=inside)
            tl.store(lse + at, tl.full([heads_tile], float("-inf"), tl.float32), mask=present)
        return
    token = tl.load(cu_seqlens_q + request)
    if tl.load(cu_seqlens_q + request + 1) == token:
        return
    at = request.to(tl.int64) * heads + head
    step = tl.cast(batch, tl.int64) * heads
    a = tl.load(part_lse + at, mask=present, other=float("-inf"))
    b = tl.load(part_lse + at + step, mask=present, other=float("-inf"))
    c = tl.load(part_lse + at + 2 * step, mask=present, other=float("-inf"))
    maximum = tl.maximum(tl.maximum(tl.maximum(a, b), c), -1.0e30)
    weight_a = tl.exp(a - maximum)
    weight_b = tl.exp(b - maximum)
    weight_c = tl.exp(c - maximum)
    total = weight_a + weight_b + weight_c
    at_out = at[:, None] * dim + column[None, :]
    o = tl.load(parts + at_out, mask=inside, other=0.0).to(tl.float32) * weight_a[:, None]
    seen = inside & (b > float("-inf"))[:, None]
    other = tl.load(parts + at_out + step * dim, mask=seen, other=0.0).to(tl.float32)
    o += other * weight_b[:, None]
    seen = inside & (c > float("-inf"))[:, None]
    other = tl.load(parts + at_out + 2 * step * dim, mask=seen, other=0.0).to(tl.float32)
    o += other * weight_c[:, None]
    o = o / tl.where(total > 0, total, 1.0)[:, None]
    to = token.to(tl.int64) * heads + head
    tl.store(out + to[:, None] * dim + column[None, :], o.to(out.dtype.element_ty), mask=inside)
    log_sum = tl.where(total > 0, maximum + tl.log(total), float("-inf"))
    tl.store(lse + to, log_sum, mask=present)


def decode(
    queries: tuple[Tensor, Tensor, Tensor],  # each [tokens, num_q_heads, k_dim], of equal strides
    k_pages: Tensor,  # [num_pages, num_kv_heads, page_size, k_dim]
    v_pages: Tensor,  # [num_pages, num_kv_heads, page_size, v_dim]
    cu_seqlens_q: Tensor,  # [batch + 1], no request has more than one query
    kv_lens: Tensor,  # [batch]
    page_table: Tensor,  # [batch, max_pages]
    max_kv_len: int,
    chunk_len: int,  # a multiple of page_size
    softcap: float,
    scale: float,
) -> tuple[Tensor, Tensor]:  # [tokens, num_q_heads, v_dim], [tokens, num_q_heads]
    tokens, heads, k_dim = queries[0].shape
    page_size, v_dim = k_pages.shape[2], v_pages.shape[3]
    batch, max_pages = page_table.shape
    like = queries[0]
    out = like.new_empty(tokens, heads, v_dim)
    lse = like.new_empty(tokens, heads, dtype=torch.float32)
    rows = CLASSES * batch
    q = like.new_empty(rows, heads, k_dim)
    lens = kv_lens.new_empty(rows, dtype=torch.int32)
    table = page_table.new_empty(rows, max_pages, dtype=torch.int32)
    page_table = page_table if page_table.stride(1) == 1 else page_table.contiguous()
    heads_tile = triton.next_power_of_2(heads)
    with torch.cuda.device(like.device):
        _part_kernel[(batch, CLASSES)](
            *(*queries, cu_seqlens_q, kv_lens, page_table, q, lens, table),
            *(like.stride(0), like.stride(1), page_table.stride(0), batch, max_pages, heads),
            *(k_dim, chunk_len),
            page_size=page_size,
            heads_tile=heads_tile,
            dim_tile=triton.next_power_of_2(k_dim),
            pages_tile=1024,
        )
        parts, part_lse = paged.paged_attention(
            q,
            k_pages,
            v_pages,
            torch.arange(rows + 1, dtype=torch.int32, device=like.device),
            lens,
            table,
            1,
            max_kv_len,
            sink=None,
            left=-1,
            right=0,
            softcap=softcap,
            scale=scale,
            k_scale=None,
            v_scale=None,
            batch_invariant=False,
            plan=None,
            split=[],
        )
        # A request has one token at most, so at most all tokens but none are padding.
        _join_kernel[(batch + tokens,)](
            *(parts, part_lse, cu_seqlens_q, out, lse, batch, tokens, heads, v_dim),
            heads_tile=heads_tile,
            dim_tile=triton.next_power_of_2(v_dim),
        )
    return out, lse
