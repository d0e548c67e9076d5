"""Merging attention results over disjoint sets of keys: parts of a plan, and users' own."""
# mypy: disable-error-code="no-untyped-def,assignment"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda

from rooftile.kernels import Kernel
from rooftile.kernels.triton.interpreter import INTERPRETED
from rooftile.kernels.triton.pointwise import overlap
from rooftile.kernels.triton.split_kv import MERGE_WORDS
from rooftile.planning.split_kv import Layout
from rooftile.types import SplitSpec

MOST_MERGES = 4096  # programs


@triton.jit
def _merge_row(
    outs,  # [rows, dim]
    lses,  # [rows]
    first,  # row of the first part
    parts,
    stride,  # rows from part to part
    sink,  # its logit, -inf for none
    dim,
    part_block: tl.constexpr,
    dim_tile: tl.constexpr,
):
    """Of one row: the merged values [dim_tile] and lse. A block of parts is loaded at a time."""
    column = tl.arange(0, dim_tile)
    maximum = tl.maximum(sink, -1.0e30)
    total = tl.exp(sink - maximum)
    o = tl.zeros([dim_tile], tl.float32)
    for start in range(0, parts, part_block):
        part = start + tl.arange(0, part_block)
        present = part < parts
        row = first + part.to(tl.int64) * stride
        lse = tl.load(lses + row, mask=present, other=float("-inf")).to(tl.float32)
        mask = (present & (lse > float("-inf")))[:, None] & (column < dim)[None, :]
        values = tl.load(outs + row[:, None] * dim + column[None, :], mask=mask, other=0.0)
        new_maximum = tl.maximum(maximum, tl.max(lse, 0))
        weights = tl.exp(lse - new_maximum)
        alpha = tl.exp(maximum - new_maximum)
        total = total * alpha + tl.sum(weights, 0)
        o = o * alpha + tl.sum(values.to(tl.float32) * weights[:, None], 0)
        maximum = new_maximum
    o = o / tl.where(total != 0, total, 1.0)
    return o, tl.where(total != 0, maximum + tl.log(total), float("-inf"))


@triton.jit(do_not_specialize=["merges_at"])
def merge_parts_kernel(
    plan,
    merges_at,
    partial_out,  # [rows, dim]
    partial_lse,  # [rows]
    sink,
    out,  # [tokens, heads, dim]
    lse,  # [tokens, heads]
    group_size,
    num_heads,
    dim,
    has_sink: tl.constexpr,
    part_block: tl.constexpr,
    dim_tile: tl.constexpr,
):
    """Program (merge, row of a tile), merges beyond the grid in further turns."""
    row_in_tile = tl.program_id(1)
    column = tl.arange(0, dim_tile)
    for index in range(tl.program_id(0), tl.load(plan), tl.num_programs(0)):
        words = plan + merges_at + index * MERGE_WORDS
        row = tl.load(words + 2) + row_in_tile
        if row < tl.load(words + 3):
            token = tl.load(words + 7) + row // group_size
            head = tl.load(words + 1) * group_size + row % group_size
            first = (tl.load(words + 4) + row_in_tile).to(tl.int64)
            logit = float("-inf")
            if has_sink:
                logit = tl.load(sink + head)
            o, log_sum = _merge_row(
                partial_out, partial_lse, first, tl.load(words + 5),
                tl.load(words + 6).to(tl.int64), logit, dim, part_block, dim_tile,
            )  # fmt: skip
            at = token.to(tl.int64) * num_heads + head
            tl.store(out + at * dim + column, o.to(out.dtype.element_ty), mask=column < dim)
            tl.store(lse + at, log_sum)


