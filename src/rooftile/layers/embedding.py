"""Token embedding (whole on every rank) and the head (its vocabulary split over ranks)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from rooftile.distributed.group import ParallelGroup
from rooftile.kernels.cpu.weights import embed
from rooftile.layers.linear import Linear
from rooftile.ops.operator import exactly
from rooftile.ops.packed_weight import check_packed
from rooftile.types import PackedWeight


class Embedding:
    """Rows of `weight` times `scale`, which is rounded to the weight's dtype as in training."""

    def __init__(self, weight: Tensor, scale: float = 1.0) -> None:
        self.weight = weight  # [vocab, hidden]
        self.dtype = weight.dtype
        self.scale = float(torch.tensor(scale, dtype=weight.dtype))

    def __call__(self, token_ids: Tensor) -> Tensor:  # [tokens] -> [tokens, hidden]
        embedded = F.embedding(token_ids, self.weight)
        return embedded if self.scale == 1 else embedded * self.scale


class PackedEmbedding:
    """The same over a packed weight, whose rows come out in `dtype`."""

    def __init__(self, weight: PackedWeight, dtype: torch.dtype, scale: float = 1.0) -> None:
        check_packed("PackedEmbedding", "weight", weight)
        self.weight = weight  # [vocab, hidden]
        self.dtype = dtype
        self.scale = float(torch.tensor(scale, dtype=dtype))
        self._tensors = list(weight.tensors.values())

    def __call__(self, token_ids: Tensor) -> Tensor:  # [tokens] -> [tokens, hidden]
        embedded = embed(self.weight.format, self._tensors, self.weight.shape, token_ids)
        return (embedded if self.scale == 1 else embedded * self.scale).to(self.dtype)


def _wide_product(x: Tensor, weight: Tensor) -> Tensor:
    """x W^T in float32, of half-precision values; [rows, in], [out, in] -> [rows, out]."""
    if x.dtype == torch.float32:
        return x @ weight.T
    return torch.mm(x, weight.T, out_dtype=torch.float32)


class Head:
    """Logits over the vocabulary. Ranks hold equal shares of its rows, the last one zero-padded.

    Logits are multiplied by `scale`, then softcap * tanh(logit / softcap) where softcap is not 0.
    """

    def __init__(
        self,
        linear: Linear,
        vocab_size: int,
        group: ParallelGroup,
        scale: float = 1.0,
        softcap: float = 0.0,
    ) -> None:
        self.linear = linear
        self.vocab_size = vocab_size
        self.group = group
        self.scale = scale
        self.softcap = softcap

    def __call__(self, hidden: Tensor) -> Tensor:  # [rows, hidden] -> [rows, vocab] float32
        if hidden.is_cuda and self._has_wide_product:
            weight = self.linear.weight.tensors["weight"]
            return self.finish(exactly(_wide_product, hidden, weight))
        return self.finish(self.group.all_gather(self.linear(hidden)).float())

    @property
    def _has_wide_product(self) -> bool:
        """Whether the matrix product itself can give float32, not rounded on the way."""
        linear = self.linear
        return self.group.size == 1 and linear.weight.format == "dense" and linear.bias is None

    def finish(self, logits: Tensor) -> Tensor:  # [rows, padded vocab] float32 -> [rows, vocab]
        """Scale and cap the products with the matrix's rows."""
        if logits.shape[1] != self.vocab_size:
            logits = logits[:, : self.vocab_size]
        if self.scale != 1:
            logits = logits * self.scale
        if self.softcap:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        return logits
