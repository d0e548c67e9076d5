"""Token embedding (whole on every rank) and the head (its vocabulary split over ranks)."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from rooftile.distributed.group import ParallelGroup
from rooftile.layers.linear import Linear


class Embedding:
    def __init__(self, weight: Tensor) -> None:
        self.weight = weight  # [vocab, hidden]

    def __call__(self, token_ids: Tensor) -> Tensor:  # [tokens] -> [tokens, hidden]
        return F.embedding(token_ids, self.weight)


class Head:
    """Logits over the vocabulary. Ranks hold equal shares of its rows, the last one zero-padded."""

    def __init__(self, linear: Linear, vocab_size: int, group: ParallelGroup) -> None:
        self.linear = linear
        self.vocab_size = vocab_size
        self.group = group

    def __call__(self, hidden: Tensor) -> Tensor:  # [rows, hidden] -> [rows, vocab] float32
        return self.group.all_gather(self.linear(hidden))[:, : self.vocab_size].float()
