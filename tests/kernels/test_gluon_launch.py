"""What a launch keeps between calls, and counters that kernels leave at zero."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.gluon_sim import load_simulated, simulation

FORWARD, DENSE, CONFIG, COUNTER, LAUNCH = load_simulated(
    "rooftile.kernels.gluon.attention.forward",
    "rooftile.kernels.gluon.attention.dense",
    "rooftile.kernels.gluon.attention.config",
    "rooftile.kernels.gluon.counter",
    "rooftile.kernels.gluon.launch",
)


@pytest.mark.parametrize("residency", [1, 3])
def test_a_kernel_leaves_its_counter_at_zero(
    monkeypatch: pytest.MonkeyPatch, residency: int
) -> None:
    slot = torch.zeros(4, dtype=torch.int32)
    monkeypatch.setattr(DENSE, "multiprocessors", lambda device: 3)
    monkeypatch.setattr(DENSE, "counter", lambda device: slot)
    q = torch.randn(1, 700, 2, 64).bfloat16()
    results = []
    for seed in range(3):
        with simulation(seed=seed, residency=residency):
            results.append(FORWARD.attention(q, q, q, None, -1, 0, 0.0, 0.1)[0])
        assert not slot.any()
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


class FakeBare:
    """A compiled kernel whose launcher notes what it is given."""

    handles = ("function",)

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.encoded: list[tuple[int, int]] = []

    def launch(self, *arguments: Any) -> None:
        self.calls.append(arguments)

    def current_stream(self, index: int) -> str:
        return f"stream of {index}"

    def tensor_map(self, i: int, address: int, shape: Any, strides: Any, box: Any) -> str:
        self.encoded.append((i, address))
        return f"map {i} {address}"


def test_tensor_maps_are_encoded_once_for_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    boxes = (LAUNCH.Box((2, 3), (4, 1), (1, 1), None), LAUNCH.Box((5,), (1,), (1,), None))
    device = torch.device("cuda", 0)
    launch = LAUNCH.Launch(None, 7, device, torch.bfloat16, boxes, (11, 0.5), (("block", 64),))
    bare = launch._bare = FakeBare()
    x, y, z = (SimpleNamespace(data_ptr=lambda at=at: at) for at in (16, 32, 48))
    launch((x, y), (z,))
    start = (7, 1, 1, "stream of 0", "function")
    assert bare.calls[0] == (*start, "map 0 16", 2, 3, 4, 1, "map 1 32", 5, 1, 48, 11, 0.5, 64)
    launch((x, y), (x,))
    assert bare.calls[1][-4] == 16
    assert bare.encoded == [(0, 16), (1, 32)]
    launch((x, z), (z,))
    assert bare.encoded == [(0, 16), (1, 32), (1, 48)]
    monkeypatch.setattr(LAUNCH, "_MOST_DESCRIBED", 2)
    launch((y, z), (z,))  # too many: all are forgotten, and this one is encoded
    assert bare.encoded[-2:] == [(0, 32), (1, 48)]
    assert len(launch._described) == 1


def test_overlap_needs_two_stages() -> None:
    with pytest.raises(ValueError, match="stages is 1"):
        CONFIG.Config(64, 2, 128, 1, 240, 24)
