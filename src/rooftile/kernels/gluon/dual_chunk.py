"""Dual chunk attention on Hopper, over pages in one launch, dense as pairs of long chunks.

The paged kernel changes its queries where its walk over the keys crosses a chunk's border: a tile of
queries lies in one chunk, and the copy engine brings the next rotation behind the keys that meet it.

Dense: three launches a chunk, each of many tiles, and one that merges: a merge moves four outputs,
which is a hundredth of the time of chunks of thousands of tokens, and the attention kernel is half
as fast again as the portable one that does all in one launch.
"""
# mypy: disable-error-code="no-untyped-def"

from types import SimpleNamespace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from rooftile.kernels import Kernel
from rooftile.kernels.chunk_requests import cut_at_chunks
from rooftile.kernels.gluon import attention as plain
from rooftile.kernels.gluon import paged
from rooftile.kernels.gluon.paged.config import longest_tile

SHORTEST_CHUNK = 2048  # below, launches do not fill the machine


@triton.jit(do_not_specialize=["heads", "row_offset", "rows"])
def _merge_kernel(
    out0,  # parts [batch, rows, heads, dim]
    out1,
    out2,
    lse0,  # [batch, rows, heads]
    lse1,
    lse2,
    out,  # [batch, q_len, heads, dim], rows from row_offset on
    lse,
    batch_stride,  # of lse; of out times dim
    row_offset,
    rows,
    heads,
    dim,
    tile: tl.constexpr,
    heads_tile: tl.constexpr,
    three: tl.constexpr,
):
    """Program (row, batch)."""
    row = tl.program_id(0)
    batch = tl.program_id(1).to(tl.int64)
    head = tl.arange(0, heads_tile)
    column = tl.arange(0, tile)
    present = head < heads
    mask = present[:, None] & (column < dim)[None, :]
    at = (batch * rows + row) * heads + head
    at_out = at[:, None] * dim + column[None, :]
    a = tl.load(lse0 + at, mask=present, other=float("-inf"))
    b = tl.load(lse1 + at, mask=present, other=float("-inf"))
    c = a
    maximum = tl.maximum(a, b)
    if three:
        c = tl.load(lse2 + at, mask=present, other=float("-inf"))
        maximum = tl.maximum(maximum, c)
    weight0 = tl.exp(a - maximum)  # every query of these chunks sees a key of every part
    weight1 = tl.exp(b - maximum)
    total = weight0 + weight1
    o = tl.load(out0 + at_out, mask=mask, other=0.0).to(tl.float32) * weight0[:, None]
    o += tl.load(out1 + at_out, mask=mask, other=0.0).to(tl.float32) * weight1[:, None]
    if three:
        weight2 = tl.exp(c - maximum)
        total += weight2
        o += tl.load(out2 + at_out, mask=mask, other=0.0).to(tl.float32) * weight2[:, None]
    o = o / total[:, None]
    to = batch * batch_stride + (row_offset + row).to(tl.int64) * heads + head
    tl.store(out + to[:, None] * dim + column[None, :], o.to(out.dtype.element_ty), mask=mask)
    tl.store(lse + to, maximum + tl.log(total), mask=present)


def dual_chunk_attention(
    q_intra: Tensor,  # [batch, q_len, num_q_heads, k_dim]
    q_succ: Tensor,  # [batch, q_len, num_q_heads, k_dim]
    q_inter: Tensor,  # [batch, q_len, num_q_heads, k_dim]
    k: Tensor,  # [batch, kv_len, num_kv_heads, k_dim]
    v: Tensor,  # [batch, kv_len, num_kv_heads, v_dim]
    chunk_len: int,
    softcap: float,
    scale: float,
) -> tuple[Tensor, Tensor]:  # [batch, q_len, num_q_heads, v_dim], [batch, q_len, num_q_heads]
    m, n = q_intra.shape[1], k.shape[1]
    offset = n - m
    if max(offset, 0) // chunk_len == max(n - 1, 0) // chunk_len == 0:
        return plain.attention(q_intra, k, v, None, -1, 0, softcap, scale)
    out = q_intra.new_empty(*q_intra.shape[:-1], v.shape[-1])
    lse = q_intra.new_empty(q_intra.shape[:-1], dtype=torch.float32)
    row = 0
    while row < m:
        border = max(row + offset, 0) // chunk_len * chunk_len
        end = min(m, border + chunk_len - offset)
        before = max(border - chunk_len, 0)
        parts = []
        for q, first, last in (
            (q_intra, border, end + offset),
            (q_succ, before, border),
            (q_inter, 0, before),
        ):
            if first < last:
                keys, right = slice(first, last), 0 if first == border else -1
                parts.append(
                    plain.attention(
                        *(q[:, row:end], k[:, keys], v[:, keys], None, -1, right, softcap, scale)
                    )
                )
        if len(parts) == 1:
            out[:, row:end], lse[:, row:end] = parts[0]
        elif parts:
            _merge(parts, out, lse, row)
        row = end
    return out, lse


