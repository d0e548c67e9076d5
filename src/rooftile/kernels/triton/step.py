"""The tensors of an engine step from its packed deltas, in two small launches.

The launches depend on capacities alone and read how many of each there are from the packed step, so
a captured graph serves every step that fits.
"""
# mypy: disable-error-code="no-untyped-def"

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from rooftile.kernels import Kernel
from rooftile.kernels.triton.interpreter import INTERPRETED
from rooftile.kernels.triton.pointwise import where

UPDATERS = 4 if INTERPRETED else 64  # programs that share the changes of page tables
BLOCK = 256


@triton.jit
def update_tables_kernel(
    packed, row_tables, max_rows, max_pages, num_programs: tl.constexpr, block: tl.constexpr
):
    count = tl.load(packed + 2)
    begin = tl.load(packed + 6)
    for index in range(tl.program_id(0), count, num_programs):
        update = packed + begin + index * 5
        group, row = tl.load(update).to(tl.int64), tl.load(update + 1)
        start, length, at = tl.load(update + 2), tl.load(update + 3), tl.load(update + 4)
        target = row_tables + (group * max_rows + row) * max_pages + start
        for done in range(0, length, block):
            column = done + tl.arange(0, block)
            pages = tl.load(packed + at + column, mask=column < length)
            tl.store(target + column, pages, mask=column < length)


@triton.jit(do_not_specialize=["token_capacity", "request_capacity", "sample_capacity"])
def prepare_kernel(
    packed,
    row_tables,
    last_token,
    token_ids,
    positions,
    slots,
    cu_seqlens_q,
    kv_lens,
    page_tables,
    sample_tokens,
    sample_rows,
    positions_drawn,
    sample_index,
    seeds,
    top_k,
    temperature,
    top_p,
    min_p,
    slots_stride,
    tables_stride,
    max_rows,
    max_pages,
    token_capacity,
    request_capacity,
    sample_capacity,
    page_size,
    groups: tl.constexpr,
    block: tl.constexpr,
):
    """Programs: one a request, then one for the padding of tokens, then one for the samples."""
    index = tl.program_id(0)
    lane = tl.arange(0, block)
    entries = tl.load(packed)
    tokens = tl.load(packed + 1)
    if index < entries:
        entry = packed + tl.load(packed + 4) + index * 5
        row, first = tl.load(entry), tl.load(entry + 1)
        start, q_len, write_from = tl.load(entry + 2), tl.load(entry + 3), tl.load(entry + 4)
        given = packed + tl.load(packed + 5) + start
        last = tl.load(last_token + row)
        tl.store(cu_seqlens_q + index + 1, start + q_len)
        tl.store(kv_lens + index, first + q_len)
        for done in range(0, q_len, block):
            at = done + lane
            inside = at < q_len
            token = tl.load(given + at, mask=inside, other=0).to(tl.int64)
            tl.store(token_ids + start + at, tl.where(token < 0, last, token), mask=inside)
            position = (first + at).to(tl.int64)
            tl.store(positions + start + at, position, mask=inside)
            for group in tl.static_range(groups):
                table = row_tables + (group * max_rows + row).to(tl.int64) * max_pages
                page = tl.load(table + position // page_size, mask=inside, other=0).to(tl.int64)
                slot = page * page_size + position % page_size
                slot = tl.where(position < write_from, -1, slot)
                tl.store(slots + group * slots_stride + start + at, slot, mask=inside)
        pages = (first + q_len + page_size - 1) // page_size
        for group in tl.static_range(groups):
            source = row_tables + (group * max_rows + row).to(tl.int64) * max_pages
            target = page_tables + group * tables_stride + index.to(tl.int64) * max_pages
            for done in range(0, pages, block):
                at = done + lane
                page = tl.load(source + at, mask=at < pages)
                tl.store(target + at, page, mask=at < pages)
    elif index < request_capacity:
        tl.store(cu_seqlens_q + index + 1, tokens)
        tl.store(kv_lens + index, 0)
    elif index == request_capacity:
        tl.store(cu_seqlens_q, 0)
        for done in range(tokens, token_capacity, block):
            at = done + lane
            inside = at < token_capacity
            nothing = tl.zeros([block], tl.int64)
            tl.store(token_ids + at, nothing, mask=inside)
            tl.store(positions + at, nothing, mask=inside)
            for group in tl.static_range(groups):
                tl.store(slots + group * slots_stride + at, nothing - 1, mask=inside)
    else:
        samples = tl.load(packed + 3)
        records = packed + tl.load(packed + 7)
        for done in range(0, sample_capacity, block):
            at = done + lane
            inside = at < sample_capacity
            used = at < samples
            record = records + at * 10
            tl.store(
                sample_tokens + at, tl.load(record, mask=used, other=0).to(tl.int64), mask=inside
            )
            sampled = tl.load(record + 1, mask=used, other=max_rows).to(tl.int64)
            tl.store(sample_rows + at, sampled, mask=inside)
            drawn = tl.load(record + 2, mask=used, other=0).to(tl.int64)
            tl.store(positions_drawn + at, drawn, mask=inside)
            number = tl.load(record + 3, mask=used, other=0).to(tl.int64)
            tl.store(sample_index + at, number, mask=inside)
            heat = tl.load(record + 4, mask=used, other=0).to(tl.float32, bitcast=True)
            tl.store(temperature + at, heat, mask=inside)
            k = tl.load(record + 5, mask=used, other=0).to(tl.int64)
            tl.store(top_k + at, k, mask=inside)
            one = 0x3F800000  # the bits of 1.0
            p = tl.load(record + 6, mask=used, other=one).to(tl.float32, bitcast=True)
            tl.store(top_p + at, p, mask=inside)
            least = tl.load(record + 7, mask=used, other=0).to(tl.float32, bitcast=True)
            tl.store(min_p + at, least, mask=inside)
            low = tl.load(record + 8, mask=used, other=0).to(tl.int64) & 0xFFFFFFFF
            high = tl.load(record + 9, mask=used, other=0).to(tl.int64)
            tl.store(seeds + at, (high << 32) | low, mask=inside)


def prepare_step(
    packed: Tensor,
    row_tables: Tensor,  # [groups, max_rows, max_pages]
    last_token: Tensor,
    token_ids: Tensor,
    positions: Tensor,
    slots: Tensor,
    cu_seqlens_q: Tensor,
    kv_lens: Tensor,
    page_tables: Tensor,
    *rest: Any,  # the tensors of samples, page_size
) -> None:
    *samples, page_size = rest
    groups, max_rows, max_pages = row_tables.shape
    with where(packed):
        update_tables_kernel[(UPDATERS,)](
            packed, row_tables, max_rows, max_pages, num_programs=UPDATERS, block=BLOCK, num_warps=2
        )
        prepare_kernel[(kv_lens.shape[0] + 2,)](
            *(packed, row_tables, last_token, token_ids, positions, slots, cu_seqlens_q, kv_lens),
            *(page_tables, *samples, slots.stride(0), page_tables.stride(0), max_rows, max_pages),
            *(token_ids.shape[0], kv_lens.shape[0], samples[0].shape[0], page_size),
            groups=groups,
            block=BLOCK,
        )


def supports(call: Any) -> str | None:
    if call.device != "cuda" and not INTERPRETED:
        return f"it needs a GPU, not a {call.device}"
    return None


KERNELS = {"prepare_step": Kernel(prepare_step, supports, efficiency=0.8)}
