"""Writing keys and values into pages in portable Triton: rotation, quantisation and copy in one."""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from rooftile.kernels.triton.grid import grid_of, second_id
from rooftile.kernels.triton.interpreter import INTERPRETED

FP8_MAX = tl.constexpr(448.0)  # of float8_e4m3fn


@triton.jit
def _put(at, x, scale, mask, scaled: tl.constexpr):
    """Stores x, in units of scale and cut to what 8 bits hold where `scaled`."""
    if scaled:
        x = x.to(tl.float32) / scale
        x = tl.minimum(tl.maximum(x, -FP8_MAX), FP8_MAX)
    tl.store(at, x.to(at.dtype.element_ty), mask=mask)


@triton.jit
def append_kv_kernel(
    k,
    v,
    k_pages,
    v_pages,
    slots,
    positions,
    cos_sin,
    k_scale,
    v_scale,
    k_stride,
    k_head_stride,
    k_dim_stride,
    v_stride,
    v_head_stride,
    v_dim_stride,
    k_page_stride,
    k_page_head_stride,
    k_slot_stride,
    k_page_dim_stride,
    v_page_stride,
    v_page_head_stride,
    v_slot_stride,
    v_page_dim_stride,
    heads,
    page_size,
    half,  # of rotary_dim
    k_dim,
    v_dim,
    head_tile: tl.constexpr,
    half_tile: tl.constexpr,
    k_tile: tl.constexpr,
    v_tile: tl.constexpr,
    rotated: tl.constexpr,
    interleaved: tl.constexpr,
    scaled: tl.constexpr,
):
    """Program (token, block of heads)."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token).to(tl.int64)
    if slot < 0:
        return
    head = second_id() * head_tile + tl.arange(0, head_tile)
    exists = head < heads
    head = head.to(tl.int64)
    page = slot // page_size
    slot = slot % page_size
    k += token * k_stride + head[:, None] * k_head_stride
    v += token * v_stride + head[:, None] * v_head_stride
    k_pages += page * k_page_stride + slot * k_slot_stride + head[:, None] * k_page_head_stride
    v_pages += page * v_page_stride + slot * v_slot_stride + head[:, None] * v_page_head_stride
    k_unit = 1.0
    v_unit = 1.0
    if scaled:
        k_unit = tl.load(k_scale + head, mask=exists, other=1.0).to(tl.float32)[:, None]
        v_unit = tl.load(v_scale + head, mask=exists, other=1.0).to(tl.float32)[:, None]
    column = tl.arange(0, k_tile)[None, :]
    mask = exists[:, None] & (column < k_dim)
    if rotated:
        mask = mask & (column >= 2 * half)
        pair = tl.arange(0, half_tile)[None, :]
        angle = cos_sin + tl.load(positions + token).to(tl.int64) * (2 * half) + pair
        turns = exists[:, None] & (pair < half)
        cos = tl.load(angle, mask=pair < half, other=0.0).to(tl.float32)
        sin = tl.load(angle + half, mask=pair < half, other=0.0).to(tl.float32)
        first = 2 * pair if interleaved else pair
        second = first + 1 if interleaved else pair + half
        x = tl.load(k + first * k_dim_stride, mask=turns, other=0.0).to(tl.float32)
        y = tl.load(k + second * k_dim_stride, mask=turns, other=0.0).to(tl.float32)
        # Rounded to k's dtype before anything else, as where it is rotated by itself.
        turned_x = (x * cos - y * sin).to(k.dtype.element_ty)
        turned_y = (y * cos + x * sin).to(k.dtype.element_ty)
        _put(k_pages + first * k_page_dim_stride, turned_x, k_unit, turns, scaled)
        _put(k_pages + second * k_page_dim_stride, turned_y, k_unit, turns, scaled)
    kept = tl.load(k + column * k_dim_stride, mask=mask, other=0.0)
    _put(k_pages + column * k_page_dim_stride, kept, k_unit, mask, scaled)
    column = tl.arange(0, v_tile)[None, :]
    mask = exists[:, None] & (column < v_dim)
    kept = tl.load(v + column * v_dim_stride, mask=mask, other=0.0)
    _put(v_pages + column * v_page_dim_stride, kept, v_unit, mask, scaled)


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
    tokens, heads, k_dim = k.shape
    v_dim = v.shape[2]
    if tokens == 0 or heads == 0:
        return
    half = 0 if cos_sin is None else cos_sin.shape[2]
    k_tile, v_tile, half_tile = (triton.next_power_of_2(max(n, 1)) for n in (k_dim, v_dim, half))
    head_tile = min(triton.next_power_of_2(heads), max(1, 2048 // max(k_tile, v_tile)))
    with torch.cuda.device(k.device) if k.is_cuda else torch.no_grad():
        append_kv_kernel[grid_of(tokens, triton.cdiv(heads, head_tile))](
            k,
            v,
            k_pages,
            v_pages,
            slots.contiguous(),
            slots if positions is None else positions.contiguous(),
            slots if cos_sin is None else cos_sin.contiguous(),
            slots if k_scale is None else k_scale.contiguous(),
            slots if v_scale is None else v_scale.contiguous(),
            *k.stride(),
            *v.stride(),
            *k_pages.stride(),
            *v_pages.stride(),
            heads,
            k_pages.shape[2],
            half,
            k_dim,
            v_dim,
            head_tile=head_tile,
            half_tile=half_tile,
            k_tile=k_tile,
            v_tile=v_tile,
            rotated=cos_sin is not None,
            interleaved=interleaved,
            scaled=k_scale is not None,
            num_warps=4,
        )


def append_supports(call: Any) -> str | None:
    if INTERPRETED:
        if call.dtype not in (torch.float16, torch.float32):
            return f"Triton's interpreter takes float16 and float32, not {call.dtype}"
    elif call.device != "cuda":
        return f"it needs a GPU, not a {call.device}"
    elif call.dtype == torch.float64:
        return "it computes in float32"
    if call.kv_dtype not in (None, torch.float8_e4m3fn):
        return f"it writes pages of k's dtype or float8_e4m3fn, not {call.kv_dtype}"
    return None
