"""Runs steps on a CPU: applies the deltas, one mixed forward pass, one call of sampling."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

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
        self._last_token = torch.zeros(max_rows, dtype=torch.int64, device=device)
        self._page_tables = [
            torch.zeros(max_rows, max_pages_per_row, dtype=torch.int32, device=device)
            for _ in storage.groups
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
            pages = torch.tensor(update.pages, dtype=torch.int32, device=self._device)
            end = update.start + len(update.pages)
            self._page_tables[update.group][update.row, update.start : end] = pages
        self._storage.copy_pages(step.copies)
        hidden, cu_seqlens_q = self._forward(step.entries)
        prompt_logprobs = [self._score(hidden, cu_seqlens_q, slot) for slot in step.scores]
        if not step.samples:
            return StepOutput([], [], prompt_logprobs=prompt_logprobs)
        last = cu_seqlens_q[1:].to(torch.int64) - 1
        entries = torch.tensor([sample.entry for sample in step.samples], device=self._device)
        logits = self._decoder.logits(hidden.index_select(0, last[entries]))
        tokens, finish = self._sampler.sample(logits, step.samples)
        rows = torch.tensor([sample.row for sample in step.samples], device=self._device)
        self._last_token[rows] = tokens
        return replace(finish(), prompt_logprobs=prompt_logprobs)

    def _score(self, hidden: Tensor, cu_seqlens_q: Tensor, slot: ScoreSlot) -> list[TokenLogprobs]:
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

    def _forward(self, entries: list[StepEntry]) -> tuple[Tensor, Tensor]:
        """Hidden states [tokens, hidden] of the step's tokens, and cu_seqlens_q [batch + 1]."""
        device = self._device
        rows = torch.tensor([entry.row for entry in entries], device=device)
        q_lens = torch.tensor([len(entry.token_ids) for entry in entries], device=device)
        first = torch.tensor([entry.first for entry in entries], device=device)
        write_from = torch.tensor([entry.write_from for entry in entries], device=device)
        token_ids = torch.tensor([t for entry in entries for t in entry.token_ids], device=device)

        cu_seqlens_q = torch.zeros(len(entries) + 1, dtype=torch.int32, device=device)
        torch.cumsum(q_lens, 0, out=cu_seqlens_q[1:])
        # From the host, which knows it: torch's repeat_interleave wakes its threads for nothing.
        of_token = torch.tensor(
            [i for i, entry in enumerate(entries) for _ in entry.token_ids], device=device
        )
        offset = torch.arange(len(token_ids), device=device) - cu_seqlens_q[of_token]
        positions = first[of_token] + offset
        token_ids = torch.where(token_ids < 0, self._last_token[rows[of_token]], token_ids)

        lengths = None
        if self._decoder.needs_lengths:
            prompts = torch.tensor([entry.prompt_len for entry in entries], device=device)
            lengths = torch.maximum(positions + 1, prompts[of_token])

        kv_lens = (first + q_lens).to(torch.int32)
        page = positions // self._page_size
        in_page = positions % self._page_size
        shared = positions < write_from[of_token]  # its KV is there, in a page of others too
        by_group = []
        max_kv_len = max(entry.first + len(entry.token_ids) for entry in entries)
        max_pages = -(-max_kv_len // self._page_size)
        for table in self._page_tables:
            batch = PagedBatch(
                cu_seqlens_q,
                kv_lens,
                table[rows, :max_pages],
                max_q_len=max(len(entry.token_ids) for entry in entries),
                max_kv_len=max_kv_len,
            )
            slots = table[rows[of_token], page].to(torch.int64) * self._page_size + in_page
            by_group.append((batch, slots.masked_fill(shared, -1)))
        kv: list[LayerKV | None] = [None] * len(self._decoder.kv_specs)
        for group, (batch, slots) in zip(self._storage.groups, by_group, strict=True):
            for layer in group.layers:
                kv[layer] = LayerKV(*self._storage.layer(layer), slots, batch, lengths)
        hidden = self._decoder.forward(token_ids, positions, [layer for layer in kv if layer])
        return hidden, cu_seqlens_q
