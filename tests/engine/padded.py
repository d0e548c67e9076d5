"""The GPU's runner on a CPU: padded steps from packed deltas, run as they are instead of as graphs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import rooftile.engine.build as build
from rooftile.engine.config import EngineConfig
from rooftile.engine.device_runner import DeviceRunner
from rooftile.engine.memory import Demand
from rooftile.kvcache.storage import KVStorage


def use_padded_runner(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines made from here on run on the CPU as they would on a GPU."""

    def runner(
        config: EngineConfig,
        decoder: Any,
        groups: Any,
        demand: Demand,
        device: torch.device,
        report: Any,
    ) -> tuple[DeviceRunner, list[int]]:
        pages = build._pages(config, groups, demand, lambda share: 1 << 24)
        runner = DeviceRunner(
            decoder,
            groups,
            page_size=config.page_size,
            max_rows=config.max_num_seqs,
            max_pages_per_row=demand.pages_per_sequence(None),
            max_tokens=min(
                config.max_num_batched_tokens, config.max_num_seqs * demand.max_model_len
            ),
            device=device,
        )
        runner.attach(KVStorage(groups, pages, config.page_size, device))
        runner.warm_up()
        return runner, pages

    monkeypatch.setattr(build, "_cpu_runner", runner)
