"""Sampling in two or three passes over the logits; penalties, bias and bans before it are torch's."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from rooftile.kernels import Kernel
from rooftile.kernels.cpu import arguments, library
from rooftile.kernels.torch.sampling import scores_of


def sample(
    logits: Tensor,  # [rows, vocab] float32
    temperature: Tensor | None,  # [rows], as are the next three and the last three
    top_k: Tensor | None,
    top_p: Tensor | None,
    min_p: Tensor | None,
    *changes: Tensor | None,  # of the scores: penalties, bias, bans
) -> tuple[Tensor, Tensor]:  # [rows] int64, [rows] float32
    *changes_of_scores, seeds, sample_index, position = changes
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    scores = scores_of(logits, *changes_of_scores)
    rows, vocab = logits.shape
    tokens = torch.empty(rows, dtype=torch.int64)
    logprobs = torch.empty(rows, dtype=torch.float32)
    numbers = {
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "seeds": seeds,
        "sample_index": sample_index,
        "position": position,
    }
    dense = {name: x.contiguous() for name, x in numbers.items() if x is not None}
    call = arguments.Sampling(
        logits=logits.data_ptr(),
        scores=scores.data_ptr(),
        logits_row=logits.stride(0),
        scores_row=scores.stride(0),
        rows=rows,
        vocab=vocab,
        tokens=tokens.data_ptr(),
        logprobs=logprobs.data_ptr(),
        **{name: x.data_ptr() for name, x in dense.items()},
    )
    library.native().rooftile_sample(ctypes.byref(call), torch.get_num_threads())
    return tokens, logprobs


def supports(call: Any) -> str | None:
    if call.device != "cpu":
        return f"it runs on the CPU, not on {call.device!r}"
    return library.refusal()


KERNELS = {"sample": Kernel(sample, supports, efficiency=0.6)}
