"""Tiles of a matrix in global memory, as the copy engine loads and stores them.

    boxes = (describe_matrix(a, 128, 64), describe_matrix(c, 64, 128))            # host
    ring.load(at, a_desc, [row, column])                                          # producer
    tma_store(c_desc, [row, column], tile)                                        # consumer

A box that runs over an edge is filled with zeros when loaded and clipped when stored, so sizes need
not be multiples of the tile's.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl

from rooftile.kernels.gluon.launch import Box

_DTYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}


def describe_matrix(
    x: Tensor,  # [rows, columns], rows at multiples of 16 bytes, columns next to each other
    box_rows: int,
    box_columns: int,
) -> Box:
    """The descriptor of a matrix of 2-byte elements, in boxes with the widest swizzle that fits."""
    layout = _shared_layout(x.dtype, box_rows, box_columns)
    return Box(tuple(x.shape), (x.stride(0), 1), (box_rows, box_columns), layout)


@cache
def _shared_layout(dtype: torch.dtype, *box: int) -> Any:
    return gl.NVMMASharedLayout.get_default_for(list(box), _DTYPES[dtype])
