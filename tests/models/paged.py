"""Runs a decoder over pages made by hand: scattered, and poisoned where nothing was written."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rooftile.layers.attention import LayerKV
from rooftile.models.decoder import Decoder
from rooftile.types import PagedBatch


class PagedRunner:
    """Sequences 0, 1, … over one pool of pages; `run` computes logits of every token given."""

    def __init__(
        self, decoder: Decoder, page_size: int = 4, pages_per_sequence: int = 16, sequences: int = 2
    ) -> None:
        self.decoder = decoder
        self.page_size = page_size
        num_pages = pages_per_sequence * sequences + 1
        order = torch.randperm(num_pages, generator=torch.Generator().manual_seed(7))
        self.tables = order[:-1].view(sequences, -1).to(torch.int32)
        self.lengths = [0] * sequences
        self.pages: list[tuple[Tensor, Tensor]] = []
        for spec in decoder.kv_specs:
            k, v = (
                torch.full((num_pages, spec.heads, page_size, dim), torch.nan, dtype=spec.dtype)
                for dim in (spec.k_dim, spec.v_dim)
            )
            self.pages.append((k, v))

    def run(self, *chunks: tuple[int, Sequence[int]]) -> list[Tensor]:
        """One step over (sequence, its next tokens) pairs -> logits [tokens, vocab] of each."""
        ids, positions, slots, kv_lens, tables = [], [], [], [], []
        for sequence, tokens in chunks:
            start = self.lengths[sequence]
            self.lengths[sequence] += len(tokens)
            at = torch.arange(start, self.lengths[sequence])
            ids.append(torch.tensor(tokens, dtype=torch.int64))
            positions.append(at)
            page = self.tables[sequence].long()[at // self.page_size]
            slots.append(page * self.page_size + at % self.page_size)
            kv_lens.append(self.lengths[sequence])
            tables.append(self.tables[sequence])
        sizes = [len(tokens) for _, tokens in chunks]
        batch = PagedBatch(
            cu_seqlens_q=torch.tensor([0, *sizes]).cumsum(0).to(torch.int32),
            kv_lens=torch.tensor(kv_lens, dtype=torch.int32),
            page_table=torch.stack(tables),
            max_q_len=max(sizes),
            max_kv_len=max(kv_lens),
        )
        kv = [LayerKV(k, v, torch.cat(slots), batch) for k, v in self.pages]
        with torch.inference_mode():
            hidden = self.decoder.forward(torch.cat(ids), torch.cat(positions), kv)
            return list(self.decoder.logits(hidden).split(sizes))

    def share_prefix(self, source: int, target: int, tokens: int) -> None:
        """Let `target` begin with the full pages that hold the first `tokens` of `source`."""
        assert tokens % self.page_size == 0
        self.tables[target, : tokens // self.page_size] = self.tables[
            source, : tokens // self.page_size
        ]
        self.lengths[target] = tokens
