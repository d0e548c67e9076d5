"""Matrices read straight into the layout that their kernel wants, a bounded part at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rooftile.kernels.cpu import weights as native
from rooftile.models.weights import WHOLE, BlockSource, WeightSource
from rooftile.ops.packed_weight import FORMATS, best_format, pack
from rooftile.types import PackedWeight

QUANTIZATIONS = ("none", "int8", "int4")
# Of a layer: with 4 bits in these, SmolLM2-135M's loss grows by 9%, with 8 bits by 2.9%
# (benchmarks/quantiser_quality.py). A GGUF that has 4 bits there was made by a quantiser that knew why.
SENSITIVE = ("q", "k", "v", "down")
# Rows read at once of matrices that may be cut anywhere: bounds the memory of a vocabulary's.
ROWS_AT_ONCE = 4096


@dataclass(frozen=True)
class Formats:
    """Formats of the layers' matrices, and of the embedding and head, which suffer more from 4 bits."""

    layers: str
    head: str


def choose_formats(quantization: str, device: torch.device, dtype: torch.dtype) -> Formats:
    """The formats of a model on this machine.

    Raises:
        ValueError: an unknown quantization, or one that this machine has no kernels for; says why.
    """
    if quantization not in QUANTIZATIONS:
        raise ValueError(
            f"quantization is {quantization!r}; choose one of {', '.join(QUANTIZATIONS)}"
        )
    if quantization == "none":
        best = best_format(device, dtype)
        return Formats(best, best)
    reason = FORMATS[quantization].refusal(device.type, dtype)
    if reason is not None:
        raise ValueError(f"quantization {quantization!r}: {reason}; or use quantization 'none'")
    return Formats(quantization, "int8_blocks")


def read_packed(
    source: WeightSource,
    parts: Sequence[tuple[str, slice]],
    in_features: int,
    format: str,
    dtype: torch.dtype,
    device: torch.device,
    columns: slice = WHOLE,
    rows: int | None = None,
) -> PackedWeight:
    """One matrix out of these rows (and columns) of several; `rows` more than theirs are zero.

    Blocks of a GGUF that the format can hold are taken over as they are. What is quantised here to 4
    bits gets 8 where the model would suffer most.
    """
    if format == "int4" and any(
        _is_sensitive(name) and not _has_blocks(source, name, share, columns, format)
        for name, share in parts
    ):
        format = "int8_blocks"
    sizes = [share.stop - share.start for _, share in parts]
    shape = (rows or sum(sizes), in_features)
    if format not in (*native.QUANTISED, "tiled"):
        return pack(_read_dense(source, parts, shape, dtype, device, columns), format)
    tensors = native.empty(format, *shape, dtype)
    first_row = 0
    for (name, share), size in zip(parts, sizes, strict=True):
        _put(source, name, share, columns, format, tensors, shape, first_row, dtype)
        first_row += size
    if first_row < shape[0]:
        zeros = torch.zeros(shape[0] - first_row, in_features, dtype=torch.float32)
        native.put_rows(format, tensors, shape, zeros, first_row)
    return PackedWeight(format, tensors, shape)


def _is_sensitive(name: str) -> bool:
    group, _, kind = name.rpartition(".")
    return kind in SENSITIVE and group.count(".") == 1  # layers.0.down, not an expert's


def _has_blocks(source: WeightSource, name: str, share: slice, columns: slice, format: str) -> bool:
    if columns != WHOLE or not isinstance(source, BlockSource):
        return False
    blocks = source.blocks(name, share)
    return blocks is not None and blocks.kind in native.BLOCKS.get(format, ())


def _put(
    source: WeightSource,
    name: str,
    share: slice,
    columns: slice,
    format: str,
    tensors: dict[str, Tensor],
    shape: tuple[int, int],
    first_row: int,
    dtype: torch.dtype,
) -> None:
    if columns == WHOLE and isinstance(source, BlockSource):
        blocks = source.blocks(name, share)
        if blocks is not None and blocks.kind in native.BLOCKS.get(format, ()):
            native.put_blocks(
                format, tensors, shape, blocks.kind, blocks.data, blocks.order, first_row
            )
            return
    # What is quantised here is quantised from all the bits that the file has.
    dtype = torch.float32 if format in native.QUANTISED else dtype
    # Rows of q and k may be reordered within a head while they are read, so only others are cut.
    step = ROWS_AT_ONCE if name in ("embedding", "head") else share.stop - share.start
    for start in range(share.start, share.stop, max(1, step)):
        end = min(start + step, share.stop)
        values = torch.empty(end - start, shape[1], dtype=dtype)
        source.read(name, values, slice(start, end), columns)
        native.put_rows(format, tensors, shape, values, first_row + start - share.start)


def _read_dense(
    source: WeightSource,
    parts: Sequence[tuple[str, slice]],
    shape: tuple[int, int],
    dtype: torch.dtype,
    device: torch.device,
    columns: slice,
) -> Tensor:
    weight = torch.empty(shape, dtype=dtype, device=device)
    first_row = 0
    for name, share in parts:
        end = first_row + share.stop - share.start
        if end > first_row:
            source.read(name, weight[first_row:end], share, columns)
        first_row = end
    weight[first_row:] = 0
    return weight
