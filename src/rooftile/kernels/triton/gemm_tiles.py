"""Products of whole tiles whose loads the compiler pipelines (cp.async): for few tiles and a short k.

A launch of the Stream-K kernel costs more than such a product takes: barriers, roles, tensor maps.
Here a program loads its operands where they lie, rows of no multiple of 16 bytes in smaller pieces,
multiplies and stores. Both operands must have k as their contiguous dimension.
"""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from functools import lru_cache
from math import gcd

import torch
import triton
import triton.language as tl
from torch import Tensor

from rooftile.kernels.gluon.gemm.tile_plan import UNIT, TilePlan, row_unit
from rooftile.kernels.gluon.launch import Launch
from rooftile.kernels.triton.gemm import activate
from rooftile.kernels.triton.pointwise import early, overlap


@triton.jit
def _halves(at, odd, inside, pair, k):
    """Elements 2 pair and 2 pair + 1 along k of rows that begin anywhere, from two words of four bytes.

    at: the word that holds element 0. odd: element 0 is the word's second half. What lies beyond k is 0,
    and a word is loaded only if it holds an element of the row.
    """
    word = tl.load(at, mask=inside & (2 * pair < k), other=0)
    after = tl.load(at + 1, mask=inside & (2 * pair + 1 < k) & (odd > 0), other=0)
    low = tl.where(odd > 0, word >> 16, word)
    high = tl.where(odd > 0, after, word >> 16)
    return low.to(tl.int16), tl.where(2 * pair + 1 < k, high, 0).to(tl.int16)


