"""From the operator's arguments to a launch of the kernel in which no two CTAs share k."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl

from rooftile.kernels.gluon.gemm.row_ring import row_ring_kernel
from rooftile.kernels.gluon.launch import Box, Launch
from rooftile.kernels.weights_at_rest import are_weights_at_rest

_DTYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.int32: gl.int32}
_WORD, _GROUP = 8, 32  # codes


@dataclass(frozen=True)
class RingPlan:
    """How it is run. Measurements: docs/performance.md.

    tile: rows of the weight of a CTA, which warps_x warps share. step_k: of a stage of the ring,
    which warps_k warps share. rows: of activations of a CTA, 8 or 16.
    """

    tile: int
    step_k: int
    warps_x: int
    warps_k: int
    stages: int
    rows: int = 8


def matmul(
    a: Tensor,  # [m, k], k contiguous
    b: Tensor,  # [n, k], k contiguous; or words of int4 codes, int32
    scales: Tensor | None,  # of codes, [n, k / 32]
    bias: Tensor | None,
    residual: Tensor | None,
    activation: str,
    out_dtype: torch.dtype,
    plan: RingPlan,
) -> Tensor:  # [m, n]
    """Bases and strides are multiples of 16 bytes."""
    (m, k), n = a.shape, b.shape[0]
    out = a.new_empty((m, n), dtype=out_dtype)
    if residual is not None and residual.stride(1) != 1:
        residual = residual.contiguous()
    launch = _launch(
        plan,
        a.device,
        tuple(None if t is None else t.dtype for t in (b, out, bias, residual)),
        (m, n, k),
        tuple(0 if t is None else t.stride(0) for t in (a, b, scales, residual)),
        activation,
        are_weights_at_rest(),
    )
    pointers = (
        *(a.view(torch.int32), out, out if bias is None else bias.contiguous()),
        out if residual is None else residual,
    )
    launch((b,) if scales is None else (b, scales), pointers)
    return out


def _described(
    rows: int, columns: int, stride: int, box: tuple[int, int], dtype: torch.dtype
) -> Box:
    shared = gl.NVMMASharedLayout.get_default_for(list(box), _DTYPES[dtype])
    # A dimension of size 1 is never stepped over, so any legal stride will do.
    return Box((rows, columns), (stride if rows > 1 else 16 * columns, 1), box, shared)


@lru_cache(maxsize=4096)
def _launch(
    plan: RingPlan,
    device: torch.device,
    dtypes: tuple[torch.dtype | None, ...],  # of b, out, bias, residual
    sizes: tuple[int, int, int],
    strides: tuple[int, ...],  # of a, b, scales, residual
    activation: str,
    at_rest: bool,
) -> Launch:
    m, n, k = sizes
    a_stride, b_stride, scale_stride, residual_stride = strides
    dtype = dtypes[0]
    assert dtype is not None
    codes = dtype == torch.int32
    boxes: tuple[Box, ...]
    if codes:
        boxes = (
            _described(n, b_stride, b_stride, (plan.tile, plan.step_k // _WORD), dtype),
            _described(
                n, scale_stride, scale_stride, (plan.tile, plan.step_k // _GROUP), torch.bfloat16
            ),
        )
    else:
        boxes = (_described(n, k, b_stride, (plan.tile, plan.step_k), dtype),)
    tiles = -(-n // plan.tile)
    return Launch(
        row_ring_kernel,
        tiles * -(-m // plan.rows),
        device,
        dtypes,
        boxes,
        (a_stride, m, n, k, tiles, n, residual_stride),
        (
            ("tile", plan.tile),
            ("rows", plan.rows),
            ("step_k", plan.step_k),
            ("warps_x", plan.warps_x),
            ("warps_k", plan.warps_k),
            ("stages", plan.stages),
            ("even", k % plan.step_k == 0),
            ("whole", k <= plan.step_k * plan.stages),
            ("codes", codes),
            ("ahead", at_rest),
            ("activation", activation),
            ("has_bias", dtypes[2] is not None),
            ("has_residual", dtypes[3] is not None),
        ),
        warps=plan.warps_x * plan.warps_k,
        dependent=True,
        absent=0 if codes else 1,
    )
