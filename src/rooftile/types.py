"""Plain data that every layer speaks: KV specs, paged batches, packed weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # keeps `import rooftile.types` free of torch at run time
    import torch
    from torch import Tensor


@dataclass(frozen=True)
class KVSpec:
    """What one attention layer keeps per token. Layers of equal spec form one KV group.

    `window` is the left window of the layer in tokens (`None`: all tokens stay visible).
    """

    heads: int
    k_dim: int
    v_dim: int
    dtype: torch.dtype
    window: int | None = None

    @property
    def bytes_per_token(self) -> int:
        return self.heads * (self.k_dim + self.v_dim) * self.dtype.itemsize


@dataclass(frozen=True)
class PrefixGroups:
    """Requests that follow each other in a batch and begin with the same pages.

    Group g is requests first[g] to first[g + 1] - 1; together the groups are the whole batch, a
    request that shares nothing being a group of its own, of shared length 0. The number of groups is
    a capacity: groups without requests are allowed at the end.

    Fields:
        first: [groups + 1] int32, from 0 to batch
        lens: [groups] int32, keys that all members share: whole pages, before any query
        max_len: upper bound, known on the host
    """

    first: Tensor  # [groups + 1] int32, from 0 to batch
    lens: Tensor  # [groups] int32, keys that all members share: whole pages, before any query
    max_len: int  # upper bound, known on the host


@dataclass(frozen=True)
class PagedBatch:
    """Which query tokens and which KV pages belong to which request, for one KV group.

    `max_q_len` and `max_kv_len` are host-side upper bounds, so no operator has to wait for a
    device value; the lengths themselves stay on the device.

    Fields:
        cu_seqlens_q: [batch + 1] int32, cumulative query lengths
        kv_lens: [batch] int32, tokens of KV per request, this step's tokens included
        page_table: [batch, max_pages] int32, entries past a request's last page are ignored
    """

    cu_seqlens_q: Tensor  # [batch + 1] int32, cumulative query lengths
    kv_lens: Tensor  # [batch] int32, tokens of KV per request, this step's tokens included
    page_table: Tensor  # [batch, max_pages] int32, entries past a request's last page are ignored
    max_q_len: int
    max_kv_len: int
    prefix: PrefixGroups | None = None


@dataclass(frozen=True)
class SplitSpec:
    """How paged attention is split over CTAs, but for the lengths (planning/split_kv.py).

    Lengths in tokens, costs in clocks of one CTA. `left` and `right` are window bounds, -1 for none.
    """

    batch: int  # capacities: requests,
    tokens: int  # query tokens of all of them,
    max_q_len: int  # query tokens of one,
    max_kv_len: int  # and its keys
    group_size: int  # query heads of a kv head
    num_kv_heads: int
    left: int
    right: int
    kv_tile: int
    tile_rows: tuple[int, ...]  # sizes of query tiles, ascending
    tile_cost: tuple[int, ...]  # of one KV tile, for each size
    item_cost: int
    num_ctas: int
    min_piece: int  # KV tiles, at least 1
    piece: int = 0  # KV tiles; 0: strips are cut where shares end
    groups: int = 0  # capacity: groups of requests that share a prefix; 0: none is looked for
    least_saved: int = 0  # keys that a group must spare reading to attend its prefix once
    whole: int = 0  # no strip is cut where this many of the costliest fit a share; 0: all may be
    together: int = 1  # requests whose whole strips are taken together, last query tiles first

    @property
    def numbers(self) -> list[int]:
        """What `from_numbers` makes an equal spec of: how it passes through a torch operator."""
        values = [getattr(self, f.name) for f in fields(self) if not f.name.startswith("tile_")]
        return [*values, *self.tile_rows, *self.tile_cost]

    @staticmethod
    def from_numbers(numbers: Sequence[int]) -> SplitSpec:
        names = [f.name for f in fields(SplitSpec) if not f.name.startswith("tile_")]
        sizes = numbers[len(names) :]
        rows, costs = sizes[: len(sizes) // 2], sizes[len(sizes) // 2 :]
        values = dict(zip(names, numbers, strict=False))
        return SplitSpec(**values, tile_rows=tuple(rows), tile_cost=tuple(costs))


@dataclass(frozen=True)
class AttentionPlan:
    """How one kernel splits the paged attention of one step; for all layers of equal shapes.

    Made by `plan_paged_attention`, valid until lengths change. `split` is `None`, and the buffer
    empty, where the kernel follows no plan.

    Fields:
        buffer: int32, as planning/split_kv.py lays it out
    """

    kernel: str
    split: SplitSpec | None
    buffer: Tensor = field(repr=False)  # int32, as planning/split_kv.py lays it out


@dataclass(frozen=True)
class PackedWeight:
    """A weight of a linear layer in the layout that its kernel reads.

    format: "dense" (`tensors["weight"]` is [out_features, in_features]) or a packed format that
    `ops.packed_weight` lists; `shape` is always the logical (out_features, in_features).
    """

    format: str
    tensors: dict[str, Tensor] = field(repr=False)
    shape: tuple[int, int]
    # Set by the first operator that takes it (`ops.packed_weight.check_packed`).
    is_checked: bool = field(default=False, init=False, repr=False, compare=False)
