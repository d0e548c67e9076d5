"""Tiles of rows in global memory that the copy engine clips at the end of their sequence.

A dense batch [batch, heads, length, dim] is a descriptor of four dimensions: a box that runs over
the length or the dim is filled with zeros when loaded and clipped when stored. In a ragged batch
[tokens, heads, dim] the end differs from sequence to sequence, which a descriptor cannot say; but
addresses wrap at 2^64, so two more dimensions can shift the token dimension such that its end, at
2^30, falls on the end of any sequence (the idea of Triton's `ragged_tma`):

    address = base + 2^30 (2^34 - s) + (start + length) s + (2^30 - length + row) s
            = base + (start + row) s      (mod 2^64, in elements)

    # host                                         # device, in the producer
    desc = describe_ragged(k, box_rows=128,        ring.load(i, k_desc, coordinates(
                           box_columns=64)             True, batch, head, start, length, row))
"""
# mypy: disable-error-code="no-untyped-def"

from functools import cache
from typing import Any

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from rooftile.kernels.gluon.launch import Box

_END = 2**30
RAGGED_END = gl.constexpr(_END)
_WRAP = 2**34
_LONGEST = 2**31 - 65536
_DTYPES = {
    torch.bfloat16: gl.bfloat16,
    torch.float16: gl.float16,
    torch.float8_e4m3fn: gl.float8e4nv,
}


@gluon.jit
def coordinates(ragged: gl.constexpr, batch, head, start, length, row):
    """Where row `row` of a sequence begins in its descriptor.

    batch: which sequence of a dense batch (ignored where ragged).
    start, length: the sequence's first token and its length (ignored where dense).
    """
    if ragged:
        return (RAGGED_END, start + length, head, RAGGED_END - length + row, 0)
    else:
        return (batch, head, row, 0)


def describe(
    x: Tensor,  # [batch, length, heads, dim]
    box_rows: int,
    box_columns: int,
) -> Box:
    """The descriptor of a dense batch; `x` must be `addressable`."""
    batch, length, heads, dim = x.shape
    batch_stride, stride, head_stride, _ = x.stride()
    # A dimension of size 1 is never stepped over, so any legal stride will do.
    strides = (
        batch_stride if batch > 1 else 16,
        head_stride if heads > 1 else 16,
        stride if length > 1 else 16,
        1,
    )
    box = (1, 1, box_rows, box_columns)
    return Box((batch, heads, length, dim), strides, box, shared_layout(x.dtype, *box))


def describe_ragged(
    x: Tensor,  # [tokens, heads, dim]
    box_rows: int,
    box_columns: int,
) -> Box:
    """The descriptor of sequences laid end to end; `x` must be `addressable`, tokens <= 2^30."""
    tokens, heads, dim = x.shape
    stride, head_stride, _ = x.stride()
    stride = stride if tokens > 1 else 16
    shape = (_LONGEST, _LONGEST, heads, _END, dim)
    strides = (_WRAP - stride, stride, head_stride if heads > 1 else 16, stride, 1)
    box = (1, 1, 1, box_rows, box_columns)
    return Box(shape, strides, box, shared_layout(x.dtype, *box))


def is_addressable(x: Tensor) -> bool:
    """Whether the copy engine can address x, but for where it begins.

    It needs a contiguous last dimension, and strides that are positive multiples of 16 bytes.
    Elements are of 2 bytes.
    """
    *strides, last = x.stride()
    return (last == 1 or x.shape[-1] == 1) and all(
        size == 1 or (stride > 0 and stride % 8 == 0)
        for size, stride in zip(x.shape, strides, strict=False)
    )


def addressable(x: Tensor) -> Tensor:
    """x itself where the copy engine can address it, at a multiple of 16 bytes, else a copy."""
    if x.data_ptr() % 16 == 0 and is_addressable(x):
        return x
    return x.clone(memory_format=torch.contiguous_format)


@cache
def shared_layout(dtype: torch.dtype, *box: int) -> Any:
    return gl.NVMMASharedLayout.get_default_for(list(box), _DTYPES[dtype])
