"""Runs a decoder over pages made by hand: scattered, and poisoned where nothing was written.

Every KV group has a page table of its own, as in the engine.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rooftile.kvcache.spec import group_layers
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
        generator = torch.Generator().manual_seed(7)
        self.groups = group_layers(decoder.kv_specs)
        self.tables = [
            torch.randperm(num_pages, generator=generator)[:-1].view(sequences, -1).to(torch.int32)
            for _ in self.groups
        ]
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
        ids, positions, kv_lens = [], [], []
        for sequence, tokens in chunks:
            start = self.lengths[sequence]
            self.lengths[sequence] += len(tokens)
            at = torch.arange(start, self.lengths[sequence])
            ids.append(torch.tensor(tokens, dtype=torch.int64))
            positions.append(at)
            kv_lens.append(self.lengths[sequence])
        sizes = [len(tokens) for _, tokens in chunks]
        sequences = [sequence for sequence, _ in chunks]
        kv: dict[int, LayerKV] = {}
        for group, table in zip(self.groups, self.tables, strict=True):
            slots = [
                table[sequence].long()[at // self.page_size] * self.page_size + at % self.page_size
                for sequence, at in zip(sequences, positions, strict=True)
            ]
            batch = PagedBatch(
                cu_seqlens_q=torch.tensor([0, *sizes]).cumsum(0).to(torch.int32),
                kv_lens=torch.tensor(kv_lens, dtype=torch.int32),
                page_table=table[sequences],
                max_q_len=max(sizes),
                max_kv_len=max(kv_lens),
            )
            for layer in group.layers:
                kv[layer] = LayerKV(*self.pages[layer], torch.cat(slots), batch)
        with torch.inference_mode():
            layers = [kv[layer] for layer in sorted(kv)]
            hidden = self.decoder.forward(torch.cat(ids), torch.cat(positions), layers)
            return list(self.decoder.logits(hidden).split(sizes))

    def share_prefix(self, source: int, target: int, tokens: int) -> None:
        """Let `target` begin with the full pages that hold the first `tokens` of `source`."""
        assert tokens % self.page_size == 0
        for table in self.tables:
            table[target, : tokens // self.page_size] = table[source, : tokens // self.page_size]
        self.lengths[target] = tokens
