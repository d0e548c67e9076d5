"""From the operator's arguments to a launch of the kernel for one row and int4 weights."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl

from rooftile.kernels.gluon.gemm.codes_digits import scale_box
from rooftile.kernels.gluon.gemm.codes_plan import BLOCK, BLOCK_WORDS, RowPlan
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
        out if residual is None else residual,
    )
    launch((words, scales.view(torch.int32)), pointers)
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
    parts, tiles = plan.parts(k), plan.tiles(n)
    stages = min(plan.stages, parts * tiles)
    words_box = (plan.blocks * plan.warps, plan.tile, BLOCK_WORDS)
    words_layout = gl.NVMMASharedLayout.get_default_for(list(words_box), gl.int32)
    width, _ = scale_box(plan.warps, plan.blocks)
    scales_layout = gl.NVMMASharedLayout(swizzle_byte_width=4 * width, element_bitwidth=32, rank=2)
    return Launch(
        codes_ring_kernel,
        plan.ctas,
        device,
        dtypes,
        (
            Box(
                (-(-k // BLOCK), n, BLOCK_WORDS), (BLOCK_WORDS, stride, 1), words_box, words_layout
            ),
            Box((n, stride // 8), (stride // 8, 1), (plan.tile, width), scales_layout),
        ),
        (n, k, -(-n // plan.tile), parts),
        (
            ("warps_k", plan.warps),
            ("blocks", plan.blocks),
            ("stages", stages),
            ("tile", plan.tile),
            ("tiles", tiles if parts > 1 or plan.once else 0),
            ("once", parts if plan.once else 0),
            ("room", plan.room(n)),
            ("whole", parts * tiles <= stages),
            ("ahead", at_rest),
            ("activation", activation),
            ("has_bias", dtypes[1] is not None),
            ("has_residual", dtypes[2] is not None),
        ),
        warps=plan.warps,
        dependent=True,
    )
