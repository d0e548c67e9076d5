"""Root-mean-square norm, with the residual add."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rooftile.kernels import Kernel
from rooftile.kernels.cpu import library
from rooftile.kernels.cpu.arguments import DTYPES, refusal, rows_of


def rms_norm(
    x: Tensor, weight: Tensor | None, residual: Tensor | None, eps: float, weight_offset: float
) -> tuple[Tensor, Tensor]:
    hidden = x.shape[-1]
    rows = rows_of(x)
    others = None if residual is None else rows_of(residual)
    if weight is not None:
        weight = weight.contiguous()
    out = torch.empty(x.shape, dtype=x.dtype)
    stream = torch.empty(x.shape, dtype=x.dtype)
    library.native().rooftile_rms_norm(
        *(rows.data_ptr(), rows.stride(0)),
        *((None, 0) if others is None else (others.data_ptr(), others.stride(0))),
        *(None if weight is None else weight.data_ptr(), weight_offset, eps),
        *(rows.shape[0], hidden, out.data_ptr(), stream.data_ptr()),
        *(DTYPES[x.dtype], torch.get_num_threads()),
    )
    return out, stream


def supports(call: Any) -> str | None:
    if call.hidden == 0:
        return "it has no rows of length 0"
    return refusal(call)


KERNELS = {"rms_norm": Kernel(rms_norm, supports, efficiency=0.6)}