def _merge(parts: list[tuple[Tensor, Tensor]], out: Tensor, lse: Tensor, row: int) -> None:
    """Of rows from `row` on."""
    three = len(parts) == 3
    batch, rows, heads, dim = parts[0][0].shape
    outs, lses = ([part[i] for part in (*parts, parts[0])[:3]] for i in range(2))
    with torch.cuda.device(out.device):
        _merge_kernel[(rows, batch)](
            *(*outs, *lses, out, lse, lse.stride(0), row, rows, heads, dim),
            tile=triton.next_power_of_2(dim),
            heads_tile=triton.next_power_of_2(heads),
            three=three,
        )


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
    plan: Tensor | None,
    split: list[int],
) -> tuple[Tensor, Tensor]:  # [tokens, num_q_heads, v_dim], [tokens, num_q_heads]
    q = _end_to_end(q_intra, q_succ, q_inter)
    if plan is None and max_q_len > 1 and kv_lens.shape[0]:
        tokens = q_intra.shape[0]
        cu_seqlens_q, kv_lens, page_table = cut_at_chunks(
            cu_seqlens_q, kv_lens, page_table, tokens, chunk_len
        )
        max_q_len = min(max_q_len, chunk_len)
    return paged.paged_attention(
        q,
        k_pages,
        v_pages,
        cu_seqlens_q,
        kv_lens,
        page_table,
        max_q_len,
        max_kv_len,
        sink=None,
        left=-1,
        right=0,
        softcap=softcap,
        scale=scale,
        k_scale=None,
        v_scale=None,
        batch_invariant=False,
        plan=plan,
        split=split,
        chunk_len=chunk_len,
    )


def _end_to_end(q_intra: Tensor, q_succ: Tensor, q_inter: Tensor) -> Tensor:
    """All three [tokens, ...] as one [3 * tokens, ...]; a view where they lie so in memory."""
    tokens, *rest = q_intra.shape
    gap = q_intra.numel() * q_intra.element_size()
    begins = [x.data_ptr() - q_intra.data_ptr() for x in (q_succ, q_inter)]
    if begins == [gap, 2 * gap] and all(x.is_contiguous() for x in (q_intra, q_succ, q_inter)):
        return q_intra.as_strided((3 * tokens, *rest), q_intra.stride())
    return torch.cat((q_intra, q_succ, q_inter))


def paged_supports(call: Any) -> str | None:
    plain_call = SimpleNamespace(**vars(call), kv_dtype=None)
    reason = paged.supports(plain_call)
    if reason is not None:
        return reason
    tile = longest_tile(call.k_dim, call.v_dim)
    if call.chunk_len % tile:
        return f"chunks of {call.chunk_len} tokens are no whole tiles of {tile} keys"
    return None


def supports(call: Any) -> str | None:
    if call.chunk_len < SHORTEST_CHUNK:
        return f"it is for chunks of at least {SHORTEST_CHUNK} tokens, not {call.chunk_len}"
    return plain.supports(call)


KERNELS = {
    "dual_chunk_attention": Kernel(dual_chunk_attention, supports, efficiency=0.7),
    "paged_dual_chunk_attention": Kernel(
        paged_dual_chunk_attention, paged_supports, efficiency=0.8
    ),
}
