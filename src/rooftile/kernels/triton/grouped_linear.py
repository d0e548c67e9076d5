"""Linear layers of several groups in portable Triton, in one launch that does not wait for the host.

How many rows a group has is known to the device only. So as many programs are launched as any sizes
could need, and each finds its group by itself: a CUDA graph stays valid as sizes change. Runs in
Triton's interpreter on a CPU (TRITON_INTERPRET=1 before the import; float16 and float32).
"""
# mypy: disable-error-code="no-untyped-def"

import functools
import sys
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from rooftile.kernels import Kernel
from rooftile.kernels.triton.interpreter import INTERPRETED

BLOCK_K = 64
SECTION = 8  # tiles of rows that go through all features before the next do
WIDE_STAGES = 3


@triton.jit(do_not_specialize=["groups", "most_tiles"])
def grouped_linear_kernel(
    x,
    weight,
    group_sizes,
    out,
    groups,
    out_features,
    in_features,
    x_stride,
    x_column_stride,
    weight_group_stride,
    weight_stride,
    weight_column_stride,
    out_stride,
    most_tiles,
    padded_groups: tl.constexpr,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
    block_k: tl.constexpr,
    section: tl.constexpr,
    precision: tl.constexpr,
):
    """Program: a tile of some group's rows, and block_n output features.

    Those that run at a time share few rows and few features, so that L2 serves both: a section of
    tiles goes through all features before the next begins.
    """
    columns_of_tiles = tl.cdiv(out_features, block_n)
    place = tl.program_id(0)
    first = place // (section * columns_of_tiles) * section
    place -= first * columns_of_tiles
    width = tl.minimum(most_tiles - first, section)
    tile = first + place % width
    column0 = place // width * block_n
    g = tl.arange(0, padded_groups)
    sizes = tl.load(group_sizes + g, mask=g < groups, other=0).to(tl.int32)
    tiles = (sizes + (block_m - 1)) // block_m
    group = tl.sum((tl.cumsum(tiles, 0) <= tile).to(tl.int32), 0)
    if group < groups:
        before = g < group
        start = tl.sum(tl.where(before, sizes, 0), 0)
        end = start + tl.sum(tl.where(g == group, sizes, 0), 0)
        row0 = start + (tile - tl.sum(tl.where(before, tiles, 0), 0)) * block_m
        rows = row0 + tl.arange(0, block_m)
        columns = column0 + tl.arange(0, block_n)
        step = tl.arange(0, block_k)
        row_exists = (rows < end)[:, None]
        column_exists = (columns < out_features)[None, :]
        x_at = x + rows[:, None].to(tl.int64) * x_stride
        weight += group.to(tl.int64) * weight_group_stride
        weight_at = weight + columns[None, :].to(tl.int64) * weight_stride
        acc = tl.zeros([block_m, block_n], tl.float32)
        for k0 in tl.range(0, in_features, block_k):
            k = k0 + step
            a = tl.load(
                x_at + k[None, :] * x_column_stride,
                mask=row_exists & (k < in_features)[None, :],
                other=0.0,
            )
            b = tl.load(
                weight_at + k[:, None] * weight_column_stride,
                mask=column_exists & (k < in_features)[:, None],
                other=0.0,
            )
            acc = tl.dot(a, b, acc, input_precision=precision)
        out_at = out + rows[:, None].to(tl.int64) * out_stride + columns[None, :]
        tl.store(out_at, acc.to(out.dtype.element_ty), mask=row_exists & column_exists)


def tile_shape(
    rows: int, groups: int, element_bytes: int, shared_bytes: int
) -> tuple[int, int, int, int]:
    """block_m, block_n, num_warps and num_stages.

    On an H200 128 x 256 is up to 12% faster than 128 x 128 from 64 rows a group on, and 16% faster
    than 64 x 128 at 64 rows, whose groups mostly take two tiles (docs/performance.md, mixtures).
    """
    # Near the rows that a group has when all have the same, which an average group fills.
    block_m = min(max(16, triton.next_power_of_2(-(-rows // groups))), 128)
    if block_m >= 64:
        if WIDE_STAGES * (128 + 256) * BLOCK_K * element_bytes <= shared_bytes:
            return 128, 256, 8, WIDE_STAGES
        return block_m, 128, 8 if block_m == 128 else 4, 3
    return block_m, 128 if block_m > 16 else 64, 4, 3


@functools.cache
def shared_memory(device: torch.device) -> int:
    """Bytes that a program may have; no bound in the interpreter."""
    if device.type == "cpu":
        return sys.maxsize
    index = torch.cuda.current_device() if device.index is None else device.index
    properties: dict[str, int] = triton.runtime.driver.active.utils.get_device_properties(index)
    return properties["max_shared_mem"]


def grouped_linear(x: Tensor, weight: Tensor, group_sizes: Tensor) -> Tensor:
    rows, in_features = x.shape
    groups, out_features, _ = weight.shape
    out = x.new_empty((rows, out_features))
    if not out.numel():
        return out
    # Along a row the kernel counts in 32 bits.
    x, weight = (y if in_features * y.stride(-1) < 2**31 else y.contiguous() for y in (x, weight))
    block_m, block_n, num_warps, num_stages = tile_shape(
        rows, groups, x.element_size(), shared_memory(x.device)
    )
    # Every group may end in a tile that is not full; no more groups than rows have any.
    most_tiles = rows // block_m + min(groups, rows)
    grouped_linear_kernel[(most_tiles * triton.cdiv(out_features, block_n),)](
        *(x, weight, group_sizes, out, groups, out_features, in_features),
        *(*x.stride(), *weight.stride(), out.stride(0), most_tiles),
        padded_groups=triton.next_power_of_2(groups),
        block_m=block_m,
        block_n=block_n,
        block_k=BLOCK_K,
        section=SECTION,
        precision="ieee" if x.dtype == torch.float32 else "tf32",
        num_warps=num_warps,
        num_stages=num_stages,
    )
    return out


def supports(call: Any) -> str | None:
    if INTERPRETED and call.device == "cpu":
        if call.dtype not in (torch.float16, torch.float32):
            return f"Triton's interpreter takes float16 and float32, not {call.dtype}"
        return None
    if call.device != "cuda":
        return f"it needs a GPU, not a {call.device}"
    if call.dtype == torch.float64:
        return "it sums in float32"
    return None


def efficiency(call: Any) -> float:
    """On a GPU above torch's loop over groups, which waits for the device."""
    return 0.35 if call.device == "cuda" else 0.25


KERNELS = {"grouped_linear": Kernel(grouped_linear, supports, efficiency)}
