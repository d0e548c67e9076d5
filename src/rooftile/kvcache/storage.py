"""The tensors behind the pages."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from rooftile.kernels.cpu.arena import huge
from rooftile.kvcache.page_table import PageCopy
from rooftile.kvcache.spec import KVGroup

HUGE_PAGES_FROM = 64 << 20  # bytes of a group's pages
COPY_BUFFER_BYTES = 64 << 20  # bounds the temporary memory of copy_pages (one page at least)


class KVStorage:
    """One allocation per KV group: [layers, num_pages, heads * page_size * (k_dim + v_dim)].

    A page holds its keys [heads, page_size, k_dim], then its values [heads, page_size, v_dim], so
    one head's page is contiguous. Memory is not initialised: nothing may rest on unwritten slots.

    num_pages: per group. device: where all of it lies.

    Raises:
        ValueError: num_pages that do not fit the groups.
    """

    def __init__(
        self,
        groups: Sequence[KVGroup],
        num_pages: Sequence[int],
        page_size: int,
        device: torch.device | str = "cpu",
    ) -> None:
        if len(num_pages) != len(groups) or min(num_pages, default=1) < 1:
            raise ValueError(
                f"KVStorage: num_pages is {list(num_pages)} for {len(groups)} groups; "
                f"give one number of at least 1 for each"
            )
        self.groups = tuple(groups)
        self._buffers: list[Tensor] = []
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}
        for group, count in zip(self.groups, num_pages, strict=True):
            spec = group.spec
            k_size, v_size = (spec.heads * page_size * dim for dim in (spec.k_dim, spec.v_dim))
            shape = len(group.layers), count, k_size + v_size
            buffer = _allocate(shape, spec.dtype, torch.device(device))
            self._buffers.append(buffer)
            for index, layer in enumerate(group.layers):
                k, v = buffer[index].split((k_size, v_size), dim=-1)
                self._layers[layer] = (
                    k.unflatten(-1, (spec.heads, page_size, spec.k_dim)),
                    v.unflatten(-1, (spec.heads, page_size, spec.v_dim)),
                )

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in self._buffers)

    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """k_pages [num_pages, heads, page_size, k_dim] and v_pages [..., v_dim], views."""
        return self._layers[layer]

    def copy_pages(self, copies: Sequence[PageCopy]) -> None:
        """Applies the copies as if one after the other, in all layers of their groups."""
        for group, buffer in enumerate(self._buffers):
            limit = max(1, COPY_BUFFER_BYTES * buffer.shape[1] // buffer.nbytes)
            mine = [copy for copy in copies if copy.group == group]
            for run in _independent_runs(mine, limit):
                pages = torch.tensor([[copy.source for copy in run], [copy.target for copy in run]])
                if buffer.is_cuda:  # so that the host does not wait for the device
                    pages = pages.pin_memory().to(buffer.device, non_blocking=True)
                sources, targets = pages
                buffer.index_copy_(1, targets, buffer.index_select(1, sources))


def _allocate(shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> Tensor:
    nbytes = prod(shape) * dtype.itemsize
    # In the system's huge pages, which a CPU reads faster: decoding is bound by that.
    if device.type == "cpu" and nbytes >= HUGE_PAGES_FROM:
        return huge(nbytes).view(dtype).view(shape)
    return torch.empty(shape, dtype=dtype, device=device)


def _independent_runs(copies: Sequence[PageCopy], limit: int) -> list[list[PageCopy]]:
    """Cuts a list of copies where one reads or writes what an earlier one of its run has written.

    Within a run, reading every source before writing any target is the same as going in order.
    """
    runs: list[list[PageCopy]] = []
    written: set[int] = set()
    for copy in copies:
        if not runs or len(runs[-1]) == limit or not written.isdisjoint((copy.source, copy.target)):
            runs.append([])
            written.clear()
        runs[-1].append(copy)
        written.add(copy.target)
    return runs
