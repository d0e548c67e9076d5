"""Binding a kind of dense calls: see forward.py."""

from __future__ import annotations

from collections.abc import Callable

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
    IN_TURN_Q_LEN,
    Config,
    Short,
    config_of,
    section_of,
    short_of,
)
from rooftile.kernels.gluon.attention.cut import cut_of
from rooftile.kernels.gluon.attention.mods import NO_MODS, Mods
from rooftile.kernels.gluon.attention.short.forward import bind_short
from rooftile.kernels.gluon.counter import address_of_counter, counter
from rooftile.kernels.gluon.launch import multiprocessors
from rooftile.kernels.gluon.tile.rows import addressable, describe, is_addressable
from rooftile.kernels.offline import building

Attention = Callable[..., Result]


def bind(
    attention: Attention,  # for tensors of another kind
    q: Tensor,  # [batch, q_len, num_q_heads, k_dim]
    k: Tensor,  # [batch, kv_len, num_kv_heads, k_dim]
    v: Tensor,  # [batch, kv_len, num_kv_heads, v_dim]
    sink: Tensor | None,  # [num_q_heads]
    left: int,
    right: int,
    softcap: float,
    scale: float,
    config: Config | None = None,
    slopes: Tensor | None = None,  # [num_q_heads] float32, of ALiBi
    mods: Mods = NO_MODS,
    results: int = 2,
) -> Attention:
    """A function of q, k, v, sink, slopes and mods. results: how many of its two the caller reads."""
    batch, q_len, num_heads, k_dim = q.shape
    kv_len, num_kv_heads, v_dim = k.shape[1], k.shape[2], v.shape[3]
    if batch * q_len == 0 or kv_len == 0:
        return lambda q, k, v, sink, *_: without_keys(q, v.shape[3], sink)
    if scale <= 0 or not all(is_addressable(x) for x in (q, k, v)):
        return _of_new_tensors(attention, left, right, softcap, scale, config)
    changed = (slopes is not None, mods is not NO_MODS)
    unchanged = sink is None and left < 0 and softcap == 0 and not any(changed)
    short = None if config else short_of(k_dim, v_dim, kv_len, unchanged, right >= 0)
    if short is not None:
        return _of_few_keys(attention, q, k, v, right, scale, short, results)
    config = config or config_of(k_dim, v_dim, q_len, right, *changed)
    if q.dtype == torch.float16:
        config = config.of_few_bits()
    q_tiles = -(-q_len // config.tile_rows)
    heads, group_size = batch * num_heads, num_heads // num_kv_heads
    num_tiles = q_tiles * heads
    head_bytes = kv_len * (k_dim + v_dim) * k.element_size()
    section = section_of(config.dim, q_len, right, head_bytes, group_size, heads)
    unequal = (left >= 0 or right >= 0) and q_len > IN_TURN_Q_LEN
    places = multiprocessors(q.device) * config.ctas
    dynamic = (config.dynamic == "always" or (config.dynamic == "unequal" and unequal)) and (
        num_tiles > places
    )
    kind = Kind(
        *(config, describe, q, k, v, sink, left, right, softcap, scale, slopes, mods, results)
    )
    lengths = (num_heads, group_size, q_len, kv_len, q_tiles, heads)
    rounds = config.rounds(num_tiles, places)
    launch = kind.launch(
        min(num_tiles, places), (0, 0, num_tiles, *lengths, section, rounds), False, dynamic, False
    )
    (like_out, like_lse), device = templates(q, v_dim), q.device
    anchored, plain, index = config.anchored, not any(changed), device.index or 0

    def run(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sink: Tensor | None,
        slopes: Tensor | None = None,
        mods: Mods = NO_MODS,
    ) -> Result:
        at_q, at_k, at_v = q.data_ptr(), k.data_ptr(), v.data_ptr()
        if (at_q | at_k | at_v) & 15:
            q, k, v = addressable(q), addressable(k), addressable(v)
            return attention(q, k, v, sink, left, right, softcap, scale, config, slopes, mods)
        out = torch.empty_like(like_out)
        lse = torch.empty_like(like_lse) if results > 1 else None
        if plain and sink is None and launch.is_ready:
            at_out = out.data_ptr()
            at = 0 if lse is None else lse.data_ptr()
            launch.at(
                (at_q, at_k, at_v, at_out, at_k, at_v) if anchored else (at_q, at_k, at_v, at_out),
                (at, 0, 0, address_of_counter(index) if dynamic else 0, 0, 0, 0, 0),
            )
            return out, lse
        if lse is None:
            lse = torch.empty_like(like_lse)
        drawn = counter(device) if dynamic else lse
        run_whole(
            launch, anchored, (q, k, v, out), lse, sink, slopes, mods, drawn, cu_q=lse, cu_k=lse
        )
        return out, lse

    cut = cut_of(
        *(config, device, heads, q_len, kv_len, left, right, places),
        *(right >= 0, head_bytes * batch * num_kv_heads, section),
    )
    if cut is None or not plain:
        return run
    in_parts = kind.launch(cut.ctas, (0, 0, cut.places, *lengths, 1, rounds), False, False, True)

    def run_in_parts(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sink: Tensor | None,
        slopes: Tensor | None = None,
        mods: Mods = NO_MODS,
    ) -> Result:
        items = cut.items()
        at_q, at_k, at_v = q.data_ptr(), k.data_ptr(), v.data_ptr()
        if items is None or (at_q | at_k | at_v) & 15:
            return run(q, k, v, sink)
        if not q.is_cuda and building():  # other lengths of this class need that one
            run(q, k, v, sink)
        out = torch.empty_like(like_out)
        lse = torch.empty_like(like_lse) if results > 1 else None
        if sink is None and in_parts.is_ready:
            at_out = out.data_ptr()
            run_parts_at(
                *(in_parts, cut, items, index),
                (at_q, at_k, at_v, at_out, at_k, at_v) if anchored else (at_q, at_k, at_v, at_out),
                0 if lse is None else lse.data_ptr(),
            )
            return out, lse
        if lse is None:
            lse = torch.empty_like(like_lse)
        run_parts(in_parts, cut, items, anchored, (q, k, v, out), lse, sink, cu_q=lse, cu_k=lse)
        return out, lse

    cut.items()  # now, for the next call of the kind may be captured
    return run_in_parts


def _of_new_tensors(
    attention: Attention,
    left: int,
    right: int,
    softcap: float,
    scale: float,
    config: Config | None,
) -> Attention:
    """With tensors that have to be made first, which need a plan of their own."""

    def run(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sink: Tensor | None,
        slopes: Tensor | None = None,
        mods: Mods = NO_MODS,
    ) -> Result:
        q, k, v = prepared(q, k, v, scale)
        options = (left, right, softcap, abs(scale) or 1.0, config, slopes, mods)
        return attention(q, k, v, sink, *options)

    return run


def _of_few_keys(
    attention: Attention,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    right: int,
    scale: float,
    short: Short,
    results: int,
) -> Attention:
    """By the kernel that takes all keys as one tile."""
    fill = bind_short(q, k, v, right, scale, short, multiprocessors(q.device), results)
    like_out, like_lse = templates(q, v.shape[3])

    def run(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sink: Tensor | None,
        slopes: Tensor | None = None,
        mods: Mods = NO_MODS,
    ) -> Result:
        if (q.data_ptr() | k.data_ptr() | v.data_ptr()) & 15:
            q, k, v = addressable(q), addressable(k), addressable(v)
            return attention(q, k, v, sink, -1, right, 0.0, scale)
        out = torch.empty_like(like_out)
        lse = torch.empty_like(like_lse) if results > 1 else None
        fill(q, k, v, out, lse)
        return out, lse

    return run
