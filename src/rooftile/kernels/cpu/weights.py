"""Weights in the tiles that the native products read (layouts: `native/common.h`)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rooftile.kernels.cpu import arguments, library
from rooftile.kernels.cpu.arena import allocate
from rooftile.kernels.cpu.arguments import DTYPES, GROUP, TILE

if TYPE_CHECKING:
    import numpy as np

QUANTISED = ("int8", "int8_blocks", "int4")
# Blocks of a GGUF file that a format takes over as they are, and their number in `native/blocks.cpp`.
BLOCKS = {"int4": {"Q4_0": 0, "Q4_1": 1}, "int8_blocks": {"Q8_0": 2}}


def refusal(format: str, device: str, dtype: torch.dtype) -> str | None:
    """Why this machine cannot pack weights of `dtype` into `format`, or `None`."""
    if device != "cpu":
        return f"these weights are for the CPU, not for {device!r}"
    if format == "tiled" and dtype not in (torch.bfloat16, torch.float32):
        return f"tiled weights are bfloat16 or float32, not {dtype}"
    if dtype not in DTYPES:
        return f"it packs weights of {', '.join(map(str, DTYPES))}, not of {dtype}"
    return library.refusal()


def layout(
    format: str, rows: int, columns: int, dtype: torch.dtype
) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shape and dtype of a packed weight's tensors; dtype: of the values, where they are kept."""
    tiles, groups = -(-rows // TILE), -(-columns // GROUP)
    if format == "tiled" and dtype == torch.bfloat16:
        return {"weight": ((tiles, groups * GROUP // 2, TILE, 2), dtype)}
    if format == "tiled":
        return {"weight": ((tiles, groups * GROUP, TILE), torch.float32)}
    if format == "int4":
        return {
            "weight": ((tiles, groups, 4, TILE, 4), torch.uint8),
            "scale": ((tiles, groups, 2, TILE), torch.float16),
        }
    data = ((tiles, groups * GROUP // 4, TILE, 4), torch.uint8)
    if format == "int8_blocks":
        return {"weight": data, "scale": ((tiles, groups, TILE), torch.float16)}
    return {"weight": data, "scale": ((tiles, TILE), torch.float32)}


def empty(format: str, rows: int, columns: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """The tensors of a packed weight, to be filled by `put_rows` or `put_blocks`."""
    described = layout(format, rows, columns, dtype)
    tensors = {name: allocate(shape, kind) for name, (shape, kind) in described.items()}
    if rows % TILE:  # the last tile's other rows are computed, and must not be noise
        for tensor in tensors.values():
            tensor[-1].zero_()
    return tensors


def put_rows(
    format: str,
    tensors: dict[str, Tensor],
    shape: tuple[int, int],
    values: Tensor,  # [rows, columns]
    first_row: int = 0,
) -> None:
    """Quantise or copy `values` into the rows of a packed weight of `shape` from first_row on."""
    values = values.detach()
    if values.stride(1) != 1:
        values = values.contiguous()
    weight = arguments.weight(format, list(tensors.values()), *shape)
    library.native().rooftile_pack(
        *(values.data_ptr(), DTYPES[values.dtype], values.stride(0), ctypes.byref(weight)),
        *(first_row, values.shape[0], torch.get_num_threads()),
    )


def put_blocks(
    format: str,
    tensors: dict[str, Tensor],
    shape: tuple[int, int],
    kind: str,
    blocks: np.ndarray,  # [rows, bytes of a row] uint8
    order: np.ndarray | None,  # [rows] int64
    first_row: int = 0,
) -> None:
    """Take a GGUF's blocks over; stored row order[i] (or i) becomes row first_row + i."""
    weight = arguments.weight(format, list(tensors.values()), *shape)
    rows = blocks.shape[0] if order is None else order.shape[0]
    library.native().rooftile_pack_blocks(
        *(BLOCKS[format][kind], blocks.ctypes.data, blocks.strides[0]),
        *(None if order is None else order.ctypes.data, ctypes.byref(weight)),
        *(first_row, rows, torch.get_num_threads()),
    )


def embed(
    format: str, tensors: Sequence[Tensor], shape: tuple[int, int], ids: Tensor
) -> Tensor:  # [tokens] int64 -> [tokens, columns] float32
    """Rows of a packed weight."""
    weight = arguments.weight(format, list(tensors), *shape)
    ids = ids.contiguous()
    out = torch.empty(ids.shape[0], shape[1])
    library.native().rooftile_embed(
        ctypes.byref(weight), ids.data_ptr(), ids.shape[0], out.data_ptr()
    )
    return out


def unpack(format: str, tensors: Sequence[Tensor], rows: int, columns: int) -> Tensor:
    """[rows, columns]: as stored for "tiled", float32 for quantised weights. Needs no library."""
    data = tensors[0]
    tiles = data.shape[0]
    if format == "tiled":
        values = data if data.dim() == 3 else data.transpose(2, 3).flatten(1, 2)
        return values.transpose(1, 2).reshape(tiles * TILE, -1)[:rows, :columns].contiguous()
    scale = tensors[1].float()
    if format == "int4":
        codes = torch.stack((data & 15, data >> 4), 4)  # [tiles, groups, step, lane, half, byte]
        codes = codes.permute(0, 3, 1, 2, 4, 5).flatten(3)  # [tiles, lane, groups, 32]
        factor, minimum = (s.transpose(1, 2)[..., None] for s in scale.unbind(2))
        values = codes.float() * factor + minimum
    else:
        values = data.unflatten(1, (-1, GROUP // 4)).permute(0, 3, 1, 2, 4).flatten(3).float() - 128
        per_row = scale[..., None] if format == "int8" else scale.transpose(1, 2)
        values = values * per_row[..., None]
    return values.reshape(tiles * TILE, -1)[:rows, :columns].contiguous()
