"""Greedy sampling in one pass over the logits; every other kind is torch's."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rooftile.kernels import Kernel
from rooftile.kernels.cpu import library
from rooftile.kernels.torch.sampling import sample as sample_with_torch


def sample(logits: Tensor, *params: Tensor | None) -> tuple[Tensor, Tensor]:
    if any(param is not None for param in params):
        return sample_with_torch(logits, *params)
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    rows, vocab = logits.shape
    tokens = torch.empty(rows, dtype=torch.int64)
    logprobs = torch.empty(rows, dtype=torch.float32)
    library.native().rooftile_greedy(
        *(logits.data_ptr(), logits.stride(0), rows, vocab),
        *(tokens.data_ptr(), logprobs.data_ptr(), torch.get_num_threads()),
    )
    return tokens, logprobs


def supports(call: Any) -> str | None:
    if call.device != "cpu":
        return f"it runs on the CPU, not on {call.device!r}"
    return library.refusal()


KERNELS = {"sample": Kernel(sample, supports, efficiency=0.6)}
