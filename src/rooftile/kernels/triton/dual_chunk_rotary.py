"""The three queries of dual chunk attention in one launch: read once, turned three times."""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from contextlib import nullcontext

import torch
import triton
import triton.language as tl
from torch import Tensor

from rooftile.kernels import Kernel
from rooftile.kernels.triton.grid import grid_of, second_id
from rooftile.kernels.triton.pointwise import early, overlap
from rooftile.kernels.triton.refusal import refusal


@triton.jit
def turn(
    out,  # where the rotation of all tokens begins
    first,  # [heads, half] float32
    second,
    angles,  # pointer to cos of the position, then sin
    at,  # [heads, half], of the first of each pair
    step,
    mask,
    half,
    tile_half: tl.constexpr,
):
    pair = tl.arange(0, tile_half)
    cos = tl.load(angles + pair, mask=pair < half, other=0.0)[None, :]
    sin = tl.load(angles + half + pair, mask=pair < half, other=0.0)[None, :]
    dtype = out.dtype.element_ty
    tl.store(out + at, (first * cos - second * sin).to(dtype), mask=mask)
    tl.store(out + at + step, (second * cos + first * sin).to(dtype), mask=mask)


@triton.jit
def length_factor(length, inverse_original):
    """What scores are multiplied by; inverse_original 0: nothing."""
    growth = 0.1 * tl.log(tl.maximum(length.to(tl.float32) * inverse_original, 1.0)) + 1.0
    return growth * growth


@triton.jit(do_not_specialize=["heads", "chunk_len", "chunk_size"])
def dual_chunk_rotary_kernel(
    q,
    positions,
    lengths,
    cos_sin,  # [positions, 2, half]
    intra,  # [tokens, heads, head_dim]
    succ,
    inter,
    token_stride,
    head_stride,
    heads,
    head_dim,
    half,
    chunk_len,
    chunk_size,
    inverse_original,  # 0: no length factor
    tile_heads: tl.constexpr,
    tile_half: tl.constexpr,
    tile_rest: tl.constexpr,
    interleaved: tl.constexpr,
    has_rest: tl.constexpr,
    has_lengths: tl.constexpr,
    overlapped: tl.constexpr,
):
    """Program (token, tile of heads)."""
    early(overlapped)
    token = tl.program_id(0).to(tl.int64)
    head = second_id() * tile_heads + tl.arange(0, tile_heads)
    position = tl.load(positions + token).to(tl.int64)
    length = position + 1
    if has_lengths:
        length = tl.load(lengths + token).to(tl.int64)
    factor = length_factor(length, inverse_original)
    present = head < heads
    pair = tl.arange(0, tile_half)
    step = 1 if interleaved else half
    column = (2 * pair if interleaved else pair)[None, :]
    mask = present[:, None] & (pair < half)[None, :]
    q_at = q + token * token_stride + head.to(tl.int64)[:, None] * head_stride
    first = tl.load(q_at + column, mask=mask, other=0.0).to(tl.float32) * factor
    second = tl.load(q_at + column + step, mask=mask, other=0.0).to(tl.float32) * factor
    out_at = (token * heads + head)[:, None] * head_dim
    at = out_at + column
    own = position % chunk_len
    after = tl.minimum(own + chunk_len, chunk_size)
    far = tl.minimum(2 * chunk_len - 1, chunk_size)
    turn(intra, first, second, cos_sin + own * 2 * half, at, step, mask, half, tile_half)
    turn(succ, first, second, cos_sin + after * 2 * half, at, step, mask, half, tile_half)
    turn(inter, first, second, cos_sin + far * 2 * half, at, step, mask, half, tile_half)
    if has_rest:
        rest = 2 * half + tl.arange(0, tile_rest)
        mask = present[:, None] & (rest < head_dim)[None, :]
        kept = tl.load(q_at + rest[None, :], mask=mask, other=0.0).to(tl.float32) * factor
        kept = kept.to(intra.dtype.element_ty)
        tl.store(intra + out_at + rest[None, :], kept, mask=mask)
        tl.store(succ + out_at + rest[None, :], kept, mask=mask)
        tl.store(inter + out_at + rest[None, :], kept, mask=mask)


def dual_chunk_rotary(
    q: Tensor,  # [tokens, heads, head_dim]
    positions: Tensor,  # [tokens]
    lengths: Tensor | None,  # [tokens]
    cos_sin: Tensor,  # [positions, 2, rotary_dim / 2]
    interleaved: bool,
    chunk_size: int,
    local_size: int,
    original_max_position: int,  # 0: no length factor
) -> Tensor:  # [3, tokens, heads, head_dim]
    tokens, heads, head_dim = q.shape
    half = cos_sin.shape[-1]
    rotations = torch.empty((3, *q.shape), dtype=q.dtype, device=q.device)
    if rotations.numel() == 0:
        return rotations
    q = q if q.stride(2) == 1 else q.contiguous()
    tile_half = triton.next_power_of_2(half)
    tile_heads = max(1, min(triton.next_power_of_2(heads), 2048 // tile_half))
    rest = head_dim - 2 * half
    with torch.cuda.device(q.device) if q.is_cuda else nullcontext():
        dual_chunk_rotary_kernel[grid_of(tokens, triton.cdiv(heads, tile_heads))](
            *(q, positions, positions if lengths is None else lengths, cos_sin.contiguous()),
            *(*rotations, q.stride(0), q.stride(1), heads, head_dim, half),
            *(chunk_size - local_size, chunk_size),
            1.0 / original_max_position if original_max_position else 0.0,
            tile_heads=tile_heads,
            tile_half=tile_half,
            tile_rest=triton.next_power_of_2(max(rest, 1)),
            interleaved=interleaved,
            has_rest=rest > 0,
            has_lengths=lengths is not None,
            **overlap(q),
        )
    return rotations


KERNELS = {"dual_chunk_rotary": Kernel(dual_chunk_rotary, refusal, efficiency=0.7)}
