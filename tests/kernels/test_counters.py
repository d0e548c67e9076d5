"""Counters and flags in GPU memory: no two streams share any, whoever asks for them at once."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from rooftile.kernels import flags
from rooftile.kernels.gluon import counter


class Gpu:
    """As a device; each is another, so that no test leaves anything to the next."""

    type, index = "cuda", 0


def zeros(*shape: Any, dtype: torch.dtype, device: Any) -> Tensor:
    time.sleep(0.005)  # other threads run, as while a GPU allocates
    return torch.zeros(*shape, dtype=dtype)


# A GPU on which every thread has a stream of its own.
TORCH = SimpleNamespace(
    zeros=zeros,
    int32=torch.int32,
    cuda=SimpleNamespace(
        synchronize=lambda device: time.sleep(0.005),
        is_current_stream_capturing=lambda: False,
    ),
    _C=SimpleNamespace(
        _cuda_isCurrentStreamCapturing=lambda: False,
        _cuda_getCurrentRawStream=lambda index: threading.get_ident(),
    ),
)


@pytest.mark.parametrize(
    ("module", "ask"),
    [(flags, flags.flags), (counter, counter._Pool(64, 4).slot), (counter, counter.counters)],
)
def test_threads_share_none(
    module: ModuleType, ask: Callable[[Any], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "torch", TORCH)
    gpu: Any = Gpu()
    found: list[int] = []
    all_started = threading.Barrier(8)

    def run() -> None:
        all_started.wait()
        first = ask(gpu).data_ptr()
        assert ask(gpu).data_ptr() == first
        found.append(first)

    threads = [threading.Thread(target=run) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(found)) == len(threads)
