"""From the operator's arguments to a launch of the kernel for int4 weights."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from rooftile.kernels.gluon.gemm.direct import direct_kernel
from rooftile.kernels.gluon.gemm.direct_plan import DirectPlan
from rooftile.kernels.gluon.gemm.tile_plan import row_unit
from rooftile.kernels.gluon.launch import Launch
from rooftile.kernels.weights_at_rest import are_weights_at_rest


def matmul(
    a: Tensor,  # [m, k], k contiguous
    words: Tensor,  # of int4 codes [n, k], int32
    scales: Tensor,  # of codes
    bias: Tensor | None,
    residual: Tensor | None,
    activation: str,
    out_dtype: torch.dtype,
    plan: DirectPlan,
) -> Tensor:  # [m, n]
    (m, k), n = a.shape, words.shape[0]
    out = a.new_empty((m, n), dtype=out_dtype)
    if residual is not None and residual.stride(1) != 1:
        residual = residual.contiguous()
    launch = _launch(
        plan,
        a.device,
        tuple(None if t is None else t.dtype for t in (a, out, bias, residual)),
        (n, m, k),
        (
            words.stride(0),
            a.stride(0),
            out.stride(0),
            0 if residual is None else residual.stride(0),
        ),
        row_unit(a),
        activation,
        plan.early and are_weights_at_rest(),
    )
    pointers = (
        *(words, a, out, out if bias is None else bias.contiguous()),
        *(out if residual is None else residual, scales),
    )
    launch((), pointers)
    return out


@lru_cache(maxsize=4096)
def _launch(
    plan: DirectPlan,
    device: torch.device,
    dtypes: tuple[torch.dtype | None, ...],  # of a, out, bias, residual
    sizes: tuple[int, int, int],  # rows of the weight and of a, k
    strides: tuple[int, int, int, int],  # of words, a, out, residual
    unit: int,  # elements of a that can be read at a time
    activation: str,
    ahead: bool,
) -> Launch:
    x_rows, y_rows, k = sizes
    tiles_x = -(-x_rows // plan.tile_x)
    constants = (
        ("tile_x", plan.tile_x),
        ("tile_y", plan.tile_y),
        ("tile_k", plan.tile_k),
        ("warps_k", plan.warps_k),
        ("y_unit", unit),
        ("even", k % (plan.warps_k * plan.tile_k) == 0),
        ("activation", activation),
        ("has_bias", dtypes[2] is not None),
        ("has_residual", dtypes[3] is not None),
        ("early", plan.early),
        ("ahead", ahead),
    )
    x_stride, y_stride, out_stride, residual_stride = strides
    return Launch(
        direct_kernel,
        tiles_x * -(-y_rows // plan.tile_y),
        device,
        dtypes,
        (),
        (x_stride, y_stride, x_rows, y_rows, k, tiles_x, out_stride, residual_stride),
        constants,
        warps=plan.warps_k,
        dependent=True,
    )
