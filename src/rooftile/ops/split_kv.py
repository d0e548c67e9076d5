"""Planning how paged attention is split over a GPU, as an operator."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rooftile.ops.operator import Operator
from rooftile.planning.split_kv import Layout
from rooftile.types import SplitSpec


@dataclass(frozen=True)
class SplitCall:
    """The static properties that choose a kernel."""

    device: str


def _fake(
    cu_seqlens_q: Tensor, kv_lens: Tensor, split: list[int], first: Tensor | None,
    shared: Tensor | None,
) -> Tensor:  # fmt: skip
    size = Layout(SplitSpec.from_numbers(split)).size
    return kv_lens.new_empty(size, dtype=torch.int32)


# Makes the buffer that planning/split_kv.py describes; `split` are a SplitSpec's numbers, `first`
# [groups + 1] and `shared` [groups] int32 its prefixes.
SPLIT_KV = Operator(
    "split_kv",
    "(Tensor cu_seqlens_q, Tensor kv_lens, SymInt[] split, Tensor? first, Tensor? shared) -> Tensor",
    module="split_kv",
    families=("triton", "reference"),
    call=lambda cu_seqlens_q, kv_lens, *_: SplitCall(kv_lens.device.type),
    fake=_fake,
)
