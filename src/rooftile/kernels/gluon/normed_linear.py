"""Norm, linear layer and gate, the latter two in one launch of kernels/gluon/gemm.

Every layer of the engine takes it where ROOFTILE_LINEAR=stream-k is set: see linear.py.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from torch import Tensor

from rooftile.kernels import Kernel
from rooftile.kernels.gluon import gemm
from rooftile.kernels.gluon.linear import is_switched_on
from rooftile.kernels.triton import few


def normed_linear(
    x: Tensor,  # [..., in_features]
    residual: Tensor | None,  # [..., in_features]
    norm_weight: Tensor,  # [in_features]
    eps: float,
    weight_offset: float,
    weight: Tensor,  # [out_features, in_features], of gates and values if there is an activation
    bias: Tensor | None,  # [out_features]
    activation: str,
) -> tuple[Tensor, Tensor]:
    if x.numel() <= few.MOST_ROWS * x.shape[-1]:
        # The kernels that matmul would take compute the norm and the gate as well. They are plain
        # Triton, which what simulates the products does not know.
        from rooftile.kernels.triton import linear as portable

        return portable.normed_linear(
            x, residual, norm_weight, eps, weight_offset, weight, bias, activation
        )
    from rooftile.kernels.triton.norm import rms_norm

    y, stream = rms_norm(x, norm_weight, residual, eps, weight_offset)
    rows = y.flatten(0, -2) if y.dim() > 1 else y[None]
    gate = f"{activation}_and_mul" if activation else "none"
    out = gemm.matmul(rows, weight.T, bias, None, None, None, gate, x.dtype, False)
    return out.view(*x.shape[:-1], out.shape[-1]), stream


def efficiency(call: Any) -> float:
    """Above everybody else's where the switch is set, below the portable kernel's where not."""
    return 1.0 if is_switched_on() else 0.45


def supports(call: Any) -> str | None:
    product = {"out_dtype": call.dtype, "activation": "none", "b_layout": "column"}
    sizes = dict.fromkeys("mnk", 1)
    return gemm.supports(SimpleNamespace(device=call.device, dtype=call.dtype, **product, **sizes))


KERNELS = {"normed_linear": Kernel(normed_linear, supports, efficiency)}
