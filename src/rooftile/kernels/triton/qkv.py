"""Norms, rotation and append of a q, k, v product in portable Triton, each head read once.

A program takes some heads of a token, which are all q's, all k's or all v's.
"""
# mypy: disable-error-code="no-untyped-def"

from math import gcd
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from rooftile.kernels import Kernel
from rooftile.kernels.triton.dual_chunk_rotary import length_factor, turn
from rooftile.kernels.triton.pointwise import early, overlap, where
from rooftile.kernels.triton.refusal import refusal


@triton.jit(do_not_specialize=["chunk_len", "chunk_size"])
def norm_rotate_append_kernel(
    qkv,
    q_weight,
    k_weight,
    positions,
    cos_sin,
    k_pages,
    v_pages,
    slots,
    out,
    eps,
    weight_offset,
    qkv_stride,
    k_page_stride,
    k_head_stride,
    k_slot_stride,
    v_page_stride,
    v_head_stride,
    v_slot_stride,
    num_q_heads,
    num_kv_heads,
    lengths,
    chunk_len,
    chunk_size,
    inverse_original,  # 0: no length factor
    head_dim: tl.constexpr,
    half: tl.constexpr,  # of rotary_dim, or of head_dim where nothing is rotated
    page_size: tl.constexpr,
    tile_heads: tl.constexpr,
    tile_half: tl.constexpr,
    tile_rest: tl.constexpr,
    has_norm: tl.constexpr,
    rotated: tl.constexpr,
    chunked: tl.constexpr,
    has_lengths: tl.constexpr,
    slot_heads: tl.constexpr,  # that lie side by side in a slot
    overlapped: tl.constexpr,
):
    """Program (token, group of heads)."""
    token = tl.program_id(0).to(tl.int64)
    first_head = tl.program_id(1) * tile_heads
    head = first_head + tl.arange(0, tile_heads)
    pair = tl.arange(0, tile_half)
    inside = pair < half
    early(overlapped)
    source = qkv + token * qkv_stride + head[:, None] * head_dim
    a = tl.load(source + pair[None, :], mask=inside[None, :], other=0.0)
    b = tl.load(source + half + pair[None, :], mask=inside[None, :], other=0.0)
    rest = 2 * half + tl.arange(0, tile_rest)
    c = a
    if 2 * half < head_dim:
        c = tl.load(source + rest[None, :], mask=(rest < head_dim)[None, :], other=0.0)
    is_value = first_head >= num_q_heads + num_kv_heads
    dtype = qkv.dtype.element_ty
    if not is_value:
        if has_norm:
            weight = q_weight
            if first_head >= num_q_heads:
                weight = k_weight
            x, y = a.to(tl.float32), b.to(tl.float32)
            square = tl.sum(x * x, 1) + tl.sum(y * y, 1)
            if 2 * half < head_dim:
                square += tl.sum(c.to(tl.float32) * c.to(tl.float32), 1)
            scale = tl.rsqrt(square / head_dim + eps)[:, None]
            w = tl.load(weight + pair, mask=inside, other=0.0).to(tl.float32) + weight_offset
            a = (x * scale * w[None, :]).to(dtype)
            w = tl.load(weight + half + pair, mask=inside, other=0.0).to(tl.float32) + weight_offset
            b = (y * scale * w[None, :]).to(dtype)
            if 2 * half < head_dim:
                w = tl.load(weight + rest, mask=rest < head_dim, other=0.0).to(tl.float32)
                c = (c.to(tl.float32) * scale * (w + weight_offset)[None, :]).to(dtype)
        if rotated:
            position = tl.load(positions + token).to(tl.int64)
            if chunked:
                own = position % chunk_len
                if first_head < num_q_heads:
                    length = position + 1
                    if has_lengths:
                        length = tl.load(lengths + token).to(tl.int64)
                    factor = length_factor(length, inverse_original)
                    x, y = a.to(tl.float32) * factor, b.to(tl.float32) * factor
                    mask = (head < num_q_heads)[:, None] & inside[None, :]
                    to = (token * num_q_heads + head[:, None]) * head_dim
                    step = tl.num_programs(0).to(tl.int64) * num_q_heads * head_dim
                    after = tl.minimum(own + chunk_len, chunk_size)
                    far = tl.minimum(2 * chunk_len - 1, chunk_size)
                    at = to + pair[None, :]
                    width: tl.constexpr = 2 * half
                    turn(out, x, y, cos_sin + own * width, at, half, mask, half, tile_half)
                    turn(out + step, x, y, cos_sin + after * width, at, half, mask, half, tile_half)
                    turn(
                        out + 2 * step, x, y, cos_sin + far * width, at, half, mask, half, tile_half
                    )
                    if width < head_dim:
                        kept = (c.to(tl.float32) * factor).to(dtype)
                        mask = (head < num_q_heads)[:, None] & (rest < head_dim)[None, :]
                        for rotation in tl.static_range(3):
                            tl.store(out + rotation * step + to + rest[None, :], kept, mask=mask)
                position = own
            angle = cos_sin + position * (2 * half) + pair
            cos = tl.load(angle, mask=inside, other=0.0)[None, :]
            sin = tl.load(angle + half, mask=inside, other=0.0)[None, :]
            x, y = a.to(tl.float32), b.to(tl.float32)
            a = (x * cos - y * sin).to(dtype)
            b = (y * cos + x * sin).to(dtype)
    slot = tl.load(slots + token).to(tl.int64)
    if first_head < num_q_heads:
        target = out + (token * num_q_heads + head[:, None]) * head_dim
    elif is_value:
        kv_head = (head - num_q_heads - num_kv_heads)[:, None].to(tl.int64)
        target = v_pages + (slot // page_size) * v_page_stride + slot % page_size * v_slot_stride
        target += kv_head // slot_heads * v_head_stride + kv_head % slot_heads * head_dim
    else:
        kv_head = (head - num_q_heads)[:, None].to(tl.int64)
        target = k_pages + (slot // page_size) * k_page_stride + slot % page_size * k_slot_stride
        target += kv_head // slot_heads * k_head_stride + kv_head % slot_heads * head_dim
    writes = (first_head < num_q_heads) | (slot >= 0)
    if chunked:  # queries are written
        writes = (first_head >= num_q_heads) & (slot >= 0)
    if writes:
        tl.store(target + pair[None, :], a, mask=inside[None, :])
        tl.store(target + half + pair[None, :], b, mask=inside[None, :])
        if 2 * half < head_dim:
            tl.store(target + rest[None, :], c, mask=(rest < head_dim)[None, :])


def norm_rotate_append(
    qkv: Tensor,  # [tokens, (num_q_heads + 2 * num_kv_heads) * head_dim]
    q_weight: Tensor | None,  # [head_dim]
    k_weight: Tensor | None,  # [head_dim]
    eps: float,
    weight_offset: float,
    positions: Tensor,  # [tokens]
    cos_sin: Tensor | None,  # [max_position, 2, rotary_dim / 2]
    k_pages: Tensor,  # [num_pages, num_kv_heads, page_size, head_dim]
    v_pages: Tensor,  # [num_pages, num_kv_heads, page_size, head_dim]
    slots: Tensor,  # [tokens]
    num_q_heads: int,
    num_kv_heads: int,
    chunk_size: int,  # 0: no chunks
    local_size: int,
    original_max_position: int,  # 0: no length factor
    lengths: Tensor | None,  # [tokens]
) -> Tensor:  # [tokens, num_q_heads, head_dim], with chunks [3, tokens, num_q_heads, head_dim]
    tokens, head_dim = qkv.shape[0], qkv.shape[1] // (num_q_heads + 2 * num_kv_heads)
    rotations = (3,) if chunk_size else ()
    shape = (*rotations, tokens, num_q_heads, head_dim)
    out = torch.empty(shape, dtype=qkv.dtype, device=qkv.device)
    if tokens == 0:
        return out
    half = head_dim // 2 if cos_sin is None else cos_sin.shape[2]
    common = gcd(num_q_heads, num_kv_heads)
    tile_heads = min(common & -common, 8)
    unused = out  # stands for what is not read
    with where(qkv):
        norm_rotate_append_kernel[(tokens, (num_q_heads + 2 * num_kv_heads) // tile_heads)](
            *(qkv, unused if q_weight is None else q_weight),
            *(unused if k_weight is None else k_weight, positions),
            *(unused if cos_sin is None else cos_sin, k_pages, v_pages, slots, out),
            *(eps, float(weight_offset), qkv.stride(0), *k_pages.stride()[:3]),
            *(*v_pages.stride()[:3], num_q_heads, num_kv_heads),
            *(positions if lengths is None else lengths, chunk_size - local_size, chunk_size),
            1.0 / original_max_position if original_max_position else 0.0,
            head_dim=head_dim,
            half=half,
            page_size=k_pages.shape[2],
            tile_heads=tile_heads,
            tile_half=triton.next_power_of_2(half),
            tile_rest=triton.next_power_of_2(max(1, head_dim - 2 * half)),
            has_norm=q_weight is not None,
            rotated=cos_sin is not None,
            chunked=chunk_size > 0,
            has_lengths=lengths is not None,
            slot_heads=k_pages.shape[3] // head_dim,
            num_warps=2 if tile_heads * half <= 512 else 4,
            **overlap(qkv),
        )
    return out


def supports(call: Any) -> str | None:
    if call.head_dim % 2:
        return f"head_dim is {call.head_dim}; it takes even ones"
    return refusal(call)


KERNELS = {"norm_rotate_append": Kernel(norm_rotate_append, supports, efficiency=0.8)}
