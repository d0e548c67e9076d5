"""Dual chunk attention (An et al. 2024, arXiv 2402.17463) over dense, ragged and paged keys.

Scores of a query come from one of its three rotations (`dual_chunk_rotary_embedding`), by how many
chunks lie between it and the key. Keys do not depend on that, so one online softmax over all of
them that switches its query is the same as merging three attentions.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rooftile.kernels.chunk_requests import cut_at_chunks
from rooftile.ops.attention_call import AttentionCall, fake_attention
from rooftile.ops.attention_check import check_cu_seqlens, check_heads, check_options, check_qkv
from rooftile.ops.check import check_same, check_shape, refuse_gradient, require
from rooftile.ops.dual_chunk_rotary import check_chunks
from rooftile.ops.operator import GPU_FAMILIES, Operator
from rooftile.ops.paged import make_plan, no_plan
from rooftile.ops.paged_check import check_batch, check_pages
from rooftile.types import AttentionPlan, PagedBatch


@dataclass(frozen=True)
class DualChunkCall:
    """The static properties that choose a kernel."""

    device: str
    dtype: torch.dtype
    num_q_heads: int
    num_kv_heads: int
    k_dim: int
    v_dim: int
    chunk_len: int
    has_softcap: bool
    page_size: int = 0  # 0: not paged


def dual_chunk_attention(
    q_intra: Tensor,  # [batch, q_len, num_q_heads, k_dim]
    q_succ: Tensor,  # the same shape
    q_inter: Tensor,  # the same shape
    k: Tensor,  # [batch, kv_len, num_kv_heads, k_dim]
    v: Tensor,  # [batch, kv_len, num_kv_heads, v_dim]
    *,
    chunk_size: int,
    local_size: int,
    softcap: float = 0.0,
    softmax_scale: float | None = None,
    return_lse: bool = False,
    kernel: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Causal attention whose scores come from the query that belongs to a key's distance in chunks.

    With L = chunk_size - local_size, query i at position p = i + kv_len - q_len meets key j <= p
    as q_intra where p // L = j // L, as q_succ where it is one more, else as q_inter. Queries and
    keys come rotated (`dual_chunk_rotary_embedding`; keys at positions j mod L). `softcap`,
    `softmax_scale`, the results and their dtypes are those of `attention`.

    Args:
        q_intra: [batch, q_len, num_q_heads, k_dim]
        q_succ: the same shape
        q_inter: the same shape
        k: [batch, kv_len, num_kv_heads, k_dim]
        v: [batch, kv_len, num_kv_heads, v_dim]

    Returns:
        out [batch, q_len, num_q_heads, v_dim]; with `return_lse` also lse [batch, q_len, num_q_heads].

    Raises:
        ValueError: shapes, dtypes, devices or sizes that do not fit together.
        NotImplementedError: inputs that require a gradient; a kernel that cannot run the call.
    """
    name = "dual_chunk_attention"
    check_qkv(name, q_intra, k, v, "[batch, length, heads, dim]", 4, "q_intra")
    require(
        q_intra.shape[0] == k.shape[0],
        lambda: (
            f"{name}: q_intra has batch {q_intra.shape[0]} but k has batch {k.shape[0]}; "
            f"they must be equal"
        ),
    )
    scale = _check_queries(name, q_intra, q_succ, q_inter, softcap, softmax_scale)
    check_chunks(name, chunk_size, local_size)
    refuse_gradient(name, q_intra=q_intra, q_succ=q_succ, q_inter=q_inter, k=k, v=v)
    out, lse = DUAL_CHUNK.handle(
        q_intra, q_succ, q_inter, k, v, chunk_size - local_size, softcap, scale, kernel
    )
    return (out, lse) if return_lse else out


