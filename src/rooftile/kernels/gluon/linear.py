"""Linear layers over dense weights by the Stream-K product (kernels/gluon/gemm).

`linear(kernel="gluon")` takes it by name. kernel="auto", and with it every layer of the engine,
takes it where ROOFTILE_LINEAR=stream-k is set before the first call.
"""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

from torch import Tensor

from rooftile.kernels import Kernel
from rooftile.kernels.gluon import gemm

_SWITCH = "ROOFTILE_LINEAR"


def linear(
    x: Tensor,  # [..., in_features]
    weight: list[Tensor],  # one, [out_features, in_features]
    format: str,
    out_features: int,
    bias: Tensor | None,  # [out_features]
) -> Tensor:
    rows = x.flatten(0, -2) if x.dim() > 1 else x[None]
    out = gemm.matmul(rows, weight[0].T, bias, None, None, None, "none", x.dtype, False)
    return out.view(*x.shape[:-1], out_features)


def efficiency(call: Any) -> float:
    """Above everybody else's where the switch is set, below the vendor's where not."""
    return 1.0 if os.environ.get(_SWITCH) == "stream-k" else 0.45


def supports(call: Any) -> str | None:
    if call.format != "dense":
        return f"it cannot read {call.format!r}"
    product = {"out_dtype": call.dtype, "activation": "none", "b_layout": "column"}
    sizes = dict.fromkeys("mnk", 1)
    return gemm.supports(SimpleNamespace(device=call.device, dtype=call.dtype, **product, **sizes))


KERNELS = {"linear": Kernel(linear, supports, efficiency)}
