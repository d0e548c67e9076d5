"""How close is close enough: one rule for every operator (docs/architecture.md, Accuracy)."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor

from rooftile.ops.operator import GPU_FAMILIES, Operator


def assert_rows_close(
    actual: Tensor, expected: Tensor, dtype: torch.dtype, scale: float = 1.0
) -> None:
    """Each row's error against the float64 result is a few roundings of `dtype`, per row.

    scale: multiplies the allowance, for results that are long sums.
    """
    assert actual.shape == expected.shape, (actual.shape, expected.shape)
    if actual.numel() == 0:
        return
    actual, expected = actual.double(), expected.double()
    assert torch.equal(actual.isnan(), expected.isnan())
    rows = (
        (actual - expected).abs().flatten(0, -2)
        if actual.dim() > 1
        else (actual - expected).abs()[None]
    )
    reference = expected.abs().reshape(rows.shape).amax(-1)
    allowed = scale * 4 * torch.finfo(dtype).eps * (reference + 0.1)
    worst = rows.amax(-1)
    assert bool((worst <= allowed).all()), f"row errors {worst.tolist()} above {allowed.tolist()}"


def kernels_to_test(operator: Operator) -> list[str]:
    """The families that this process tests: Triton's alone where they are interpreted.

    Those that need a GPU have tests of their own, on a GPU.
    """
    if os.environ.get("TRITON_INTERPRET") == "1":
        return [family for family in operator.families if family == "triton"]
    return [family for family in operator.families if family not in GPU_FAMILIES]


def dtype_for(kernel: str, dtype: torch.dtype) -> torch.dtype:
    """The dtype to test a kernel in where `dtype` was drawn: fast ones have no float64, and Triton's
    interpreter does not round to bfloat16.
    """
    if kernel == "triton" and dtype == torch.bfloat16:
        return torch.float16
    return torch.float32 if kernel in ("cpu", "triton") and dtype == torch.float64 else dtype


def opcheck(operator: Operator, *arguments: Any, **options: Any) -> None:
    """torch's own checks of schema, fake implementation, autograd registration, AOT dispatch; and that
    autocast changes nothing, whichever kernel runs.
    """
    torch.library.opcheck(operator.overload, (*arguments, "auto"), **options)
    call = operator.call(*arguments)
    for family in kernels_to_test(operator):
        if operator.refusal(call, family) is not None:
            continue
        with torch.no_grad():
            alone = operator.handle(*arguments, family)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                within = operator.handle(*arguments, family)
        torch.testing.assert_close(within, alone, rtol=0, atol=0, equal_nan=True)
