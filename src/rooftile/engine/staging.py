"""A step's deltas as one vector of 32-bit words, and its way to the device in one copy."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np
import torch

from rooftile.engine.step import PageUpdate, StepEntry
from rooftile.ops.step import ENTRY, HEADER_WORDS, SAMPLE, UPDATE

BUFFERS = 3  # steps in flight, and the one that is being written
MOST_PAGE_WORDS = 1 << 22  # of changes of page tables in one copy; more go in several


class Staging:
    """Pinned buffers that take turns, and the one on the device that the kernels read.

    On a CPU there is one buffer, and nothing to copy.
    """

    def __init__(
        self,
        *,
        max_tokens: int,
        max_rows: int,
        max_pages: int,
        groups: int,
        device: torch.device,
    ) -> None:
        changes = max_rows * groups
        # Whatever comes: the longest update of one row fits, and usually all of a step.
        self._page_words = max(max_pages, min(changes * max_pages, MOST_PAGE_WORDS))
        self._updates = changes
        words = HEADER_WORDS + max_rows * (len(ENTRY) + len(SAMPLE)) + max_tokens
        words += changes * len(UPDATE) + self._page_words
        on_gpu = device.type == "cuda"
        self.device_words = torch.zeros(words, dtype=torch.int32, device=device)
        self._host = [
            torch.zeros(words, dtype=torch.int32, pin_memory=True)
            if on_gpu
            else self.device_words  # there is one memory
            for _ in range(BUFFERS if on_gpu else 1)
        ]
        self._copied = [torch.cuda.Event() if on_gpu else None for _ in self._host]
        self._turn = 0

    def parts(self, updates: Sequence[PageUpdate]) -> list[list[PageUpdate]]:
        """Changes of page tables in parts that fit a copy; usually one."""
        parts: list[list[PageUpdate]] = [[]]
        words = 0
        for update in updates:
            if words + len(update.pages) > self._page_words or len(parts[-1]) == self._updates:
                parts.append([])
                words = 0
            parts[-1].append(update)
            words += len(update.pages)
        return parts

    def send(
        self,
        entries: Sequence[StepEntry],
        updates: Sequence[PageUpdate],
        samples: np.ndarray,  # [samples, len(SAMPLE)] int32
    ) -> None:
        """Write a step into the next buffer and start its copy; waits only for a copy of its own
        that has not begun, which is three steps old.
        """
        event, buffer = self._copied[self._turn], self._host[self._turn]
        if event is not None:
            event.synchronize()
        used = _write(buffer.numpy(), entries, updates, samples)
        if event is not None:
            self.device_words[:used].copy_(buffer[:used], non_blocking=True)
            event.record()
        self._turn = (self._turn + 1) % len(self._host)


def _write(
    words: np.ndarray,
    entries: Sequence[StepEntry],
    updates: Sequence[PageUpdate],
    samples: np.ndarray,
) -> int:
    lengths = [len(entry.token_ids) for entry in entries]
    starts = starts_of(lengths)
    at = HEADER_WORDS
    entries_at = at
    if entries:
        table = words[at : at + len(entries) * len(ENTRY)].reshape(len(entries), len(ENTRY))
        table[:, 0] = [entry.row for entry in entries]
        table[:, 1] = [entry.first for entry in entries]
        table[:, 2] = starts
        table[:, 3] = lengths
        table[:, 4] = [entry.write_from for entry in entries]
        at += table.size
    tokens_at, tokens = at, sum(lengths)
    words[at : at + tokens] = list(chain.from_iterable(entry.token_ids for entry in entries))
    at += tokens
    samples_at = at
    words[at : at + samples.size] = samples.reshape(-1)
    at += samples.size
    updates_at = at
    pages_at = at + len(updates) * len(UPDATE)
    if updates:
        counts = [len(update.pages) for update in updates]
        table = words[at:pages_at].reshape(len(updates), len(UPDATE))
        table[:, 0] = [update.group for update in updates]
        table[:, 1] = [update.row for update in updates]
        table[:, 2] = [update.start for update in updates]
        table[:, 3] = counts
        table[:, 4] = np.asarray(starts_of(counts)) + pages_at
        at = pages_at + sum(counts)
        words[pages_at:at] = list(chain.from_iterable(update.pages for update in updates))
    words[:8] = (
        *(len(entries), tokens, len(updates), len(samples)),
        *(entries_at, tokens_at, updates_at, samples_at),
    )
    return at


def starts_of(lengths: Sequence[int]) -> list[int]:
    """Where each of several runs begins, one after the other."""
    starts, at = [], 0
    for length in lengths:
        starts.append(at)
        at += length
    return starts