def merge_parts(
    plan: Tensor,
    spec: SplitSpec,
    partial_out: Tensor,  # [partial_rows, v_dim] float32
    partial_lse: Tensor,  # [partial_rows] float32
    sink: Tensor | None,  # [num_q_heads] float32
    out: Tensor,  # [tokens, num_q_heads, v_dim]
    lse: Tensor,  # [tokens, num_q_heads]
) -> None:
    """The merges of a plan, in order, into the output."""
    layout = Layout(spec)
    if layout.merge_capacity == 0:
        return
    rows = min(spec.tile_rows[-1], spec.max_q_len * spec.group_size)
    dim = out.shape[-1]
    merge_parts_kernel[(min(layout.merge_capacity, 4 * spec.num_ctas), rows)](
        plan,
        layout.merges,
        partial_out,
        partial_lse,
        lse if sink is None else sink,
        out,
        lse,
        spec.group_size,
        out.shape[1],
        dim,
        has_sink=sink is not None,
        part_block=16 if rows <= 16 else 4,
        dim_tile=max(16, triton.next_power_of_2(dim)),
        num_warps=2,
    )


@triton.jit(do_not_specialize=["capacity"])
def merge_shared_kernel(
    plan,
    merges_at,
    capacity,  # strips of requests, at most
    partial_out,  # [rows, dim]
    partial_lse,  # [rows]
    sink,
    out,  # [tokens, heads, dim]
    lse,  # [tokens, heads]
    group_size,
    num_heads,
    dim: tl.constexpr,
    has_sink: tl.constexpr,
    row_stride: tl.constexpr,
    part_block: tl.constexpr,
    dim_tile: tl.constexpr,
    overlapped: tl.constexpr,
    planned: tl.constexpr,
):
    """Program (strip of a request, packed row), strips beyond the grid in further turns.

    A row of 128 columns is one warp's, whose registers hold all of its parts: the programs of a step fit
    beside each other on a few multiprocessors, so they wait there, with their words of the plan read,
    when the last part is written.

    planned: the kernel before this one let it start when the plan was there, so words of the plan are
    read before that kernel has ended.
    """
    if overlapped:
        cuda.gdc_launch_dependents()
        if not planned:
            cuda.gdc_wait()
    row = tl.program_id(1)
    column = tl.arange(0, dim_tile)
    for index in range(tl.program_id(0), capacity, tl.num_programs(0)):
        strips = tl.load(plan + 4)  # while words are loaded, which may not be a strip's
        words = plan + merges_at + index * MERGE_WORDS
        prefix = tl.load(words)
        kv_head = tl.load(words + 1)
        group_row = tl.load(words + 2)
        rows = tl.load(words + 3)
        first = tl.load(words + 4)
        parts = tl.load(words + 5)
        tile_rows = tl.load(words + 6)
        q_begin = tl.load(words + 7)
        if (parts > 0) & (index < strips) & (row < rows):
            head = kv_head * group_size + row % group_size
            below = group_row + row
            shared = plan + merges_at + (prefix + below // tile_rows) * MERGE_WORDS
            second = tl.load(shared + 4, mask=prefix >= 0, other=0) + below % tile_rows
            others = tl.load(shared + 5, mask=prefix >= 0, other=0)
            first += row
            second -= parts * row_stride  # as if they went on behind the row's own parts
            own = partial_out + first.to(tl.int64) * dim + column
            other = partial_out + second.to(tl.int64) * dim + column
            own_lse = partial_lse + first
            other_lse = partial_lse + second
            if overlapped and planned:
                cuda.gdc_wait()
            logit = float("-inf")
            if has_sink:
                logit = tl.load(sink + head)
            maximum = tl.maximum(logit, -1.0e30)
            total = tl.exp(logit - maximum)
            o = tl.zeros([dim_tile], tl.float32)
            for start in range(0, parts + others, part_block):
                logs = ()
                values = ()
                for j in tl.static_range(part_block):  # all loads before the first use
                    part = start + j
                    there = part < parts + others
                    at = tl.where(part < parts, own, other) + j * row_stride * dim
                    value = tl.load(at, mask=there & (column < dim), other=0.0)
                    values = values + (value,)  # noqa: RUF005
                for j in tl.static_range(part_block):
                    part = start + j
                    there = part < parts + others
                    at = tl.where(part < parts, own_lse, other_lse) + j * row_stride
                    log = tl.load(at, mask=there, other=float("-inf"))
                    logs = logs + (log,)  # noqa: RUF005
                own += part_block * row_stride * dim
                other += part_block * row_stride * dim
                own_lse += part_block * row_stride
                other_lse += part_block * row_stride
                highest = maximum
                for j in tl.static_range(part_block):
                    highest = tl.maximum(highest, logs[j])
                shrink = tl.exp(maximum - highest)
                total = total * shrink
                o = o * shrink
                for j in tl.static_range(part_block):
                    weight = tl.exp(logs[j] - highest)
                    total = total + weight
                    # A part of a row that sees nothing has no values.
                    o += tl.where(weight > 0, values[j] * weight, 0.0)
                maximum = highest
            o = o / tl.where(total != 0, total, 1.0)
            log_sum = tl.where(total != 0, maximum + tl.log(total), float("-inf"))
            token = (q_begin + row // group_size).to(tl.int64) * num_heads + head
            tl.store(out + token * dim + column, o.to(out.dtype.element_ty), mask=column < dim)
            tl.store(lse + token, log_sum)
    if overlapped and planned:
        cuda.gdc_wait()  # also where nothing was to be merged: later kernels count on it


def merge_shared(
    plan: Tensor,
    spec: SplitSpec,
    partial_out: Tensor,  # [partial_rows, v_dim] float32
    partial_lse: Tensor,  # [partial_rows] float32
    sink: Tensor | None,  # [num_q_heads] float32
    out: Tensor,  # [tokens, num_q_heads, v_dim]
    lse: Tensor,  # [tokens, num_q_heads]
    planned: bool = False,
) -> None:
    """Parts of requests and of the prefixes that they share, in order, into the output.

    planned: the kernel before lets this one start only when the kernel that made the plan has ended.
    """
    layout = Layout(spec)
    rows = spec.max_q_len * spec.group_size
    strips = min(spec.batch, spec.tokens) * spec.num_kv_heads
    if rows == 0 or strips == 0:
        return
    dim = out.shape[-1]
    dim_tile = max(16, triton.next_power_of_2(dim))
    merge_shared_kernel[(min(strips, MOST_MERGES), rows)](
        plan,
        layout.merges,
        strips,
        partial_out,
        partial_lse,
        lse if sink is None else sink,
        out,
        lse,
        spec.group_size,
        out.shape[1],
        dim=dim,
        has_sink=sink is not None,
        row_stride=spec.tile_rows[-1],
        part_block=8,
        dim_tile=dim_tile,
        num_warps=max(1, dim_tile // 128),  # four columns a lane
        maxnreg=80,  # so that all loads are there before the first use
        planned=planned,
        **overlap(out),
    )


@triton.jit(do_not_specialize=["parts", "rows"])
def merge_states_kernel(
    outs,  # [n, rows, dim]
    lses,  # [n, rows]
    out,  # [rows, dim]
    lse,  # [rows]
    parts,
    rows,
    dim,
    part_block: tl.constexpr,
    dim_tile: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, dim_tile)
    o, log_sum = _merge_row(
        outs, lses, row, parts, rows.to(tl.int64), float("-inf"), dim, part_block, dim_tile
    )
    tl.store(out + row * dim + column, o.to(out.dtype.element_ty), mask=column < dim)
    tl.store(lse + row, log_sum)


def merge_attention_states(
    outs: Tensor,  # [n, tokens, heads, v_dim]
    lses: Tensor,  # [n, tokens, heads]
) -> tuple[Tensor, Tensor]:
    out = outs.new_empty(outs.shape[1:])
    lse = lses.new_empty(lses.shape[1:], dtype=torch.float32)
    if lse.numel() == 0:
        return out, lse
    dim = outs.shape[-1]
    with torch.cuda.device(outs.device) if outs.is_cuda else torch.no_grad():
        merge_states_kernel[(lse.numel(),)](
            outs.contiguous(),
            lses.contiguous(),
            out,
            lse,
            outs.shape[0],
            lse.numel(),
            dim,
            part_block=max(1, min(16, triton.next_power_of_2(outs.shape[0]))),
            dim_tile=max(1, triton.next_power_of_2(dim)),
            num_warps=2,
        )
    return out, lse


def supports(call: Any) -> str | None:
    if not INTERPRETED and call.device != "cuda":
        return f"it needs a GPU, not a {call.device}"
    if call.dtype == torch.float64:
        return "it computes in float32"
    return None


KERNELS = {"merge_attention_states": Kernel(merge_attention_states, supports, efficiency=0.5)}