def dual_chunk_attention_varlen(
    q_intra: Tensor,  # [tokens_q, num_q_heads, k_dim]
    q_succ: Tensor,  # the same shape
    q_inter: Tensor,  # the same shape
    k: Tensor,  # [tokens_k, num_kv_heads, k_dim]
    v: Tensor,  # [tokens_k, num_kv_heads, v_dim]
    cu_seqlens_q: Tensor,  # [batch + 1] int32 or int64
    cu_seqlens_k: Tensor,  # [batch + 1] int32 or int64
    *,
    chunk_size: int,
    local_size: int,
    max_q_len: int | None = None,
    max_kv_len: int | None = None,
    softcap: float = 0.0,
    softmax_scale: float | None = None,
    return_lse: bool = False,
    kernel: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """`dual_chunk_attention` over sequences of different lengths, laid end to end.

    Lengths, maxima and padding are as in `attention_varlen`; chunks begin anew in each sequence.

    Args:
        q_intra: [tokens_q, num_q_heads, k_dim]
        q_succ: the same shape
        q_inter: the same shape
        k: [tokens_k, num_kv_heads, k_dim]
        v: [tokens_k, num_kv_heads, v_dim]
        cu_seqlens_q: [batch + 1] int32 or int64
        cu_seqlens_k: [batch + 1] int32 or int64

    Returns:
        out [tokens_q, num_q_heads, v_dim]; with `return_lse` also lse [tokens_q, num_q_heads].

    Raises:
        ValueError, NotImplementedError: as `dual_chunk_attention` and `attention_varlen`.
    """
    name = "dual_chunk_attention_varlen"
    check_qkv(name, q_intra, k, v, "[tokens, heads, dim]", 3, "q_intra")
    scale = _check_queries(name, q_intra, q_succ, q_inter, softcap, softmax_scale)
    check_chunks(name, chunk_size, local_size)
    max_q_len = q_intra.shape[0] if max_q_len is None else max_q_len
    max_kv_len = k.shape[0] if max_kv_len is None else max_kv_len
    check_cu_seqlens(name, "cu_seqlens_q", cu_seqlens_q, "q_intra", q_intra, max_q_len, "max_q_len")
    check_cu_seqlens(name, "cu_seqlens_k", cu_seqlens_k, "k", k, max_kv_len, "max_kv_len")
    check_shape(name, "cu_seqlens_k", cu_seqlens_k, tuple(cu_seqlens_q.shape), "[batch + 1]")
    refuse_gradient(name, q_intra=q_intra, q_succ=q_succ, q_inter=q_inter, k=k, v=v)
    out, lse = DUAL_CHUNK_VARLEN.handle(
        *(q_intra, q_succ, q_inter, k, v, cu_seqlens_q, cu_seqlens_k, max_q_len, max_kv_len),
        *(chunk_size - local_size, softcap, scale, kernel),
    )
    return (out, lse) if return_lse else out


def paged_dual_chunk_attention(
    q_intra: Tensor,  # [tokens, num_q_heads, k_dim]
    q_succ: Tensor,  # the same shape
    q_inter: Tensor,  # the same shape
    k_pages: Tensor,  # [num_pages, num_kv_heads, page_size, k_dim]
    v_pages: Tensor,  # [num_pages, num_kv_heads, page_size, v_dim]
    batch: PagedBatch,
    *,
    chunk_size: int,
    local_size: int,
    softcap: float = 0.0,
    softmax_scale: float | None = None,
    return_lse: bool = False,
    kernel: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """`dual_chunk_attention` over pages: prefill, decode and any mixture, as `paged_attention`.

    Results depend neither on the page size nor on how a request's tokens are split into steps:
    chunks are counted from the request's first key.

    Args:
        q_intra: [tokens, num_q_heads, k_dim]
        q_succ: the same shape
        q_inter: the same shape
        k_pages: [num_pages, num_kv_heads, page_size, k_dim]
        v_pages: [num_pages, num_kv_heads, page_size, v_dim]

    Returns:
        out [tokens, num_q_heads, v_dim]; with `return_lse` also lse [tokens, num_q_heads].

    Raises:
        ValueError, NotImplementedError: as `dual_chunk_attention` and `paged_attention`.
    """
    name = "paged_dual_chunk_attention"
    check_pages(name, q_intra, "q_intra", k_pages, v_pages, takes_scales=False)
    require(
        q_intra.shape[-1] == k_pages.shape[-1],
        lambda: (
            f"{name}: q_intra has dim {q_intra.shape[-1]} but k_pages has dim {k_pages.shape[-1]}; "
            f"they must be equal"
        ),
    )
    check_heads(name, q_intra.shape[1], k_pages.shape[1])
    scale = _check_queries(name, q_intra, q_succ, q_inter, softcap, softmax_scale)
    check_chunks(name, chunk_size, local_size)
    refuse_gradient(name, q_intra=q_intra, q_succ=q_succ, q_inter=q_inter)
    refuse_gradient(name, k_pages=k_pages, v_pages=v_pages)
    check_batch(name, q_intra, k_pages, batch, -1, "q_intra")
    out, lse = PAGED_DUAL_CHUNK.handle(
        *(q_intra, q_succ, q_inter, k_pages, v_pages),
        *(batch.cu_seqlens_q, batch.kv_lens, batch.page_table),
        *(batch.max_q_len, batch.max_kv_len, chunk_size - local_size, softcap, scale),
        *(None, [], kernel),
    )
    return (out, lse) if return_lse else out


def _check_queries(
    name: str,
    q_intra: Tensor,
    q_succ: Tensor,
    q_inter: Tensor,
    softcap: float,
    softmax_scale: float | None,
) -> float:
    """The scale, default 1 / sqrt(k_dim)."""
    check_same(name, q_intra=q_intra, q_succ=q_succ, q_inter=q_inter)
    for other_name, other in (("q_succ", q_succ), ("q_inter", q_inter)):
        check_shape(name, other_name, other, tuple(q_intra.shape), "the shape of q_intra")
    return check_options(name, q_intra, True, None, softcap, None, softmax_scale)[2]


def _call(
    q: Tensor,  # [..., num_q_heads, k_dim]
    k: Tensor,  # [..., num_kv_heads, k_dim]
    v: Tensor,  # [..., num_kv_heads, v_dim]
    chunk_len: int,
    softcap: float,
) -> DualChunkCall:
    return DualChunkCall(
        *(q.device.type, q.dtype, q.shape[-2], k.shape[-2], k.shape[-1], v.shape[-1]),
        chunk_len,
        has_softcap=softcap != 0,
    )


def dual_chunk_call(
    q: Tensor, k_pages: Tensor, v_pages: Tensor, chunk_len: int, softcap: float
) -> DualChunkCall:
    """Of attention over pages."""
    return DualChunkCall(
        *(q.device.type, q.dtype, q.shape[1], k_pages.shape[1], k_pages.shape[3], v_pages.shape[3]),
        chunk_len,
        has_softcap=softcap != 0,
        page_size=k_pages.shape[2],
    )


def plan_dual_chunk(
    call: DualChunkCall, batch: PagedBatch, tokens: int, kernel: str = "auto"
) -> tuple[PagedBatch, AttentionPlan]:
    """A step's plan, and the batch that goes with it: where kernels follow plans, the pieces of requests
    whose queries lie in one chunk each.
    """
    family = PAGED_DUAL_CHUNK.choose(call, kernel)
    if family not in GPU_FAMILIES:
        return batch, no_plan(family, batch)
    if batch.max_q_len > 1:
        pieces = cut_at_chunks(
            batch.cu_seqlens_q, batch.kv_lens, batch.page_table, tokens, call.chunk_len
        )
        longest = min(batch.max_q_len, call.chunk_len)
        batch = PagedBatch(*pieces, longest, batch.max_kv_len)
    plain = AttentionCall(
        *(call.device, call.dtype, call.num_q_heads, call.num_kv_heads, call.k_dim, call.v_dim),
        *(-1, 0, call.has_softcap),
        has_sink=False,
        page_size=call.page_size,
    )
    return batch, make_plan(plain, replace(batch, prefix=None), tokens, family)


_QUERIES = "Tensor q_intra, Tensor q_succ, Tensor q_inter"
_OPTIONS = "int chunk_len, float softcap, float scale"

DUAL_CHUNK = Operator(
    "dual_chunk_attention",
    f"({_QUERIES}, Tensor k, Tensor v, {_OPTIONS}) -> (Tensor, Tensor)",
    module="dual_chunk",
    families=("gluon", "triton", "torch", "reference"),
    call=lambda q, q_succ, q_inter, k, v, chunk_len, softcap, scale: _call(
        q, k, v, chunk_len, softcap
    ),
    fake=lambda q, q_succ, q_inter, k, v, *_: fake_attention(q, v),
)

DUAL_CHUNK_VARLEN = Operator(
    "dual_chunk_attention_varlen",
    f"({_QUERIES}, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_k,"
    f" SymInt max_q_len, SymInt max_kv_len, {_OPTIONS}) -> (Tensor, Tensor)",
    module="dual_chunk",
    families=("triton", "torch", "reference"),
    call=lambda q, q_succ, q_inter, k, v, cu_q, cu_k, max_q, max_kv, chunk_len, softcap, scale: (
        _call(q, k, v, chunk_len, softcap)
    ),
    fake=lambda q, q_succ, q_inter, k, v, *_: fake_attention(q, v),
)

PAGED_DUAL_CHUNK = Operator(
    "paged_dual_chunk_attention",
    f"({_QUERIES}, Tensor k_pages, Tensor v_pages, Tensor cu_seqlens_q, Tensor kv_lens,"
    f" Tensor page_table, SymInt max_q_len, SymInt max_kv_len, {_OPTIONS}, Tensor? plan,"
    " SymInt[] split) -> (Tensor, Tensor)",
    module="dual_chunk",
    families=("gluon", "triton", "cpu", "torch", "reference"),
    call=lambda q, q_succ, q_inter, k_pages, v_pages, *rest: dual_chunk_call(
        q, k_pages, v_pages, *rest[5:7]
    ),
    fake=lambda q, q_succ, q_inter, k_pages, v_pages, *_: fake_attention(q, v_pages),
)
