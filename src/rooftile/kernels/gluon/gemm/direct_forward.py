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
    a: Tensor,  # [m, k] bfloat16, k contiguous
    words: Tensor,  # [n, words of a row], int32
    scales: Tensor,  # [n, groups of a row], bfloat16
    bias: Tensor | None,
    residual: Tensor | None,
    activation: str,
    out_dtype: torch.dtype,
    plan: DirectPlan,
) -> Tensor:  # [m, n]
    out = a.new_empty((a.shape[0], words.shape[0]), dtype=out_dtype)
    if residual is not None and residual.stride(1) != 1:
        residual = residual.contiguous()
    launch = _launch(
        plan,
        a.device,
        tuple(None if t is None else t.dtype for t in (out, bias, residual)),
        (a.shape[0], words.shape[0], a.shape[1]),
        (words.stride(0), a.stride(0), 0 if residual is None else residual.stride(0)),
        row_unit(a),
        activation,
        are_weights_at_rest(),
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
    dtypes: tuple[torch.dtype | None, ...],  # of out, bias, residual
    sizes: tuple[int, int, int],
    strides: tuple[int, int, int],  # of words, a, residual
    unit: int,
    activation: str,
    at_rest: bool,
) -> Launch:
    m, n, k = sizes
    stride, a_stride, residual_stride = strides
    tiles = -(-n // plan.tile)
    all_tiles = tiles * -(-m // plan.rows)
    turns = -(-all_tiles // plan.most_ctas)
    return Launch(
        direct_kernel,
        -(-all_tiles // turns),
        device,
        dtypes,
        (),
        (stride, a_stride, n, m, k, tiles, all_tiles, n, residual_stride),
        (
            ("tile", plan.tile),
            ("rows", plan.rows),
            ("tile_k", plan.tile_k),
            ("warps_k", plan.warps),
            ("unit", unit),
            ("even", k % (plan.warps * plan.tile_k) == 0),
            ("activation", activation),
            ("has_bias", dtypes[1] is not None),
            ("has_residual", dtypes[2] is not None),
            ("in_turn", turns > 1),
            ("ahead", at_rest),
        ),
        warps=plan.warps,
        dependent=True,
    )
