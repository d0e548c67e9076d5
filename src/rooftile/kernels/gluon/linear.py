"""Linear layers over dense and int4 weights by the products of kernels/gluon/gemm.

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

_SWITCH, _VALUE = "ROOFTILE_LINEAR", "stream-k"


def linear(
    x: Tensor,  # [..., in_features]
    weight: list[Tensor],  # one, [out_features, in_features]; or words and scales of int4 codes
    format: str,
    out_features: int,
    bias: Tensor | None,  # [out_features]
) -> Tensor:
    rows = x.flatten(0, -2) if x.dim() > 1 else x[None]
    scales = weight[1] if format == "int4_words" else None
    out = gemm.matmul(rows, weight[0].T, bias, None, None, scales, "none", x.dtype, False)
    return out.view(*x.shape[:-1], out_features)


def is_switched_on() -> bool:
    """Whether the engine's linear layers are to run through the products of kernels/gluon/gemm.

    Raises:
        ValueError: the switch has a value that it does not know; empty is as if it were not set.
    """
    value = os.environ.get(_SWITCH)
    if value and value != _VALUE:
        raise ValueError(f"{_SWITCH} is {value!r}; it is {_VALUE}, or not set")
    return value == _VALUE


def efficiency(call: Any) -> float:
    """Of dense weights above everybody else's where the switch is set, below the vendor's where not."""
    if call.format == "int4_words":
        return 0.9
    return 1.0 if is_switched_on() else 0.45


def supports(call: Any) -> str | None:
    if call.format not in ("dense", "int4_words"):
        return f"it cannot read {call.format!r}"
    layout = "column" if call.format == "dense" else call.format
    product = {"out_dtype": call.dtype, "activation": "none", "b_layout": layout}
    sizes = dict.fromkeys("mnk", 1)
    return gemm.supports(SimpleNamespace(device=call.device, dtype=call.dtype, **product, **sizes))


KERNELS = {"linear": Kernel(linear, supports, efficiency)}
