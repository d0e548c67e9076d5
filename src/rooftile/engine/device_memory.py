"""Memory of a GPU: what a model and its steps take, and what that leaves for KV pages."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from rooftile.engine.config import EngineConfig

# Beside two steps' intermediates (those of the graphs, and of steps that run without): libraries'
# workspaces, and the graphs themselves.
RESERVED = 1 << 29
# For each row and token of the vocabulary, where all requests ask for everything: logits and their copy
# for processors (8), counts and masks of penalties (5) and the same side by side (5), logits that
# log-probabilities are asked of and two intermediates of their sum (12).
SAMPLING_BYTES = 30


def check_weights(what: str, nbytes: int) -> None:
    """Refuse weights that this GPU cannot hold before any is read.

    Raises:
        ValueError: says how many bytes they need, how many are free, and the remedy.
    """
    free, total = torch.cuda.mem_get_info()
    if nbytes > free:
        raise ValueError(
            f"{what} takes {_gib(nbytes)} of weights, and of the GPU's {_gib(total)} {_gib(free)} are "
            f"free; end what else runs there, take a smaller dtype or model, or device='cpu'"
        )


def measured(device: torch.device, run: Callable[[], None]) -> int:
    """Bytes that `run` had allocated at most beside what was there; gives unused memory back."""
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    run()
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device) - before
    torch.cuda.empty_cache()
    return peak


def kv_bytes(device: torch.device, share: float, peak: int, sampled: int) -> int:
    """Bytes for KV pages: `share` of what is free, less where others need more.

    peak: bytes that the largest step takes.
    sampled: numbers that a step's logits may have, rows by vocabulary.
    """
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(device)
    needed = 2 * peak + SAMPLING_BYTES * sampled + RESERVED
    return max(0, min(int(free * share), free - needed))


@contextmanager
def out_of_memory(config: EngineConfig, what: str) -> Iterator[None]:
    """Turns the allocator's error into a ValueError that says what to lower."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        free, total = torch.cuda.mem_get_info()
        pages = "" if config.num_pages is None else f", num_pages ({config.num_pages})"
        raise ValueError(
            f"{what} did not fit into the GPU's memory, of which {_gib(free)} of {_gib(total)} are "
            f"free; lower max_num_batched_tokens ({config.max_num_batched_tokens}), max_num_seqs "
            f"({config.max_num_seqs}){pages} or kv_memory_share ({config.kv_memory_share}), or end "
            f"what else runs there"
        ) from error


def _gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:.1f} GiB"
