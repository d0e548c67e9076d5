"""Attention over paged keys and values, and writing into pages, in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from rooftile.kernels import Kernel, anything
from rooftile.kernels.reference.attention import attention, nothing_seen
from rooftile.kernels.reference.precision import widen
from rooftile.kernels.reference.rope import rotary_embedding


def paged_attention(
    q: Tensor,  # [tokens, num_q_heads, k_dim]
    k_pages: Tensor,  # [num_pages, num_kv_heads, page_size, k_dim]
    v_pages: Tensor,  # [num_pages, num_kv_heads, page_size, v_dim]
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
) -> tuple[Tensor, Tensor]:  # [tokens, num_q_heads, v_dim], [tokens, num_q_heads]
    out, lse = nothing_seen(q, v_pages.shape[-1])
    page_size = k_pages.shape[2]
    ends = cu_seqlens_q.tolist()
    for i, kv_len in enumerate(kv_lens.tolist()):
        queries = slice(ends[i], ends[i + 1])
        q_len = ends[i + 1] - ends[i]
        if q_len == 0:
            continue
        # Pages wholly outside the window may be gone, so they are not even looked up.
        first = first_visible(q_len, kv_len, left)
        pages = page_table[i, first // page_size : -(-kv_len // page_size)].long()
        skipped = first // page_size * page_size
        k, v = (
            p[pages].transpose(1, 2).flatten(0, 1)[first - skipped : kv_len - skipped]
            for p in (k_pages, v_pages)
        )
        if k_scale is not None and v_scale is not None:
            k, v = (x.to(widen(q).dtype) * s[:, None] for x, s in ((k, k_scale), (v, v_scale)))
        one = attention(q[None, queries], k[None], v[None], sink, left, right, softcap, scale)
        out[queries], lse[queries] = one[0][0], one[1][0]
    return out, lse


def first_visible(q_len: int, kv_len: int, left: int) -> int:
    """The first key that any of a request's queries may see (at most kv_len)."""
    return 0 if left < 0 else min(max(0, kv_len - q_len - left), kv_len)


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
    written = slots >= 0
    slots, k, v = slots[written].long(), k[written], v[written]
    if cos_sin is not None and positions is not None:
        k = rotary_embedding(k, positions[written].long(), cos_sin, interleaved, inverse=False)
    pages, offsets = slots // k_pages.shape[2], slots % k_pages.shape[2]
    if k_scale is not None and v_scale is not None:
        k, v = quantised(k, k_scale, k_pages.dtype), quantised(v, v_scale, v_pages.dtype)
        # torch has no indexed writes of 8-bit floats.
        k, v, k_pages, v_pages = (x.view(torch.uint8) for x in (k, v, k_pages, v_pages))
    k_pages[pages, :, offsets] = k
    v_pages[pages, :, offsets] = v


def quantised(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """x [tokens, heads, dim] in units of its head's scale, cut to what dtype holds."""
    most = torch.finfo(dtype).max
    return (widen(x) / scale[:, None]).clamp(-most, most).to(dtype)


KERNELS = {
    "paged_attention": Kernel(paged_attention, anything, efficiency=0.05),
    "append_kv": Kernel(append_kv, anything, efficiency=0.1),
}
