"""The simulator itself: right kernels give right results, each fault is caught."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.support.gluon_sim import Deadlock, SimulationError, load_simulated, simulation
from tests.support.gluon_sim.memory import Descriptor

FAULTS = load_simulated("tests.kernels.gluon_faults")
SEEDS = range(10)


def run(fault: str, seed: int, n: int = 5) -> tuple[Tensor, Tensor]:
    x = torch.randn(64 * n, 64, generator=torch.Generator().manual_seed(seed)).half()
    out = torch.full((64, 64), torch.nan, dtype=torch.float16)
    source, target = (Descriptor(t, t.shape, t.stride(), [64, 64], None) for t in (x, out))
    with simulation(seed=seed):
        FAULTS.sum_of_products[(1,)](source, target, n, fault)
    tiles = x.view(n, 64, 64).double()
    return out.double(), (tiles @ tiles).sum(0)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_right_kernel(seed: int) -> None:
    out, expected = run("", seed)
    assert torch.allclose(out, expected, atol=0.1)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("no wait", "no warpgroup_mma_wait covers"),
        ("no fence", "no fence_async_shared covers"),
        ("no store wait", "may still read its shared memory"),
        ("no release", "every role waits and no copy is in flight"),
    ],
)
def test_faults_that_are_reported(fault: str, message: str) -> None:
    for seed in SEEDS:
        with pytest.raises(SimulationError, match=message):
            run(fault, seed)


@pytest.mark.parametrize("fault", ["early release", "no arrival", "overwritten"])
def test_faults_that_show_as_wrong_results(fault: str) -> None:
    def wrong(seed: int) -> bool:
        try:
            out, expected = run(fault, seed)
        except SimulationError:
            return True
        return not torch.allclose(out, expected, atol=0.1)

    assert sum(wrong(seed) for seed in SEEDS) >= 5


def test_turns_alternate() -> None:
    for seed in SEEDS:
        log = torch.zeros(13, dtype=torch.int32)
        with simulation(seed=seed):
            FAULTS.take_turns[(1,)](log, 6, "")
        assert log.tolist() == [*range(12), 12]


def test_a_deadlock_says_who_waits_for_what() -> None:
    log = torch.zeros(13, dtype=torch.int32)
    with pytest.raises(Deadlock, match=r"CTA \(0, 0, 0\) main: named barrier 8 at \w+:\d+"):
        FAULTS.take_turns[(1,)](log, 6, "no pass")
    x = torch.zeros(64, 64, dtype=torch.float16)
    with pytest.raises(Deadlock, match=r"barrier 0\[0\] phase parity 0 at wait_for_nothing:\d+"):
        FAULTS.wait_for_nothing[(1,)](Descriptor(x, x.shape, x.stride(), [64, 64], None))


def test_a_seed_repeats_itself() -> None:
    assert torch.equal(run("early release", 3)[0].isnan(), run("early release", 3)[0].isnan())


def test_descriptor_rules() -> None:
    x = torch.zeros(4, 100, dtype=torch.float16)
    with pytest.raises(SimulationError, match="strides that are multiples of 16 bytes"):
        Descriptor(x, [4, 100], [100, 1], [4, 64], None)
    with pytest.raises(SimulationError, match="beyond its tensor's memory"):
        Descriptor(x, [9, 96], [96, 1], [8, 64], None).addresses((4, 64))
