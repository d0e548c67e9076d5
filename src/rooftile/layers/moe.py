"""A mixture of experts: a router and gated feed-forward layers of which each token takes a few."""

from __future__ import annotations

import torch
from torch import Tensor

from rooftile.distributed.group import ParallelGroup
from rooftile.layers.linear import Linear
from rooftile.ops.activation import GATED_ACTIVATION
from rooftile.ops.grouped_linear import GROUPED_LINEAR, GroupedLinearCall
from rooftile.ops.operator import exactly


class MixtureOfExperts:
    """The sum of the `top_k` experts that the router favours, weighted by its softmax.

    Under tensor parallelism every rank routes alike and holds some inner columns of each expert.
    A token's experts are summed in the order of their weights, so its result does not depend on
    which other tokens are there.
    """

    def __init__(
        self,
        router: Linear,  # hidden -> experts
        gate_up: Tensor,  # [experts, 2 * inner of this rank, hidden]: gate's rows first
        down: Tensor,  # [experts, hidden, inner of this rank]
        *,
        top_k: int,
        activation: str,
        renormalise: bool,
        group: ParallelGroup,
    ) -> None:
        self.router = router
        self.gate_up = gate_up
        self.down = down
        self.top_k = top_k
        self.activation = activation
        self.renormalise = renormalise
        self.group = group

    @property
    def kernel(self) -> tuple[str, str]:
        """The operator of the experts' products, and the family that runs it."""
        call = GroupedLinearCall(self.gate_up.device.type, self.gate_up.dtype)
        return GROUPED_LINEAR.name, GROUPED_LINEAR.choose(call)

    def __call__(self, x: Tensor) -> Tensor:  # [tokens, hidden]
        shares = self.router(x).float().softmax(-1)
        weights, experts = shares.topk(self.top_k, -1)  # [tokens, top_k]
        if self.renormalise:
            weights = weights / weights.sum(-1, keepdim=True)

        chosen = experts.flatten()
        order = chosen.argsort(stable=True)  # rows of one expert side by side
        # As bincount does, which would wait for a GPU.
        sizes = chosen.new_zeros(self.gate_up.shape[0])
        sizes.scatter_add_(0, chosen, torch.ones_like(chosen))
        inner = GROUPED_LINEAR.handle(x[order // self.top_k], self.gate_up, sizes, "auto")
        inner = GATED_ACTIVATION.handle(inner, self.activation, "auto")
        sorted_out = GROUPED_LINEAR.handle(inner, self.down, sizes, "auto")

        out = torch.empty_like(sorted_out)
        out[order] = sorted_out
        out = out.view(-1, self.top_k, x.shape[-1])
        mixed = exactly(torch.einsum, "tkh,tk->th", out.float(), weights.to(torch.float32))
        return self.group.all_reduce(mixed.to(x.dtype))
