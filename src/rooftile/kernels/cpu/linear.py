"""Linear layers over tiled and quantised weights."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from rooftile.kernels import Kernel
from rooftile.kernels.cpu import arguments, library
from rooftile.kernels.cpu.arguments import DTYPES, FORMATS, refusal


def linear(
    x: Tensor, weight: list[Tensor], format: str, out_features: int, bias: Tensor | None
) -> Tensor:
    rows = arguments.rows_of(x)
    packed = arguments.weight(format, weight, out_features, x.shape[-1])
    wide_bias = None if bias is None else bias.float().contiguous()
    if wide_bias is not None:
        packed.bias = wide_bias.data_ptr()
    out = x.new_empty((*x.shape[:-1], out_features))
    dtype = DTYPES[x.dtype]
    library.native().rooftile_linear(
        *(rows.data_ptr(), rows.stride(0), dtype, rows.shape[0], ctypes.byref(packed)),
        *(out.data_ptr(), dtype, torch.get_num_threads()),
    )
    return out


def supports(call: Any) -> str | None:
    if call.format not in FORMATS:
        return f"it reads weights packed as {', '.join(FORMATS)} only"
    return refusal(call)


KERNELS = {"linear": Kernel(linear, supports, efficiency=0.8)}
