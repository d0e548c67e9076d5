"""The private operators behind `attention(..., score_mod=..., mask_mod=...)`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rooftile.kernels.modifiers import Modifier
from rooftile.kernels.reference import attention_mods as reference
from rooftile.ops.attention_call import AttentionCall, attention_call, fake_attention
from rooftile.ops.modifiers import parts
from rooftile.ops.operator import Operator, exactly


@dataclass(frozen=True)
class ModifiedCall:
    """The static properties that choose a kernel; keys of modifiers, empty for none."""

    attention: AttentionCall
    score_mod: str
    mask_mod: str


def _call(
    q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, left: int, right: int, softcap: float,
    scale: float, score_mod: str, score_tensors: Sequence[Tensor], mask_mod: str,
    mask_tensors: Sequence[Tensor],
) -> ModifiedCall:  # fmt: skip
    call = attention_call(q, k, v, sink, left, right, softcap)
    return ModifiedCall(call, score_mod, mask_mod)


_OPTIONS = (
    "int left, int right, float softcap, float scale, str score_mod, Tensor[] score_tensors,"
    " str mask_mod, Tensor[] mask_tensors"
)
_REFUSAL = "it takes no score_mod or mask_mod; the Triton and Gluon kernels do"

ATTENTION_MODS = Operator(
    "attention_mods",
    f"(Tensor q, Tensor k, Tensor v, Tensor? sink, {_OPTIONS}) -> (Tensor, Tensor)",
    module="attention_mods",
    families=("gluon", "triton", "reference"),
    refused={"torch": _REFUSAL},
    call=_call,
    fake=lambda q, k, v, *_: fake_attention(q, v),
)

ATTENTION_VARLEN_MODS = Operator(
    "attention_varlen_mods",
    "(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_k, SymInt max_q_len,"
    f" SymInt max_kv_len, Tensor? sink, {_OPTIONS}) -> (Tensor, Tensor)",
    module="attention_mods",
    families=("gluon", "triton", "reference"),
    refused={"torch": _REFUSAL},
    call=lambda q, k, v, cu_q, cu_k, max_q, max_kv, *rest: _call(q, k, v, *rest),
    fake=lambda q, k, v, *_: fake_attention(q, v),
)


def run_modified(
    operator: Operator,
    tensors: tuple[Any, ...],  # q, k, v, and lengths where ragged
    options: tuple[Any, ...],  # sink, left, right, softcap, scale
    score: Modifier | None,
    mask: Modifier | None,
    kernel: str,
) -> tuple[Tensor, Tensor]:
    """Through the operator, or where gradients are wanted through the reference, which has them."""
    operator.check_kernel(kernel)
    arguments = (*tensors, *options, *parts(score), *parts(mask))
    given = [*tensors[:3], options[0], *parts(score)[1], *parts(mask)[1]]
    if not (torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in given)):
        return operator.handle(*arguments, kernel)
    if kernel not in ("auto", "reference"):
        raise NotImplementedError(
            f"{operator.name}: kernel={kernel!r} has no gradients with score_mod or mask_mod; use "
            f"kernel='auto', which takes the reference for them, or torch.no_grad()"
        )
    ragged = operator is ATTENTION_VARLEN_MODS
    function = reference.attention_varlen_mods if ragged else reference.attention_mods
    return exactly(function, *arguments)
