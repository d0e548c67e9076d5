"""Matrix products through torch: cuBLAS on a GPU, oneDNN or MKL on a CPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rooftile.kernels import Kernel
from rooftile.kernels.reference.gemm import finish


def matmul(
    a: Tensor,  # [m, k]
    b: Tensor,  # [k, n]
    bias: Tensor | None,
    residual: Tensor | None,
    scale_a: Tensor | None,
    scale_b: Tensor | None,
    activation: str,
    out_dtype: torch.dtype,
    batch_invariant: bool,
) -> Tensor:
    if a.dtype == torch.float8_e4m3fn:
        y = _scaled(a, b)
        return finish(y, bias, residual, scale_a, scale_b, activation).to(out_dtype)
    plain = activation == "none" and out_dtype == a.dtype
    added = bias if residual is None else residual
    if plain and (bias is None or residual is None):
        # The library adds the one term that there is before it rounds.
        if added is None:
            return torch.mm(a, b)
        if added.dtype == a.dtype:
            return torch.addmm(added, a, b)
    if a.is_cuda and a.element_size() == 2:
        y = torch.mm(a, b, out_dtype=torch.float32)
    else:
        y = torch.mm(a, b)
        y = y.float() if y.element_size() < 4 else y
    return finish(y, bias, residual, None, None, activation).to(out_dtype)


def _scaled(a: Tensor, b: Tensor) -> Tensor:  # [m, n] float32
    one = torch.ones((), dtype=torch.float32, device=a.device)
    column_major = b.T.contiguous().T
    return torch._scaled_mm(a.contiguous(), column_major, one, one, out_dtype=torch.float32)


def supports(call: Any) -> str | None:
    if call.batch_invariant:
        return "it promises no order of sums that is independent of the batch"
    if call.dtype == torch.float8_e4m3fn:
        if call.device != "cuda":
            return f"torch multiplies fp8 on an NVIDIA GPU, not on a {call.device}"
        if call.k % 16 or call.n % 16 or not call.m * call.n * call.k:
            return "torch multiplies fp8 where n and k are multiples of 16 and nothing is empty"
    return None


KERNELS = {"matmul": Kernel(matmul, supports, efficiency=0.5)}
