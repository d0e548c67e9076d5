"""From the operator's arguments to a launch of the kernel for few rows."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl

from rooftile.kernels.flags import discard_flags, flags
from rooftile.kernels.gluon.gemm.few_plan import BOX_K, FewRowsPlan, padded_rows
from rooftile.kernels.gluon.gemm.few_rows import few_rows_kernel
from rooftile.kernels.gluon.launch import Box, Launch
from rooftile.kernels.gluon.tile.divisor import divisor_fields
from rooftile.kernels.reference.gemm import is_gated
from rooftile.kernels.weights_at_rest import are_weights_at_rest

_DTYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}


def matmul(
    a: Tensor,  # [m, k], k contiguous
    b: Tensor,  # [n, k], k contiguous
    bias: Tensor | None,
    residual: Tensor | None,
    activation: str,
    out_dtype: torch.dtype,
    plan: FewRowsPlan,
) -> Tensor:  # [m, n], with a gate half of the columns
    """Bases and strides are multiples of 16 bytes, n of 8, with a gate of 16."""
    (m, k), n = a.shape, b.shape[0]
    columns = n // 2 if is_gated(activation) else n
    out = a.new_empty((m, columns), dtype=out_dtype)
    if residual is not None and residual.stride(1) != 1:
        residual = residual.contiguous()
    launch = _launch(
        plan,
        a.device,
        tuple(None if t is None else t.dtype for t in (a, out, bias, residual)),
        (m, n, k),
        (a.stride(0), b.stride(0), 0 if residual is None else residual.stride(0)),
        activation,
        are_weights_at_rest(),
    )
    if plan.splits > 1:
        tiles = -(-n // plan.tile)
        size = tiles * plan.splits * plan.tile * padded_rows(m)
        parts = torch.empty(size, dtype=torch.float32, device=a.device)
        arrivals = flags(a.device)
    else:
        parts = arrivals = out
    pointers = (
        *(out, out if bias is None else bias.contiguous()),
        *(out if residual is None else residual, parts, arrivals),
    )
    try:
        launch((b, a), pointers)
    except BaseException:
        discard_flags(a.device)
        raise
    return out


@lru_cache(maxsize=4096)
def _launch(
    plan: FewRowsPlan,
    device: torch.device,
    dtypes: tuple[torch.dtype | None, ...],  # of a, out, bias, residual
    sizes: tuple[int, int, int],
    strides: tuple[int, int, int],  # of a, b, residual
    activation: str,
    at_rest: bool,
) -> Launch:
    m, n, k = sizes
    a_stride, b_stride, residual_stride = strides
    dtype = dtypes[0]
    assert dtype is not None
    rows, gated = padded_rows(m), is_gated(activation)
    columns = n // 2 if gated else n

    def described(count: int, stride: int, box_rows: int) -> Box:
        box = (box_rows, BOX_K)
        shared = gl.NVMMASharedLayout.get_default_for(list(box), _DTYPES[dtype])
        # A dimension of size 1 is never stepped over, so any legal stride will do.
        return Box((count, k), (stride if count > 1 else 16 * k, 1), box, shared)

    return Launch(
        few_rows_kernel,
        -(-n // plan.tile) * plan.splits,
        device,
        dtypes,
        (
            described(n, b_stride, plan.tile // 2 if gated else plan.tile),
            described(m, a_stride, rows),
        ),
        (
            *(m, columns, columns, residual_stride, -(-k // (BOX_K * plan.pieces))),
            *divisor_fields(plan.splits),
        ),
        (
            ("tile", plan.tile),
            ("rows", rows),
            ("pieces", plan.pieces),
            ("stages", plan.stages),
            ("warps", plan.warps),
            ("ahead", at_rest),
            ("split", plan.splits > 1),
            ("activation", activation.removesuffix("_and_mul")),
            ("gated", gated),
            ("has_bias", dtypes[2] is not None),
            ("has_residual", dtypes[3] is not None),
        ),
        warps=plan.warps,
        dependent=True,
    )
