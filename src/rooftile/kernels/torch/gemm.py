"""Matrix products through torch: cuBLAS on a GPU, oneDNN or MKL on a CPU."""

from __future__ import annotations

from math import gcd
from typing import Any

import torch
from torch import Tensor

from rooftile.kernels import Kernel
from rooftile.kernels.reference.gemm import finish
from rooftile.planning.hardware import H200
from rooftile.planning.roofline import least_time, linear_work
from rooftile.planning.stream_k import Product
from rooftile.planning.vendor_cost import broken_share, predict_vendor

_PASS_SECONDS = 6.0e-6  # launches of what follows a product


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


def efficiency(call: Any) -> float:
    """Share of the roofline that cuBLAS is predicted to reach on an H200; elsewhere a constant."""
    if call.device != "cuda" or call.dtype.itemsize > 2 or not call.m * call.n * call.k:
        return 0.5
    itemsize = call.dtype.itemsize
    stride_a = call.m if call.a_layout == "column" else call.k
    stride_b = call.n if call.b_layout == "row" else call.k
    rows = [n * itemsize for n in (stride_a, stride_b, call.n)]
    broken = sum(broken_share(n) for n in rows[:2]) / 2
    product = Product(call.m, call.n, call.k)
    seconds = predict_vendor(product, H200, itemsize, broken, gcd(16, *rows))
    assert seconds is not None
    if call.activation != "none" or (call.has_bias and call.has_residual):
        # The sum is written and read in float32 at least once before it is rounded.
        seconds += _PASS_SECONDS + 10 * call.m * call.n / H200.bandwidth
    work = linear_work(call.m, call.k, call.n, itemsize)
    return least_time(work, H200).seconds / seconds


def supports(call: Any) -> str | None:
    if call.b_layout == "int4_words":
        return "it reads dense weights, not int4 codes"
    if call.batch_invariant:
        return "it promises no order of sums that is independent of the batch"
    if call.dtype == torch.float8_e4m3fn:
        if call.device != "cuda":
            return f"torch multiplies fp8 on an NVIDIA GPU, not on a {call.device}"
        if call.k % 16 or call.n % 16 or not call.m * call.n * call.k:
            return "torch multiplies fp8 where n and k are multiples of 16 and nothing is empty"
    return None


KERNELS = {"matmul": Kernel(matmul, supports, efficiency)}
