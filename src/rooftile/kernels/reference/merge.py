"""Merging of partial attention results in plain PyTorch, in float32 or wider."""

from __future__ import annotations

import torch
from torch import Tensor

from rooftile.kernels import Kernel, anything
from rooftile.kernels.reference.precision import widen


def _weights(lses: Tensor) -> Tensor:
    """[n, tokens, heads]: the share of each part; 0 for a part that saw nothing.

    They add up to 1, as exp(lses - lse) does not where a rounding of lse is large.
    """
    return torch.softmax(lses, 0).masked_fill(lses == -torch.inf, 0)


def merge_attention_states(
    outs: Tensor,  # [n, tokens, heads, v_dim]
    lses: Tensor,  # [n, tokens, heads]
) -> tuple[Tensor, Tensor]:  # [tokens, heads, v_dim], [tokens, heads]
    lses = widen(lses)
    lse = torch.logsumexp(lses, 0)
    weights = _weights(lses)[..., None]
    # A part without weight must not contribute NaN through 0 * NaN.
    out = (weights * widen(outs).masked_fill(weights == 0, 0)).sum(0)
    return out.to(outs.dtype), lse


def merge_attention_states_backward(
    outs: Tensor,  # [n, tokens, heads, v_dim]
    lses: Tensor,  # [n, tokens, heads]
    out: Tensor,  # [tokens, heads, v_dim]
    lse: Tensor,  # [tokens, heads]
    grad_out: Tensor,  # [tokens, heads, v_dim]
    grad_lse: Tensor,  # [tokens, heads]
) -> tuple[Tensor, Tensor]:
    weights = _weights(widen(lses))
    unused = (weights == 0)[..., None]
    grad_outs = (weights[..., None] * grad_out).masked_fill(unused, 0)
    drift = (widen(outs).masked_fill(unused, 0) - widen(out)) * widen(grad_out)
    grad_lses = (weights * (drift.sum(-1) + grad_lse)).masked_fill(unused[..., 0], 0)
    return grad_outs.to(outs.dtype), grad_lses.to(lses.dtype)


KERNELS = {
    "merge_attention_states": Kernel(merge_attention_states, anything, efficiency=0.1),
    "merge_attention_states_backward": Kernel(
        merge_attention_states_backward, anything, efficiency=0.1
    ),
}
