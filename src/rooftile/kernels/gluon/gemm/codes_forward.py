"""From the operator's arguments to a launch of the kernel for one row and int4 weights."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl

from rooftile.kernels.gluon.gemm.codes_plan import BLOCK, BLOCK_WORDS, TILE, RowPlan
from rooftile.kernels.gluon.gemm.codes_ring import codes_ring_kernel
from rooftile.kernels.gluon.launch import Box, Launch
from rooftile.kernels.weights_at_rest import are_weights_at_rest


def matmul(
    a: Tensor,  # [1, k], k contiguous, on a multiple of 16 bytes, k a multiple of 8
    words: Tensor,  # of int4 codes [n, k], int32
    scales: Tensor,  # of codes
    bias: Tensor | None,
    residual: Tensor | None,
    activation: str,
    out_dtype: torch.dtype,
    plan: RowPlan,
) -> Tensor:  # [1, n]
    k, n = a.shape[1], words.shape[0]
    out = a.new_empty((1, n), dtype=out_dtype)
    if residual is not None and residual.stride(1) != 1:
        residual = residual.contiguous()
    launch = _launch(
        *(plan, a.device, tuple(None if t is None else t.dtype for t in (out, bias, residual))),
        *((n, k), words.stride(0), activation, are_weights_at_rest()),
    )
    pointers = (
        *(a, out, out if bias is None else bias.contiguous()),
        *(out if residual is None else residual, scales),
    )
    launch((words,), pointers)
    return out


@lru_cache(maxsize=4096)
def _launch(
    plan: RowPlan,
    device: torch.device,
    dtypes: tuple[torch.dtype | None, ...],  # of out, bias, residual
    sizes: tuple[int, int],  # n, k
    stride: int,  # of words
    activation: str,
    at_rest: bool,
) -> Launch:
    n, k = sizes
    steps = -(-k // plan.step)
    stages = min(plan.stages, steps)
    box = (plan.blocks * plan.warps, TILE, BLOCK_WORDS)
    shared = gl.NVMMASharedLayout.get_default_for(list(box), gl.int32)
    return Launch(
        codes_ring_kernel,
        -(-n // TILE),
        device,
        dtypes,
        (Box((-(-k // BLOCK), n, BLOCK_WORDS), (BLOCK_WORDS, stride, 1), box, shared),),
        (stride // 4, n, k, steps),
        (
            ("warps_k", plan.warps),
            ("blocks", plan.blocks),
            ("stages", stages),
            ("even", k % plan.step == 0),
            ("whole", steps <= stages),
            ("ahead", at_rest),
            ("activation", activation),
            ("has_bias", dtypes[1] is not None),
            ("has_residual", dtypes[2] is not None),
        ),
        warps=plan.warps,
        dependent=True,
    )
