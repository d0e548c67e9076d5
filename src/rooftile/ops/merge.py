"""Merging attention results over disjoint sets of keys (Ye et al. 2025, FlashInfer, eq. 2)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rooftile.ops.check import check_device, check_float, check_shape, check_tensors, require
from rooftile.ops.operator import Operator


@dataclass(frozen=True)
class MergeCall:
    """The static properties that choose a kernel."""

    device: str
    dtype: torch.dtype
    v_dim: int


def merge_attention_states(
    outs: Tensor,  # [n, tokens, heads, v_dim]
    lses: Tensor,  # [n, tokens, heads]
    *,
    kernel: str = "auto",
) -> tuple[Tensor, Tensor]:
    """The attention over the union of n disjoint sets of keys, from the result over each.

    lse = log sum_i exp(lses[i]), out = sum_i exp(lses[i] - lse) * outs[i]. A part with lse -inf
    saw nothing and adds nothing, whatever its `outs` hold. Where the parts have a sink, exactly
    one of them must have been computed with it. Differentiable in both arguments.

    Args:
        outs: [n, tokens, heads, v_dim]
        lses: [n, tokens, heads]

    Returns:
        out [tokens, heads, v_dim] in the dtype of outs, lse [tokens, heads] float32 (float64
        where lses is). With n = 0: 0 and -inf.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit together.
    """
    name = "merge_attention_states"
    check_tensors(name, outs=outs, lses=lses)
    check_float(name, outs=outs, lses=lses)
    check_device(name, outs=outs, lses=lses)
    require(
        outs.dim() == 4,
        lambda: f"{name}: outs has shape {list(outs.shape)}; expected [n, tokens, heads, v_dim]",
    )
    check_shape(name, "lses", lses, tuple(outs.shape[:3]), "[n, tokens, heads]")
    require(
        outs.dtype != torch.float64 or lses.dtype == torch.float64,
        lambda: (
            f"{name}: outs is torch.float64 but lses is {lses.dtype}; convert lses to torch.float64"
        ),
    )
    return MERGE.handle(outs, lses, kernel)


def _call(outs: Tensor, *_: Any) -> MergeCall:
    return MergeCall(outs.device.type, outs.dtype, outs.shape[-1])


def _fake(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    lse_dtype = torch.float64 if lses.dtype == torch.float64 else torch.float32
    return outs.new_empty(outs.shape[1:]), lses.new_empty(lses.shape[1:], dtype=lse_dtype)


MERGE = Operator(
    "merge_attention_states",
    "(Tensor outs, Tensor lses) -> (Tensor, Tensor)",
    module="merge",
    families=("triton", "reference"),
    call=_call,
    fake=_fake,
)

MERGE_BACKWARD = Operator(
    "merge_attention_states_backward",
    "(Tensor outs, Tensor lses, Tensor out, Tensor lse, Tensor grad_out, Tensor grad_lse)"
    " -> (Tensor, Tensor)",
    module="merge",
    families=("reference",),
    call=_call,
    fake=lambda outs, lses, *_: (outs.new_empty(outs.shape), lses.new_empty(lses.shape)),
).record_kernels()


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    outs, lses, _ = inputs
    ctx.save_for_backward(outs, lses, *output)


def _backward(ctx: Any, grad_out: Tensor, grad_lse: Tensor) -> tuple[Any, ...]:
    return (*MERGE_BACKWARD.handle(*ctx.saved_tensors, grad_out, grad_lse, "auto"), None)


MERGE.register_autograd(_backward, _setup_context)