@triton.jit
def _sum_of_words(
    a, b, rows, columns, m, n, k, a_stride, b_stride, a_begin, b_begin, block_m: tl.constexpr,
    block_n: tl.constexpr, block_k: tl.constexpr,
):  # fmt: skip
    """Of a tile whose rows begin at any element, four bytes at a time."""
    dtype: tl.constexpr = a.dtype.element_ty
    pairs = tl.arange(0, block_k // 2)
    a_first = (a_begin + rows.to(tl.int64) * a_stride)[:, None]
    b_first = (b_begin + columns.to(tl.int64) * b_stride)[None, :]
    a_words = a.to(tl.pointer_type(tl.int32), bitcast=True) + (a_first >> 1)
    b_words = b.to(tl.pointer_type(tl.int32), bitcast=True) + (b_first >> 1)
    a_odd = (a_first & 1).to(tl.int32)
    b_odd = (b_first & 1).to(tl.int32)
    a_rows = (rows < m)[:, None]
    b_rows = (columns < n)[None, :]
    acc = tl.zeros([block_m, block_n], tl.float32)
    # The order along k does not matter to a sum: even elements, then odd ones.
    for start in tl.range(0, k, block_k):
        pair = start // 2 + pairs
        x_low, x_high = _halves(a_words + pair[None, :], a_odd, a_rows, pair[None, :], k)
        y_low, y_high = _halves(b_words + pair[:, None], b_odd, b_rows, pair[:, None], k)
        acc = tl.dot(x_low.to(dtype, bitcast=True), y_low.to(dtype, bitcast=True), acc)
        acc = tl.dot(x_high.to(dtype, bitcast=True), y_high.to(dtype, bitcast=True), acc)
    return acc


@triton.jit
def _sum_of_pieces(
    a, b, rows, columns, m, n, k, a_stride, b_stride, block_m: tl.constexpr,
    block_n: tl.constexpr, block_k: tl.constexpr, a_unit: tl.constexpr, b_unit: tl.constexpr,
    even: tl.constexpr,
):  # fmt: skip
    """Of a tile, a_unit and b_unit elements at a time."""
    steps = tl.arange(0, block_k)
    a += rows.to(tl.int64)[:, None] * a_stride + steps[None, :]
    b += columns.to(tl.int64)[None, :] * b_stride + steps[:, None]
    # Not the last row over and over: a line that many programs ask for at a time is slow.
    a_rows = (rows < m)[:, None]
    b_rows = (columns < n)[None, :]
    size: tl.constexpr = a.dtype.element_ty.primitive_bitwidth // 8
    a_end = k // a_unit * a_unit  # k, which is a multiple: so that the compiler knows
    b_end = k // b_unit * b_unit
    acc = tl.zeros([block_m, block_n], tl.float32)
    for start in tl.range(0, k, block_k):
        a_at = tl.max_contiguous(tl.multiple_of(a + start, [1, a_unit * size]), [1, a_unit])
        b_at = tl.max_contiguous(tl.multiple_of(b + start, [b_unit * size, 1]), [b_unit, 1])
        if even:
            x = tl.load(a_at, mask=a_rows, other=0.0)
            y = tl.load(b_at, mask=b_rows, other=0.0)
        else:
            x = tl.load(a_at, mask=a_rows & ((start + steps)[None, :] < a_end), other=0.0)
            y = tl.load(b_at, mask=b_rows & ((start + steps)[:, None] < b_end), other=0.0)
        acc = tl.dot(x, y, acc)
    return acc


@triton.jit(
    do_not_specialize=[
        *("a", "b", "out", "bias", "residual", "m", "n", "k", "a_stride", "b_stride", "out_stride"),
        *("residual_stride", "tiles_n", "a_begin", "b_begin"),
    ]
)
def tiles_kernel(
    a,  # [m, k]
    b,  # [n, k]
    out,  # [m, n]
    bias,  # [n]
    residual,  # [m, n]
    m,
    n,
    k,
    a_stride,
    b_stride,
    out_stride,
    residual_stride,
    tiles_n,
    a_begin,  # elements from a multiple of four bytes to the first, where `words`
    b_begin,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
    block_k: tl.constexpr,
    a_unit: tl.constexpr,  # elements that can be loaded at a time
    b_unit: tl.constexpr,
    out_unit: tl.constexpr,
    even: tl.constexpr,  # k is a multiple of block_k
    words: tl.constexpr,  # rows begin at any element: four bytes are loaded at a time all the same
    activation: tl.constexpr,
    has_bias: tl.constexpr,
    has_residual: tl.constexpr,
    overlapped: tl.constexpr,
):
    """Program: one tile."""
    early(overlapped)
    tile = tl.program_id(0)
    tile_m = tile // tiles_n
    rows = tile_m * block_m + tl.arange(0, block_m)
    columns = (tile - tile_m * tiles_n) * block_n + tl.arange(0, block_n)
    if words:
        acc = _sum_of_words(
            a, b, rows, columns, m, n, k, a_stride, b_stride, a_begin, b_begin, block_m, block_n,
            block_k,
        )  # fmt: skip
    else:
        acc = _sum_of_pieces(
            a, b, rows, columns, m, n, k, a_stride, b_stride, block_m, block_n, block_k, a_unit,
            b_unit, even,
        )  # fmt: skip
    if has_bias:
        acc += tl.load(bias + columns, mask=columns < n, other=0.0).to(tl.float32)[None, :]
    acc = activate(acc, activation)
    wide_rows = rows.to(tl.int64)[:, None]
    inside = (rows < m)[:, None] & (columns < n // out_unit * out_unit)[None, :]
    if has_residual:
        at = residual + wide_rows * residual_stride + columns[None, :]
        acc += tl.load(at, mask=inside, other=0.0).to(tl.float32)
    at = out + wide_rows * out_stride + columns[None, :]
    out_size: tl.constexpr = out_unit * (out.dtype.element_ty.primitive_bitwidth // 8)
    at = tl.max_contiguous(tl.multiple_of(at, [1, out_size]), [1, out_unit])
    tl.store(at, acc.to(out.dtype.element_ty), mask=inside)


def matmul(
    a: Tensor,  # [m, k], k contiguous
    b: Tensor,  # [n, k], k contiguous
    bias: Tensor | None,  # [n]
    residual: Tensor | None,  # [m, n]
    activation: str,
    out_dtype: torch.dtype,
    plan: TilePlan,
) -> Tensor:
    (m, k), n = a.shape, b.shape[0]
    out = a.new_empty((m, n), dtype=out_dtype)
    if residual is not None and residual.stride(1) != 1:
        residual = residual.contiguous()
    units = (row_unit(a), row_unit(b), gcd(n, UNIT))
    # Not of tensors whose memory begins at an odd element.
    words = min(units[:2]) == 1 and all(x.storage_offset() or x.data_ptr() % 4 == 0 for x in (a, b))
    begins = tuple(x.data_ptr() // 2 % 2 if words else 0 for x in (a, b))
    launch = _launch(
        plan,
        a.device,
        tuple(None if x is None else x.dtype for x in (a, out, bias, residual)),
        (m, n, k),
        (a.stride(0), b.stride(0), n, 0 if residual is None else residual.stride(0)),
        units,
        (words, *begins),
        activation,
        overlap(a)["overlapped"],
    )
    if words:  # from the multiple of four bytes before
        a, b = (
            x.as_strided((1,), (1,), x.storage_offset() - begin)
            for x, begin in zip((a, b), begins, strict=True)
        )
    pointers = (
        *(a, b, out, out if bias is None else bias.contiguous()),
        out if residual is None else residual,
    )
    launch((), pointers)
    return out


@lru_cache(maxsize=4096)
def _launch(
    plan: TilePlan,
    device: torch.device,
    dtypes: tuple[torch.dtype | None, ...],  # of a, out, bias, residual
    sizes: tuple[int, int, int],
    strides: tuple[int, int, int, int],  # of a, b, out, residual
    units: tuple[int, int, int],  # of a, b, out
    words: tuple[bool, int, int],  # whether; where a and b begin
    activation: str,
    overlapped: bool,
) -> Launch:
    m, n, k = sizes
    tiles_n = -(-n // plan.block_n)
    constants = (
        ("block_m", plan.block_m),
        ("block_n", plan.block_n),
        ("block_k", plan.block_k),
        ("a_unit", units[0]),
        ("b_unit", units[1]),
        ("out_unit", units[2] if units[2] == UNIT else min(units[2], 2)),
        ("even", k % plan.block_k == 0),
        ("words", words[0]),
        ("activation", activation),
        ("has_bias", dtypes[2] is not None),
        ("has_residual", dtypes[3] is not None),
        ("overlapped", overlapped),
    )
    return Launch(
        tiles_kernel,
        -(-m // plan.block_m) * tiles_n,
        device,
        dtypes,
        (),
        (*sizes, *strides, tiles_n, *words[1:]),
        constants,
        warps=plan.warps,
        dependent=overlapped,
        stages=plan.stages,
    )
