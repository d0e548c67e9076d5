"""Attention over pages: prefill, decode and any mixture; and writing into pages."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from rooftile.kernels import Kernel
from rooftile.kernels.cpu import arguments, library
from rooftile.kernels.cpu.arguments import DTYPES, refusal
from rooftile.kernels.reference.paged import append_kv as append_kv_by_index


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
    q, k_pages, v_pages = (_dense(x) for x in (q, k_pages, v_pages))
    cu_seqlens_q, kv_lens = cu_seqlens_q.int().contiguous(), kv_lens.int().contiguous()
    page_table = _dense(page_table.int())
    wide_sink = None if sink is None else sink.float().contiguous()
    out = torch.empty((*q.shape[:2], v_pages.shape[3]), dtype=q.dtype)
    lse = torch.empty(q.shape[:2], dtype=torch.float32)
    call = native_call(
        *(q, k_pages, v_pages, cu_seqlens_q, kv_lens, page_table, wide_sink, out, lse),
        *(left, right, softcap, scale),
    )
    library.native().rooftile_attention(ctypes.byref(call), torch.get_num_threads())
    return out, lse


def native_call(
    q: Tensor,  # [tokens, num_q_heads, k_dim]
    k_pages: Tensor,  # [num_pages, num_kv_heads, page_size, k_dim]
    v_pages: Tensor,  # [num_pages, num_kv_heads, page_size, v_dim]
    cu_seqlens_q: Tensor,  # [batch + 1] int32
    kv_lens: Tensor,  # [batch] int32
    page_table: Tensor,  # [batch, max_pages] int32
    sink: Tensor | None,  # [num_q_heads] float32
    out: Tensor,  # [tokens, num_q_heads, v_dim]
    lse: Tensor,  # [tokens, num_q_heads] float32
    left: int,
    right: int,
    softcap: float,
    scale: float,
) -> arguments.Attention:
    """What `rooftile_attention` takes: addresses, so the tensors must outlive it. Rows are dense."""
    tokens, heads, k_dim = q.shape
    dtype = DTYPES[q.dtype]
    return arguments.Attention(
        q=q.data_ptr(),
        q_token=q.stride(0),
        q_head=q.stride(1),
        k=arguments.pages(k_pages),
        v=arguments.pages(v_pages),
        cu_seqlens_q=cu_seqlens_q.data_ptr(),
        kv_lens=kv_lens.data_ptr(),
        page_table=page_table.data_ptr(),
        table_row=page_table.stride(0),
        sink=None if sink is None else sink.data_ptr(),
        out=out.data_ptr(),
        lse=lse.data_ptr(),
        batch=kv_lens.shape[0],
        tokens=tokens,
        num_q_heads=heads,
        num_kv_heads=k_pages.shape[1],
        k_dim=k_dim,
        v_dim=v_pages.shape[3],
        page_size=k_pages.shape[2],
        left=left,
        right=right,
        softcap=softcap,
        scale=scale,
        q_dtype=dtype,
        dtype=dtype,
        out_dtype=dtype,
    )


def _dense(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


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
    if any(x.stride(3) != 1 and x.shape[3] > 1 for x in (k_pages, v_pages)):
        append_kv_by_index(
            k, v, k_pages, v_pages, slots, positions, cos_sin, interleaved, k_scale, v_scale
        )
        return
    tokens, heads, k_dim = k.shape
    k, v, slots = _dense(k), _dense(v), slots.long().contiguous()
    half = 0
    if positions is not None and cos_sin is not None:
        positions, cos_sin = positions.long().contiguous(), cos_sin.float().contiguous()
        half = cos_sin.shape[2]
    into = arguments.pages(k_pages), arguments.pages(v_pages)
    library.native().rooftile_append(
        *(k.data_ptr(), k.stride(0), k.stride(1), v.data_ptr(), v.stride(0), v.stride(1)),
        *(ctypes.byref(into[0]), ctypes.byref(into[1]), slots.data_ptr()),
        *(x.data_ptr() if x is not None and half else None for x in (positions, cos_sin)),
        *(half, interleaved, tokens, heads, k_dim, v.shape[2], k_pages.shape[2]),
        *(DTYPES[k.dtype], torch.get_num_threads()),
    )


def supports(call: Any) -> str | None:
    if call.kv_dtype is not None:
        return f"it has no pages of {call.kv_dtype}"
    return refusal(call)


KERNELS = {
    "paged_attention": Kernel(paged_attention, supports, efficiency=0.7),
    "append_kv": Kernel(append_kv, supports, efficiency=0.6),
}
