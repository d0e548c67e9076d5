"""Attention of speculated token trees over pages (Miao et al. 2024, SpecInfer)."""

from __future__ import annotations

import torch
from torch import Tensor

from rooftile.ops.attention_call import fake_attention
from rooftile.ops.attention_check import check_heads, check_options
from rooftile.ops.check import check_device, check_shape, refuse_gradient, require
from rooftile.ops.operator import Operator
from rooftile.ops.paged import paged_call
from rooftile.ops.paged_check import check_batch, check_pages, check_scales
from rooftile.types import PagedBatch

MOST_DRAFTED = 64  # query tokens of a request: bits of a mask


def tree_attention(
    q: Tensor,  # [tokens, num_q_heads, k_dim]
    k_pages: Tensor,  # [num_pages, num_kv_heads, page_size, k_dim]
    v_pages: Tensor,  # [num_pages, num_kv_heads, page_size, v_dim]
    batch: PagedBatch,
    tree: Tensor,  # [tokens] int64
    *,
    softcap: float = 0.0,
    sink: Tensor | None = None,  # [num_q_heads]
    softmax_scale: float | None = None,
    k_scale: Tensor | None = None,  # [num_kv_heads] float32
    v_scale: Tensor | None = None,  # [num_kv_heads] float32
    return_lse: bool = False,
    kernel: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """`paged_attention` of several continuations of each request at once.

    The last q_len keys of a request are those of its query tokens, the nodes of a tree. A query
    sees every key before these, and of these key j iff bit j of its `tree` is set: a node sets
    the bits of its ancestors and its own. Everything else is as in `paged_attention`.

    Args:
        q: [tokens, num_q_heads, k_dim]
        k_pages: [num_pages, num_kv_heads, page_size, k_dim]
        v_pages: [num_pages, num_kv_heads, page_size, v_dim]
        tree: [tokens] int64
        sink: [num_q_heads]
        k_scale: [num_kv_heads] float32
        v_scale: [num_kv_heads] float32

    Returns:
        out [tokens, num_q_heads, v_dim]; with `return_lse` also lse [tokens, num_q_heads].

    Raises:
        ValueError: as `paged_attention`, and more than 64 query tokens of a request.
        NotImplementedError: inputs that require a gradient.
    """
    name = "tree_attention"
    check_pages(name, q, "q", k_pages, v_pages)
    require(
        q.shape[-1] == k_pages.shape[-1],
        lambda: f"{name}: q has dim {q.shape[-1]} but k_pages has dim {k_pages.shape[-1]}",
    )
    check_heads(name, q.shape[1], k_pages.shape[1])
    check_scales(name, k_pages, v_pages, k_scale, v_scale)
    _, _, scale = check_options(name, q, False, None, softcap, sink, softmax_scale)
    check_batch(name, q, k_pages, batch, -1)
    check_device(name, q=q, tree=tree)
    check_shape(name, "tree", tree, (q.shape[0],), "[tokens]")
    require(
        tree.dtype == torch.int64,
        lambda: f"{name}: tree has dtype {tree.dtype}; convert it to torch.int64",
    )
    require(
        batch.max_q_len <= MOST_DRAFTED,
        lambda: (
            f"{name}: max_q_len is {batch.max_q_len}; a tree has at most {MOST_DRAFTED} tokens, "
            f"one for each bit of its masks"
        ),
    )
    scales = {"k_scale": k_scale, "v_scale": v_scale}
    refuse_gradient(name, "", q=q, k_pages=k_pages, v_pages=v_pages, sink=sink, **scales)
    out, lse = TREE_ATTENTION.handle(
        *(q, k_pages, v_pages, batch.cu_seqlens_q, batch.kv_lens, batch.page_table, tree),
        *(batch.max_q_len, batch.max_kv_len, sink, softcap, scale, k_scale, v_scale, kernel),
    )
    return (out, lse) if return_lse else out


TREE_ATTENTION = Operator(
    "tree_attention",
    "(Tensor q, Tensor k_pages, Tensor v_pages, Tensor cu_seqlens_q, Tensor kv_lens,"
    " Tensor page_table, Tensor tree, SymInt max_q_len, SymInt max_kv_len, Tensor? sink,"
    " float softcap, float scale, Tensor? k_scale, Tensor? v_scale) -> (Tensor, Tensor)",
    module="tree",
    families=("triton", "reference"),
    call=lambda q, k_pages, v_pages, *rest: paged_call(
        *(q, k_pages, v_pages, rest[6], -1, -1, rest[7])
    ),
    fake=lambda q, k_pages, v_pages, *_: fake_attention(q, v_pages),
)
