"""What portable kernels run on: the device and the dtypes, the interpreter's included."""

from __future__ import annotations

from typing import Any

import torch

from rooftile.kernels.triton.interpreter import INTERPRETED

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def refusal(call: Any) -> str | None:
    """Why these kernels cannot run a call of this device and dtype."""
    if INTERPRETED:
        if call.dtype not in (torch.float16, torch.float32):
            return f"Triton's interpreter takes float16 and float32, not {call.dtype}"
        return None
    if call.device != "cuda":
        return f"it needs a GPU, not a {call.device}"
    if call.dtype not in DTYPES:
        return f"it takes bfloat16, float16 and float32, not {call.dtype}"
    return None
