"""Binding a kind of ragged calls: see forward.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rooftile.kernels.gluon.attention.call import (
    Kind,
    Result,
    prepared,
    run_parts,
    run_parts_at,
    run_whole,
    templates,
    without_keys,
)
from rooftile.kernels.gluon.attention.config import (
    MOST_TILES_SORTED,
    Config,
    config_of,
    typical_length,
)
from rooftile.kernels.gluon.attention.cut import cut_of
from rooftile.kernels.gluon.attention.mods import NO_MODS, Mods
from rooftile.kernels.gluon.attention.tile_list import NUM_FIELDS, list_tiles_kernel
from rooftile.kernels.gluon.counter import address_of_counter, counter
from rooftile.kernels.gluon.launch import Launch, multiprocessors
from rooftile.kernels.gluon.tile.rows import addressable, describe_ragged, is_addressable
from rooftile.kernels.offline import building

AttentionVarlen = Callable[..., Result]


def bind(
    attention_varlen: AttentionVarlen,  # for tensors of another kind
    q: Tensor,  # [tokens_q, num_q_heads, k_dim]
    k: Tensor,  # [tokens_k, num_kv_heads, k_dim]
    v: Tensor,  # [tokens_k, num_kv_heads, v_dim]
    cu_seqlens_q: Tensor,  # [batch + 1]
    cu_seqlens_k: Tensor,  # [batch + 1]
    max_q_len: int,
    max_kv_len: int,
    sink: Tensor | None,  # [num_q_heads]
    left: int,
    right: int,
    softcap: float,
    scale: float,
    config: Config | None = None,
    slopes: Tensor | None = None,  # [num_q_heads] float32, of ALiBi
    mods: Mods = NO_MODS,
    results: int = 2,
) -> AttentionVarlen:
    """A function of q, k, v, the lengths, sink, slopes and mods. results: how many of its two the
    caller reads."""
    tokens, num_heads, k_dim = q.shape
    batch, v_dim = cu_seqlens_q.shape[0] - 1, v.shape[2]
    keys, num_kv_heads = k.shape[:2]
    length = typical_length(tokens, batch, max_q_len)
    config_given = config
    changed = (slopes is not None, mods is not NO_MODS)
    config = config or config_of(k_dim, v_dim, length, right, *changed)
    if q.dtype == torch.float16:
        config = config.of_few_bits()
    if tokens == 0:
        return lambda q, k, v, cu_q, cu_k, sink, *_: without_keys(q, v.shape[2], sink)
    # A descriptor needs memory, though no row of it may be visible.
    if scale <= 0 or keys == 0 or not all(is_addressable(x) for x in (q, k, v)):
        return _of_new_tensors(attention_varlen, left, right, softcap, scale, config)
    if q.is_cuda and config_given is None and not any(changed) and min(k_dim, v_dim) >= 32:
        # Which only a GPU can run.
        from rooftile.kernels.triton.ragged_pages import follows_plan

        if follows_plan(k, v, max_q_len, max_kv_len, num_heads // num_kv_heads):
            return _by_plan(max_q_len, max_kv_len, left, right, softcap, scale)
    # Every sequence, and the padding after the last, ends in at most one tile that is not full.
    capacity = tokens // config.tile_rows + min(batch + 1, tokens)
    device = q.device
    places = multiprocessors(device) * config.ctas
    dynamic = config.dynamic != "never"
    other_q, other_k = (
        x.dtype != torch.int32 or not x.is_contiguous() for x in (cu_seqlens_q, cu_seqlens_k)
    )
    few = batch < config.most_sorted and capacity < MOST_TILES_SORTED
    most_sorted = config.most_sorted if few else 0
    list_tiles = None
    if not most_sorted:
        list_tiles = Launch(
            *(list_tiles_kernel, batch + 1, device, torch.int32, (), (batch, tokens)),
            (("tile_rows", config.tile_rows),),
        )
    kind = Kind(
        *(config, describe_ragged, q, k, v, sink, left, right, softcap, scale, slopes, mods),
        results,
    )
    lengths = (num_heads, num_heads // num_kv_heads, 0, keys, 0, 0, 0, 1)
    ctas = min(capacity * num_heads, places)
    attend = kind.launch(ctas, (batch, tokens, 0, *lengths), True, dynamic, False, most_sorted)
    like_out, like_lse = templates(q, v_dim)
    anchored, direct = config.anchored, not (list_tiles or any(changed))
    index = device.index or 0
    like_entries = q.new_empty(1, dtype=torch.int32).expand(1 + capacity, NUM_FIELDS)

    def run(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_q: Tensor,
        cu_k: Tensor,
        sink: Tensor | None,
        slopes: Tensor | None = None,
        mods: Mods = NO_MODS,
    ) -> Result:
        at_q, at_k, at_v = q.data_ptr(), k.data_ptr(), v.data_ptr()
        if (at_q | at_k | at_v) & 15:
            q, k, v = addressable(q), addressable(k), addressable(v)
            options = (left, right, softcap, scale, config, slopes, mods)
            return attention_varlen(q, k, v, cu_q, cu_k, 0, 0, sink, *options)
        out = torch.empty_like(like_out)
        lse = torch.empty_like(like_lse) if results > 1 else None
        if other_q:
            cu_q = cu_q.to(torch.int32).contiguous()
        if other_k:
            cu_k = cu_k.to(torch.int32).contiguous()
        if direct and sink is None and attend.is_ready:
            at_out = out.data_ptr()
            at = 0 if lse is None else lse.data_ptr()
            entry = address_of_counter(index) if dynamic else 0
            attend.at(
                (at_q, at_k, at_v, at_out, at_k, at_v) if anchored else (at_q, at_k, at_v, at_out),
                (at, 0, 0, entry, cu_q.data_ptr(), cu_k.data_ptr(), 0, 0),
            )
            return out, lse
        if lse is None:
            lse = torch.empty_like(like_lse)
        if list_tiles is None:
            entries = counter(device) if dynamic else lse
        else:
            entries = torch.empty_like(like_entries)
            list_tiles((), (entries, cu_q, cu_k))
        run_whole(attend, anchored, (q, k, v, out), lse, sink, slopes, mods, entries, cu_q, cu_k)
        return out, lse

    # Of one sequence the host knows the lengths, unless there is padding behind it.
    if batch != 1 or any(changed) or max_q_len < tokens or max_kv_len < keys:
        return run
    kv_bytes = keys * num_kv_heads * (k_dim + v_dim) * k.element_size()
    cut = cut_of(config, device, num_heads, tokens, keys, left, right, places, True, kv_bytes)
    if cut is None:
        return run
    if right >= 0:
        cut.number_across_heads(-(-tokens // config.tile_rows), num_heads)
    in_parts = kind.launch(
        cut.ctas, (batch, tokens, cut.places, *lengths), True, False, True, most_sorted
    )

    def run_in_parts(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_q: Tensor,
        cu_k: Tensor,
        sink: Tensor | None,
        slopes: Tensor | None = None,
        mods: Mods = NO_MODS,
    ) -> Result:
        items = cut.items()
        at_q, at_k, at_v = q.data_ptr(), k.data_ptr(), v.data_ptr()
        if items is None or (at_q | at_k | at_v) & 15:
            return run(q, k, v, cu_q, cu_k, sink)
        if not q.is_cuda and building():
            run(q, k, v, cu_q, cu_k, sink)
        out = torch.empty_like(like_out)
        lse = torch.empty_like(like_lse) if results > 1 else None
        cu_q = cu_q.to(torch.int32).contiguous() if other_q else cu_q
        cu_k = cu_k.to(torch.int32).contiguous() if other_k else cu_k
        if sink is None and in_parts.is_ready:
            at_out = out.data_ptr()
            run_parts_at(
                *(in_parts, cut, items, index),
                (at_q, at_k, at_v, at_out, at_k, at_v) if anchored else (at_q, at_k, at_v, at_out),
                *(0 if lse is None else lse.data_ptr(), cu_q.data_ptr(), cu_k.data_ptr()),
            )
            return out, lse
        if lse is None:
            lse = torch.empty_like(like_lse)
        run_parts(in_parts, cut, items, anchored, (q, k, v, out), lse, sink, cu_q, cu_k)
        return out, lse

    cut.items()  # now, for the next call of the kind may be captured
    return run_in_parts


def _of_new_tensors(
    attention_varlen: AttentionVarlen,
    left: int,
    right: int,
    softcap: float,
    scale: float,
    config: Config,
) -> AttentionVarlen:
    """With tensors that have to be made first, which need a plan of their own."""

    def run(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_q: Tensor,
        cu_k: Tensor,
        sink: Tensor | None,
        slopes: Tensor | None = None,
        mods: Mods = NO_MODS,
    ) -> Result:
        if k.shape[0] == 0:
            k, v = k.new_zeros(1, *k.shape[1:]), v.new_zeros(1, *v.shape[1:])
        q, k, v = prepared(q, k, v, scale)
        options = (left, right, softcap, abs(scale) or 1.0, config, slopes, mods)
        return attention_varlen(q, k, v, cu_q, cu_k, 0, 0, sink, *options)

    return run


def _by_plan(
    max_q_len: int, max_kv_len: int, left: int, right: int, softcap: float, scale: float
) -> AttentionVarlen:
    """Few queries over many keys: the kernel for pages, which packs heads and shares keys out."""
    from rooftile.kernels.gluon.paged import paged_attention
    from rooftile.kernels.triton.ragged_pages import lengths_and_table, pages_of

    def run(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_q: Tensor,
        cu_k: Tensor,
        sink: Tensor | None,
        *_: Any,
    ) -> Result:
        kv_lens, table = lengths_and_table(cu_k, max_kv_len)
        pages = (pages_of(addressable(k)), pages_of(addressable(v)))
        return paged_attention(
            *(q, *pages, cu_q, kv_lens, table, max_q_len, max_kv_len, sink, left, right),
            *(softcap, scale, None, None, False, None, []),
        )

    return run
