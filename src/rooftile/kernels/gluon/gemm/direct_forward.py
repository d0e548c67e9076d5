"""From the operator's arguments to a launch of the kernel that keeps operands in registers."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from rooftile.kernels.gluon.gemm.direct import direct_kernel
from rooftile.kernels.gluon.gemm.direct_plan import DirectPlan
from rooftile.kernels.gluon.gemm.tile_plan import UNIT, row_unit
from rooftile.kernels.gluon.launch import Launch
from rooftile.kernels.weights_at_rest import are_weights_at_rest


def matmul(
    a: Tensor,  # [m, k], k contiguous
    b: Tensor,  # [n, k], k contiguous; or words of int4 codes, int32
    scales: Tensor | None,  # of codes
    bias: Tensor | None,
    residual: Tensor | None,
    activation: str,
    out_dtype: torch.dtype,
    plan: DirectPlan,
) -> Tensor:  # [m, n]
    (m, k), n = a.shape, b.shape[0]
    out = a.new_empty((m, n), dtype=out_dtype)
    if residual is not None and residual.stride(1) != 1:
        residual = residual.contiguous()
    x, y = (b, a) if plan.transposed else (a, b)
    codes = b.dtype == torch.int32
    launch = _launch(
        plan,
        a.device,
        tuple(None if t is None else t.dtype for t in (a, b, out, bias, residual)),
        (x.shape[0], y.shape[0], k),
        (x.stride(0), y.stride(0), out.stride(0), 0 if residual is None else residual.stride(0)),
        (UNIT if codes else row_unit(x), row_unit(y), row_unit(out)),
        activation,
        codes and plan.early and are_weights_at_rest(),
    )
    pointers = (
        *(x, y, out, out if bias is None else bias.contiguous()),
        *(out if residual is None else residual, out if scales is None else scales),
    )
    launch((), pointers)
    return out


@lru_cache(maxsize=4096)
def _launch(
    plan: DirectPlan,
    device: torch.device,
    dtypes: tuple[torch.dtype | None, ...],  # of a, b, out, bias, residual
    sizes: tuple[int, int, int],  # rows of x and y, k
    strides: tuple[int, int, int, int],  # of x, y, out, residual
    units: tuple[int, int, int],
    activation: str,
    ahead: bool,
) -> Launch:
    x_rows, y_rows, k = sizes
    tiles_x = -(-x_rows // plan.tile_x)
    codes = dtypes[1] == torch.int32
    x_unit, y_unit, out_unit = units
    constants = (
        ("tile_x", plan.tile_x),
        ("tile_y", plan.tile_y),
        ("tile_k", plan.tile_k),
        ("warps_k", plan.warps_k),
        ("warps_x", plan.warps_x),
        ("warps_y", plan.warps_y),
        ("x_unit", x_unit),
        ("y_unit", y_unit),
        ("out_unit", 1 if plan.transposed else min(out_unit, 2)),
        ("even", k % (plan.warps_k * plan.tile_k) == 0),
        ("codes", codes),
        ("transposed", plan.transposed),
        ("activation", activation),
        ("has_bias", dtypes[3] is not None),
        ("has_residual", dtypes[4] is not None),
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
        warps=plan.warps,
        dependent=True,
    )
