"""Register tiles, shared memory, global memory and tensor descriptors of the simulated machine."""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tests.support.gluon_sim.errors import SimulationError
from tests.support.gluon_sim.regions import Region, flat, nothing

__all__ = [
    "Boxes",
    "Descriptor",
    "Pointer",
    "SharedTile",
    "Tile",
    "flat",
    "nothing",
    "pointer",
    "tile",
]


class Tile(torch.Tensor):
    """A register tile: a torch tensor with the kernel language's conversions."""

    def to(self, dtype: Any, *, bitcast: bool = False) -> Tile:  # type: ignore[override]
        return self.view(dtype) if bitcast else super().to(dtype)

    def split(self) -> tuple[Tile, Tile]:  # type: ignore[override]
        """The two halves along the last dimension, which has size 2."""
        first, second = self.unbind(-1)
        return first, second


def tile(x: Tensor) -> Tile:
    return x.as_subclass(Tile)


class SharedTile:
    """A view of shared memory, with a record of who wrote it through the generic proxy.

    unfenced: number of the task whose generic write still needs a proxy fence, -1 where none does.
    """

    layout = None  # swizzles are not simulated

    def __init__(self, data: Tensor, unfenced: Tensor, barriers: Any = None) -> None:
        self.data = data
        self.unfenced = unfenced
        self.dtype = data.dtype

    def index(self, i: int) -> SharedTile:
        i = int(i)
        if not 0 <= i < self.data.shape[0]:
            raise SimulationError(f"stage {i} of {self.data.shape[0]}")
        return SharedTile(self.data[i], self.unfenced[i])

    def reshape(self, shape: Sequence[int]) -> SharedTile:
        return SharedTile(self.data.view(*shape), self.unfenced.view(*shape))

    def slice(self, start: int, length: int, dim: int = 0) -> SharedTile:
        if start < 0 or start + length > self.data.shape[dim]:
            raise SimulationError(f"slice {start}:{start + length} of {self.data.shape[dim]}")
        return SharedTile(
            self.data.narrow(dim, start, length), self.unfenced.narrow(dim, start, length)
        )

    def permute(self, order: Sequence[int]) -> SharedTile:
        return SharedTile(self.data.permute(*order), self.unfenced.permute(*order))

    def _reinterpret(self, dtype: Any, shape: Sequence[int], layout: Any) -> Boxes | SharedTile:
        """Swizzled tiles [stages, rows, columns], or one of them, as the boxes that they consist of; or a
        box with those that follow it in memory."""
        if dtype == self.dtype and list(shape[1:]) == self.shape[1:] and shape[0] > self.shape[0]:
            return self._with_what_follows(shape[0])
        if dtype != self.dtype or math.prod(shape) != self.data.numel():
            raise SimulationError(f"{self.dtype} {self.shape} seen as {dtype} {list(shape)}")
        # As a vector, or boxes of whole rows, one after the other.
        if len(shape) == 1 or shape[-1] == self.shape[-1]:
            return self.reshape(shape)
        return Boxes(self, list(shape[1:]))

    def _with_what_follows(self, rows: int) -> SharedTile:
        x = self.data
        if not x.is_contiguous() or (
            x.storage_offset() + rows * x[0].numel() > x.untyped_storage().nbytes() // x.itemsize
        ):
            raise SimulationError(f"{rows} rows from {self.shape} on")
        shape = (rows, *x.shape[1:])
        return SharedTile(*(y.as_strided(shape, y.stride()) for y in (x, self.unfenced)))

    @property
    def shape(self) -> list[int]:
        return list(self.data.shape)

    def read_by_hardware(self, what: str) -> Tensor:
        """The contents as the copy engine or wgmma sees them."""
        if bool((self.unfenced >= 0).any()):
            raise SimulationError(f"{what} reads a generic write that no fence_async_shared covers")
        return self.data.clone()

    def poison(self) -> None:
        self.data.fill_(nothing(self.dtype))
        self.unfenced.fill_(-1)


