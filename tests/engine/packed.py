"""A packed step, and what `prepare_step` must make of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from rooftile.engine.staging import Staging
from rooftile.engine.step import PageUpdate, StepEntry
from rooftile.ops.step import SAMPLE, StepState, StepTensors, prepare_step


def packed_step(page_size: int, device: str = "cpu", **sizes: int) -> tuple[Any, ...]:
    """A step of three entries and two samples, after page tables were changed in two groups."""
    torch_device = torch.device(device)
    staging = Staging(max_tokens=32, max_rows=6, max_pages=9, groups=2, device=torch_device)
    entries = [
        StepEntry(row=4, first=0, token_ids=[11, 12, 13, 14, 15], write_from=2),
        StepEntry(row=1, first=7, token_ids=[-1], write_from=7),
        StepEntry(row=0, first=3, token_ids=[21, -1], write_from=3),
    ]
    updates = [
        PageUpdate(group, row, start, [1000 * group + 100 * row + start + i for i in range(count)])
        for group in (0, 1)
        for row, start, count in ((4, 0, 2), (1, 0, 4), (0, 0, 1), (0, 1, 2), (5, 3, 2))
    ]
    samples = np.zeros((2, len(SAMPLE)), np.int32)
    samples[:, :4] = [[4, 4, 1, 0], [5, 1, 9, 2]]
    samples[:, 4] = np.array([0.5, 0], np.float32).view(np.int32)
    samples[:, 5] = [7, 0]
    samples[:, 6] = np.array([0.25, 1], np.float32).view(np.int32)
    samples[:, 7] = np.array([0, 0.125], np.float32).view(np.int32)
    samples[:, 8:] = np.array([-5, 2**40 + 3], np.int64).view(np.int32).reshape(2, 2)
    staging.send(entries, updates, samples)
    state = StepState(
        torch.full((2, 6, 9), -7, dtype=torch.int32, device=device),
        torch.arange(70, 77, device=device),
    )
    out = StepTensors.empty(
        sizes["tokens"], sizes["requests"], sizes["samples"], state.page_tables, torch_device
    )
    for tensor in out.all:  # nothing of an earlier step may remain
        tensor.fill_(99)
    return staging.device_words, state, out


def check_prepared(kernel: str, device: str = "cpu") -> None:
    words, state, out = packed_step(2, device, tokens=16, requests=5, samples=4)
    prepare_step(words, state, out, 2, kernel=kernel)
    assert out.token_ids.tolist() == [11, 12, 13, 14, 15, 71, 21, 70] + [0] * 8
    assert out.positions.tolist() == [0, 1, 2, 3, 4, 7, 3, 4] + [0] * 8
    assert out.cu_seqlens_q.tolist() == [0, 5, 6, 8, 8, 8]
    assert out.kv_lens.tolist() == [5, 8, 5, 0, 0]
    for group in (0, 1):
        base = 1000 * group
        third = 2 * -7  # row 4 has no third page, so its token there has whatever the table holds
        expected = [-1, -1, 2 * (base + 401), 2 * (base + 401) + 1, third]
        expected += [2 * (base + 103) + 1, 2 * (base + 1) + 1, 2 * (base + 2)]
        assert out.slots[group].tolist() == expected + [-1] * 8
        assert out.page_tables[group, 1, :4].tolist() == [base + 100 + i for i in range(4)]
        assert out.page_tables[group, 2, :3].tolist() == [base + i for i in range(3)]
        assert (
            state.page_tables[group, 5].tolist() == [-7] * 3 + [base + 503, base + 504] + [-7] * 4
        )
    assert out.sample_tokens.tolist() == [4, 5, 0, 0]
    assert out.sample_rows.tolist() == [4, 1, 6, 6]
    assert out.positions_drawn.tolist() == [1, 9, 0, 0]
    assert out.sample_index.tolist() == [0, 2, 0, 0]
    assert out.seeds.tolist() == [-5, 2**40 + 3, 0, 0]
    assert out.top_k.tolist() == [7, 0, 0, 0]
    assert out.temperature.tolist() == [0.5, 0, 0, 0]
    assert out.top_p.tolist() == [0.25, 1, 1, 1]
    assert out.min_p.tolist() == [0, 0.125, 0, 0]
