"""Runs steps on a CPU: applies the deltas, one mixed forward pass, one call of sampling."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from rooftile.engine.outputs import TokenLogprobs
from rooftile.engine.sampler import Sampler, logprob_tensors, read_logprobs
from rooftile.engine.step import ScoreSlot, StepEntry, StepInput, StepOutput
from rooftile.kvcache.storage import KVStorage
from rooftile.layers.attention import LayerKV
from rooftile.models.decoder import Decoder
from rooftile.models.native import NativeStep
from rooftile.types import PagedBatch

# Prompt tokens whose logits are computed at once: bounds the memory of prompt_logprobs.
SCORED_ROWS = 128


class Runner:
    """Owns what a sequence keeps on the device between steps, by stable row: its last token, its
    page-table row in each KV group, and its sampling state.
    """

    def __init__(
        self,
        decoder: Decoder | NativeStep,
        storage: KVStorage,
        *,
        page_size: int,
        max_rows: int,
        max_pages_per_row: int,
        device: torch.device,
    ) -> None:
        self._decoder = decoder
        self._storage = storage
        self._page_size = page_size
        self._device = device
        # In numpy, whose small operations cost a third of torch's: a step has many of them.
        self._last_token = np.zeros(max_rows, dtype=np.int64)
        self._page_tables = [
            np.zeros((max_rows, max_pages_per_row), dtype=np.int32) for _ in storage.groups
        ]
        self._sampler = Sampler(max_rows, decoder.config.vocab_size, device)

    def launch(self, step: StepInput) -> Callable[[], StepOutput]:
        """Start a step; the returned function waits for its tokens. On a CPU it has run by then."""
        with torch.inference_mode():
            output = self._run(step)
        return lambda: output

    def _run(self, step: StepInput) -> StepOutput:
        for row in step.freed:
            self._sampler.drop(row)
        for start in step.starts:
            self._sampler.start(start)
        for update in step.page_updates:
            end = update.start + len(update.pages)
            self._page_tables[update.group][update.row, update.start : end] = update.pages
        self._storage.copy_pages(step.copies)
        hidden, cu_seqlens_q = self._forward(step.entries)
        prompt_logprobs = [self._score(hidden, cu_seqlens_q, slot) for slot in step.scores]
        if not step.samples:
            return StepOutput([], [], prompt_logprobs=prompt_logprobs)
        ends = [int(cu_seqlens_q[sample.entry + 1]) for sample in step.samples]
        if ends != list(range(1, len(hidden) + 1)):
            hidden = hidden[torch.tensor(ends) - 1]
        tokens, finish = self._sampler.sample(self._decoder.logits(hidden), step.samples)
        self._last_token[[sample.row for sample in step.samples]] = tokens.numpy()
        return replace(finish(), prompt_logprobs=prompt_logprobs)

    def _score(
        self, hidden: Tensor, cu_seqlens_q: np.ndarray, slot: ScoreSlot
    ) -> list[TokenLogprobs]:
        """Log-probabilities of an entry's prompt tokens, a bounded number of rows at a time."""
        first = int(cu_seqlens_q[slot.entry]) + slot.start
        results: list[TokenLogprobs] = []
        for start in range(0, len(slot.targets), SCORED_ROWS):
            targets = slot.targets[start : start + SCORED_ROWS]
            at = first + start
            logits = self._decoder.logits(hidden[at : at + len(targets)])
            ids = torch.tensor(targets, device=self._device)
            tops = [slot.top] * len(targets)
            results += read_logprobs(targets, tops, *logprob_tensors(logits, ids, tops))
        return results

    def _forward(self, entries: list[StepEntry]) -> tuple[Tensor, np.ndarray]:
        """Hidden states [tokens, hidden] of the step's tokens, and cu_seqlens_q [batch + 1]."""
        rows = np.array([entry.row for entry in entries])
        first = np.array([entry.first for entry in entries])
        lengths = [len(entry.token_ids) for entry in entries]
        cu_seqlens_q = np.zeros(len(entries) + 1, dtype=np.int32)
        np.cumsum(lengths, out=cu_seqlens_q[1:])
        token_ids = np.array([t for entry in entries for t in entry.token_ids])
        positions, row_of, write_from = first, rows, np.array([e.write_from for e in entries])
        prompt_lens = np.array([entry.prompt_len for entry in entries])
        longest = max(lengths)
        if longest > 1:
            of_token = np.repeat(np.arange(len(entries)), lengths)
            positions = first[of_token] + np.arange(len(token_ids)) - cu_seqlens_q[of_token]
            row_of, write_from = rows[of_token], write_from[of_token]
            prompt_lens = prompt_lens[of_token]
        token_ids = np.where(token_ids < 0, self._last_token[row_of], token_ids)

        kv_lens = (first + lengths).astype(np.int32)
        page, in_page = positions // self._page_size, positions % self._page_size
        shared = positions < write_from  # its KV is there, in a page of others too
        max_kv_len = int(kv_lens.max())
        max_pages = -(-max_kv_len // self._page_size)
        decoder_lengths = None
        if self._decoder.needs_lengths:
            decoder_lengths = torch.from_numpy(np.maximum(positions + 1, prompt_lens))
        kv: list[LayerKV | None] = [None] * len(self._decoder.kv_specs)
        queries, keys = torch.from_numpy(cu_seqlens_q), torch.from_numpy(kv_lens)
        for table, group in zip(self._page_tables, self._storage.groups, strict=True):
            page_table = torch.from_numpy(table[rows, :max_pages])
            batch = PagedBatch(queries, keys, page_table, max_q_len=longest, max_kv_len=max_kv_len)
            slots = table[row_of, page].astype(np.int64) * self._page_size + in_page
            of_group = torch.from_numpy(np.where(shared, -1, slots))
            for layer in group.layers:
                kv[layer] = LayerKV(*self._storage.layer(layer), of_group, batch, decoder_lengths)
        hidden = self._decoder.forward(
            torch.from_numpy(token_ids),
            torch.from_numpy(positions),
            [layer for layer in kv if layer],
        )
        return hidden, cu_seqlens_q
