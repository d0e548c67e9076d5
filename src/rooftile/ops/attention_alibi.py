"""The private operators behind `attention(..., alibi_slopes=...)` (Press et al. 2022)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rooftile.kernels.reference import attention_alibi as reference
from rooftile.ops.attention_call import AttentionCall, attention_call, fake_attention
from rooftile.ops.operator import Operator, exactly


def _call(
    q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, slopes: Tensor,
    left: int, right: int, softcap: float, scale: float,
) -> AttentionCall:  # fmt: skip
    return attention_call(q, k, v, sink, left, right, softcap)


_REFUSAL = "it takes no alibi_slopes; gluon and triton do"
_OPTIONS = (
    "Tensor? sink, Tensor alibi_slopes, int left, int right, float softcap, float scale)"
    " -> (Tensor, Tensor)"
)

ATTENTION_ALIBI = Operator(
    "attention_alibi",
    f"(Tensor q, Tensor k, Tensor v, {_OPTIONS}",
    module="attention_alibi",
    families=("gluon", "triton", "reference"),
    refused={"torch": _REFUSAL},
    call=_call,
    fake=lambda q, k, v, *_: fake_attention(q, v),
)

ATTENTION_VARLEN_ALIBI = Operator(
    "attention_varlen_alibi",
    "(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_k, SymInt max_q_len,"
    f" SymInt max_kv_len, {_OPTIONS}",
    module="attention_alibi",
    families=("gluon", "triton", "reference"),
    refused={"torch": _REFUSAL},
    call=lambda q, k, v, cu_q, cu_k, max_q, max_kv, *rest: _call(q, k, v, *rest),
    fake=lambda q, k, v, *_: fake_attention(q, v),
)


def run_alibi(
    operator: Operator,
    tensors: tuple[Any, ...],  # q, k, v, and lengths where ragged
    sink: Tensor | None,  # [num_q_heads]
    slopes: Tensor,  # [num_q_heads]
    options: tuple[Any, ...],  # left, right, softcap, scale
    kernel: str,
) -> tuple[Tensor, Tensor]:
    """Through the operator, or where gradients are wanted through the reference, which has them."""
    operator.check_kernel(kernel)
    given = [*tensors[:3], sink, slopes]
    if not (torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in given)):
        return operator.handle(*tensors, sink, slopes, *options, kernel)
    if kernel not in ("auto", "reference"):
        raise NotImplementedError(
            f"{operator.name}: kernel={kernel!r} has no gradients; use kernel='auto', which takes "
            f"the reference for them, or torch.no_grad()"
        )
    ragged = operator is ATTENTION_VARLEN_ALIBI
    function = reference.attention_varlen_alibi if ragged else reference.attention_alibi
    return exactly(function, *tensors, sink, slopes, *options)
