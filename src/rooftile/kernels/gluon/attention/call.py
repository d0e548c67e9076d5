"""What binding a kind of dense and of ragged calls has in common: see forward.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rooftile.kernels.gluon.attention.config import AGAIN_ROWS, UNBOUNDED, Config, box_columns
from rooftile.kernels.gluon.attention.cut import Cut
from rooftile.kernels.gluon.attention.kernel import attention_kernel, constants
from rooftile.kernels.gluon.attention.mods import NO_MODS, Mods
from rooftile.kernels.gluon.counter import address_of_counters, counters
from rooftile.kernels.gluon.launch import Box, Launch
from rooftile.kernels.gluon.tile.rows import addressable

_LOG2_E = 1.4426950408889634
Result = tuple[Tensor, Any]  # the output, and the lse or None where nobody reads it
Tensors = tuple[Tensor, Tensor, Tensor, Tensor]  # q, k, v and the output


def templates(q: Tensor, v_dim: int) -> tuple[Tensor, Tensor]:
    """Tensors of one element that `torch.empty_like` makes an output and an lse from: of all ways
    to allocate, the one that costs the host least."""
    shape = q.shape[:-1]
    one = q.new_empty(1, dtype=torch.float32)
    return one.to(q.dtype).expand(*shape, v_dim), one.expand(shape)


def boxes_of(
    described: Callable[[Tensor, int, int], Box], config: Config, q: Tensor, k: Tensor, v: Tensor
) -> tuple[Box, ...]:
    """Of q, k, v and the output, and of k and v in a second pass."""
    dim, k_dim, v_dim = config.dim, k.shape[-1], v.shape[-1]
    return (
        described(q, 64, box_columns(dim, k_dim)),
        described(k, config.block, box_columns(dim, k_dim)),
        described(v, config.block, box_columns(dim, v_dim)),
        described(q.new_empty(*q.shape[:-1], v_dim), 64, dim),
        *(described(x, AGAIN_ROWS, dim) for x in (k, v) if config.anchored),
    )


class Kind:
    """A kind of call, before it is known how many CTAs take which tiles."""

    def __init__(
        self,
        config: Config,
        described: Callable[[Tensor, int, int], Box],
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sink: Tensor | None,
        left: int,
        right: int,
        softcap: float,
        scale: float,
        slopes: Tensor | None,
        mods: Mods,
        results: int,  # how many of output and lse the caller reads
    ) -> None:
        self._config, self._device, self._dtype = config, q.device, q.dtype
        self._boxes = boxes_of(described, config, q, k, v)
        self._options = (
            *(min(left, UNBOUNDED), min(right, UNBOUNDED), results - 1),
            # With a cap, what goes into tanh, and the log2 units that come out.
            scale / softcap if softcap else scale * _LOG2_E,
            softcap * _LOG2_E,
            *((), ()),  # what functions of the caller take: see `Launch.with_captured`
        )
        self._features = (
            *(left >= 0, right >= 0, softcap != 0, sink is not None, slopes is not None),
            *(k.shape[-1], v.shape[-1], *mods.functions),
        )

    def launch(
        self,
        ctas: int,
        lengths: tuple[int, ...],  # what the kernel takes before the options
        ragged: bool,
        dynamic: bool,
        split: bool,
        most_sorted: int = 0,
    ) -> Launch:
        config = self._config
        return Launch(
            attention_kernel,
            ctas,
            self._device,
            self._dtype,
            self._boxes,
            (*lengths, *self._options),
            constants(config, ragged, dynamic, *self._features, most_sorted, split),
            config.most_registers,
            dependent=config.dependent,
            absent=0 if config.anchored else 2,
        )


def run_whole(
    launch: Launch,
    anchored: bool,
    tensors: Tensors,
    lse: Tensor,
    sink: Tensor | None,
    slopes: Tensor | None,
    mods: Mods,
    entries: Tensor,  # the counter or the list of tiles
    cu_q: Tensor,
    cu_k: Tensor,
) -> None:
    """A launch over whole tiles, through tensors instead of addresses."""
    pointers = (
        lse,
        lse if sink is None else sink.float().contiguous(),
        lse if slopes is None else slopes.float().contiguous(),
        *(entries, cu_q, cu_k, lse, lse),
    )
    bases = (*tensors, *tensors[1:3]) if anchored else tensors
    if mods is NO_MODS:
        launch(bases, pointers)
    else:
        launch.with_captured(bases, pointers, mods.captured)


def run_parts(
    launch: Launch,
    cut: Cut,
    items: Tensor,
    anchored: bool,
    tensors: Tensors,
    lse: Tensor,
    sink: Tensor | None,
    cu_q: Tensor,
    cu_k: Tensor,
) -> None:
    """A launch over tiles that are cut along their keys."""
    sinks = lse if sink is None else sink.float().contiguous()
    launch(
        (*tensors, *tensors[1:3]) if anchored else tensors,
        (lse, sinks, lse, items, cu_q, cu_k, cut.new_parts(), counters(lse.device)),
    )


def run_parts_at(
    launch: Launch,
    cut: Cut,
    items: Tensor,
    index: int,  # of the GPU
    bases: tuple[int, ...],
    lse: int,
    cu_q: int = 0,
    cu_k: int = 0,
) -> None:
    """The same through addresses, without a sink."""
    parts = cut.new_parts()
    arrived = address_of_counters(index)
    launch.at(bases, (lse, 0, 0, items.data_ptr(), cu_q, cu_k, parts.data_ptr(), arrived))


def without_keys(q: Tensor, v_dim: int, sink: Tensor | None) -> Result:
    out = q.new_zeros(*q.shape[:-1], v_dim)
    lse = q.new_full(q.shape[:-1], -torch.inf, dtype=torch.float32)
    return out, lse if sink is None else lse.copy_(sink.expand_as(lse))


def prepared(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Tensors that the copy engine can address, for a positive scale: the row maximum is taken of
    raw scores."""
    if scale <= 0:
        q = -q if scale < 0 else q * 0
    return addressable(q), addressable(k), addressable(v)