class Boxes:
    """Tiles [stages, rows, columns] by boxes of fewer rows and columns, counted along the rows
    first, then along the columns, then by stages: how 128-byte swizzled tiles lie in memory."""

    def __init__(self, tiles: SharedTile, box: list[int]) -> None:
        self.tiles = tiles
        self.box = box

    def index(self, i: int) -> SharedTile:
        rows, columns = math.prod(self.box[:-1]), self.box[-1]
        _, tile_rows, tile_columns = self.tiles.shape
        i, row = divmod(int(i), tile_rows // rows)
        stage, column = divmod(i, tile_columns // columns)
        part = self.tiles.index(stage)
        part = part.slice(row * rows, rows, 0).slice(column * columns, columns, 1)
        return part.reshape(self.box)


class Pointer:
    """A pointer argument: the region of its tensor, and an offset in its storage."""

    def __init__(self, region: Region, offset: Any) -> None:
        self.region = region
        self.offset = offset
        self.dtype = SimpleNamespace(element_ty=region.memory.dtype)

    def __add__(self, offset: Any) -> Pointer:
        return Pointer(self.region, self.offset + offset)

    @property
    def memory(self) -> Tensor:
        return self.region.memory

    def places(self, mask: Any, what: str, reads: bool) -> tuple[Tensor, Tensor | None]:
        """Places of all lanes, and which of them have access (None: all); checked. The others' are 0."""
        places = torch.as_tensor(self.offset).as_subclass(Tensor).long()
        if mask is None:
            self.region.check(places, what, reads)
            return places, None
        wanted = torch.as_tensor(mask).as_subclass(Tensor)
        places, wanted = torch.broadcast_tensors(places, wanted)
        self.region.check(places[wanted], what, reads)
        return torch.where(wanted, places, 0), wanted


def pointer(x: Tensor, name: str = "a tensor") -> Pointer:
    return Pointer(Region(x, name), x.storage_offset())


class Descriptor:
    """Stands for Gluon's TensorDescriptor, with the copy engine's own rules checked."""

    def __init__(
        self,
        base: Tensor,
        shape: Sequence[int],
        strides: Sequence[int],
        block_shape: Sequence[int],
        layout: Any,
    ) -> None:
        size = base.element_size()
        rules = {
            "at most five dimensions": len(shape) <= 5,
            "one length for all": len(shape) == len(strides) == len(block_shape),
            "a base that is a multiple of 16 bytes": base.data_ptr() % 16 == 0,
            "a contiguous last dimension": strides[-1] == 1,
            "strides that are multiples of 16 bytes": all(s * size % 16 == 0 for s in strides[:-1]),
            "strides within 2^40 bytes": all(0 < s * size < 2**40 for s in strides[:-1]),
            "positive dimensions below 2^32": all(0 < n < 2**32 for n in shape),
            "boxes of at most 256 rows": max(block_shape) <= 256,
        }
        broken = [rule for rule, kept in rules.items() if not kept]
        if broken:
            raise SimulationError(f"descriptor breaks: {'; '.join(broken)}")
        self.region = Region(base, "a descriptor's")
        self.memory = self.region.memory
        self.offset = base.storage_offset()
        self.shape, self.strides, self.block_shape = list(shape), list(strides), list(block_shape)
        self.layout = layout
        self.dtype = base.dtype

    @property
    def block_type(self) -> Any:
        return SimpleNamespace(nbytes=math.prod(self.block_shape) * self.dtype.itemsize)

    def addresses(self, coordinates: Sequence[int], reads: bool = True) -> tuple[Tensor, Tensor]:
        """Addresses of a box in elements, and which of them lie inside the tensor; checked."""
        if len(coordinates) != len(self.shape):
            raise SimulationError(
                f"{len(coordinates)} coordinates for {len(self.shape)} dimensions"
            )
        address = torch.zeros((), dtype=torch.int64)
        inside = torch.ones((), dtype=torch.bool)
        low, span = self.offset, 0  # of what lies inside
        for d, (start, size, stride, extent) in enumerate(
            zip(coordinates, self.block_shape, self.strides, self.shape, strict=True)
        ):
            at = int(start) + torch.arange(size).view(
                [-1 if i == d else 1 for i in range(len(self.shape))]
            )
            address = address + at * stride  # wraps at 2^64 as the engine's arithmetic does
            inside = inside & (at >= 0) & (at < extent)
            first, last = max(int(start), 0), min(int(start) + size, extent) - 1
            low, span = (
                low + first * stride,
                -1 if span < 0 or last < first else span + (last - first) * stride,
            )
        address = address + self.offset
        if span >= 0:
            low = (low + 2**63) % 2**64 - 2**63
            self.region.check_span(low, low + span, "the copy engine")
            if reads:
                self.region.check_written(address[inside], "the copy engine")
        return address, inside
