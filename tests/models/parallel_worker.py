"""One rank of a tensor-parallel group on gloo: python -m tests.models.parallel_worker …

Writes the logits of each model directory, of whole prefill and of decoding, to <out>.<rank>.pt.
"""

from __future__ import annotations

import sys

import torch

from rooftile.distributed.group import ParallelGroup
from rooftile.models.loader import load_model
from tests.models.paged import PagedRunner

TOKENS = list(range(3, 24))


def logits(directory: str, random_weights: bool, group: ParallelGroup | None) -> torch.Tensor:
    loaded = load_model(
        directory, dtype=torch.float32, random_weights=random_weights, parallel=group
    )
    runner = PagedRunner(loaded.decoder)
    return torch.cat([runner.run((0, TOKENS))[0], runner.run((0, [7]))[0]])


def main(rank: int, size: int, store: str, out: str, *directories: str) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=size
    )
    group = ParallelGroup(rank, size)
    results = {}
    for directory in directories:
        for random_weights in (False, True):
            results[directory, random_weights] = logits(directory, random_weights, group)
    torch.save(results, f"{out}.{rank}.pt")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
