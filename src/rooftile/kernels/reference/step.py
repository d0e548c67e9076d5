"""The tensors of an engine step from its packed deltas, in plain PyTorch, request by request."""

from __future__ import annotations

import torch
from torch import Tensor

from rooftile.kernels import Kernel, anything

ENTRY_WORDS, UPDATE_WORDS, SAMPLE_WORDS = 5, 5, 10


def prepare_step(
    packed: Tensor,
    row_tables: Tensor,
    last_token: Tensor,
    token_ids: Tensor,
    positions: Tensor,
    slots: Tensor,
    cu_seqlens_q: Tensor,
    kv_lens: Tensor,
    page_tables: Tensor,
    sample_tokens: Tensor,
    sample_rows: Tensor,
    positions_drawn: Tensor,
    sample_index: Tensor,
    seeds: Tensor,
    top_k: Tensor,
    temperature: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    page_size: int,
) -> None:
    device = packed.device
    words = packed.cpu()
    entries, tokens, updates, samples, entries_at, tokens_at, updates_at, samples_at = words[
        :8
    ].tolist()
    for group, row, start, count, at in _records(words, updates_at, updates, UPDATE_WORDS):
        row_tables[group, row, start : start + count] = packed[at : at + count]

    token_ids.zero_()
    positions.zero_()
    slots.fill_(-1)
    cu_seqlens_q.fill_(tokens)
    cu_seqlens_q[0] = 0
    kv_lens.zero_()
    given = packed[tokens_at : tokens_at + tokens].to(torch.int64)
    for index, entry in enumerate(_records(words, entries_at, entries, ENTRY_WORDS)):
        row, first, start, q_len, write_from = entry
        mine = slice(start, start + q_len)
        token_ids[mine] = torch.where(given[mine] < 0, last_token[row], given[mine])
        place = torch.arange(first, first + q_len, device=device)
        positions[mine] = place
        pages = -(-(first + q_len) // page_size)
        page_tables[:, index, :pages] = row_tables[:, row, :pages]
        pages_of = row_tables[:, row, place // page_size].to(torch.int64)
        slot = pages_of * page_size + place % page_size
        slots[:, mine] = slot.masked_fill(place < write_from, -1)
        cu_seqlens_q[index + 1] = start + q_len
        kv_lens[index] = first + q_len

    for tensor in (sample_tokens, positions_drawn, sample_index, seeds, top_k, temperature, min_p):
        tensor.zero_()
    sample_rows.fill_(last_token.shape[0] - 1)
    top_p.fill_(1)
    table = packed[samples_at : samples_at + samples * SAMPLE_WORDS].view(samples, SAMPLE_WORDS)
    for column, ints in enumerate((sample_tokens, sample_rows, positions_drawn, sample_index)):
        ints[:samples] = table[:, column]
    top_k[:samples] = table[:, 5]
    for column, floats in ((4, temperature), (6, top_p), (7, min_p)):
        floats[:samples] = table[:, column].contiguous().view(torch.float32)
    low, high = table[:, 8].to(torch.int64), table[:, 9].to(torch.int64)
    seeds[:samples] = (high << 32) | (low & 0xFFFFFFFF)


def _records(words: Tensor, at: int, count: int, size: int) -> list[list[int]]:
    records: list[list[int]] = words[at : at + count * size].view(count, size).tolist()
    return records


KERNELS = {"prepare_step": Kernel(prepare_step, anything, efficiency=0.01)}
