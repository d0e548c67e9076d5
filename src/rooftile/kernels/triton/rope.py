"""Rotary position embedding in portable Triton: a program turns all heads of one token."""
# mypy: disable-error-code="no-untyped-def"

import torch
import triton
import triton.language as tl
from torch import Tensor

from rooftile.kernels import Kernel
from rooftile.kernels.triton.grid import grid_of, second_id
from rooftile.kernels.triton.pointwise import where
from rooftile.kernels.triton.refusal import refusal


@triton.jit
def rotary_kernel(
    x,
    positions,
    cos_sin,
    out,
    token_stride,
    head_stride,
    heads,
    head_dim,
    half,
    sign,
    tile_heads: tl.constexpr,
    tile_half: tl.constexpr,
    tile_rest: tl.constexpr,
    interleaved: tl.constexpr,
    has_rest: tl.constexpr,
):
    """Program (token, group of heads)."""
    token = tl.program_id(0).to(tl.int64)
    head = second_id() * tile_heads + tl.arange(0, tile_heads)
    pair = tl.arange(0, tile_half)
    position = tl.load(positions + token).to(tl.int64)
    table = cos_sin + position * (2 * half) + pair
    cos = tl.load(table, mask=pair < half, other=0.0)[None, :]
    sin = tl.load(table + half, mask=pair < half, other=0.0)[None, :] * sign
    if interleaved:
        first, second = 2 * pair, 2 * pair + 1
    else:
        first, second = pair, pair + half
    source = x + token * token_stride + head[:, None].to(tl.int64) * head_stride
    target = out + (token * heads + head[:, None]) * head_dim
    inside = (head < heads)[:, None] & (pair < half)[None, :]
    a = tl.load(source + first[None, :], mask=inside, other=0.0).to(tl.float32)
    b = tl.load(source + second[None, :], mask=inside, other=0.0).to(tl.float32)
    tl.store(target + first[None, :], (a * cos - b * sin).to(out.dtype.element_ty), mask=inside)
    tl.store(target + second[None, :], (b * cos + a * sin).to(out.dtype.element_ty), mask=inside)
    if has_rest:
        column = 2 * half + tl.arange(0, tile_rest)
        left = (head < heads)[:, None] & (column < head_dim)[None, :]
        tl.store(target + column[None, :], tl.load(source + column[None, :], mask=left), mask=left)


def rotary_embedding(
    x: Tensor,  # [tokens, heads, head_dim]
    positions: Tensor,  # [tokens]
    cos_sin: Tensor,  # [max_position, 2, rotary_dim / 2]
    interleaved: bool,
    inverse: bool,
) -> Tensor:
    tokens, heads, head_dim = x.shape
    half = cos_sin.shape[-1]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    x = x if x.stride(2) == 1 else x.contiguous()
    tile_half = triton.next_power_of_2(half)
    tile_heads = max(1, min(triton.next_power_of_2(heads), 2048 // tile_half))
    rest = head_dim - 2 * half
    with where(x):
        rotary_kernel[grid_of(tokens, triton.cdiv(heads, tile_heads))](
            *(x, positions, cos_sin.contiguous(), out, x.stride(0), x.stride(1)),
            *(heads, head_dim, half, -1.0 if inverse else 1.0),
            tile_heads=tile_heads,
            tile_half=tile_half,
            tile_rest=triton.next_power_of_2(max(rest, 1)),
            interleaved=interleaved,
            has_rest=rest > 0,
        )
    return out


KERNELS = {"rotary_embedding": Kernel(rotary_embedding, refusal, efficiency=0.8)}
