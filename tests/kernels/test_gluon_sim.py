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
    with pytest.raises(SimulationError, match="reaches beyond its tensor"):
        Descriptor(x, [9, 96], [96, 1], [8, 64], None).addresses((4, 64))
    Descriptor(x, [9, 100], [96, 1], [8, 64], None).addresses((9, 64))  # clipped: nothing is read


def doubled(fault: str, n: int = 50) -> tuple[Tensor, Tensor]:
    """Each tensor has others on both sides in its storage, which are not the kernel's."""
    memory = torch.arange(400.0)
    source, out = memory[100 : 100 + n], memory[200 : 200 + n]
    with simulation():
        scratch = torch.empty(n)
        FAULTS.double[(1,)](source, out, scratch, n, fault)
    outside = torch.cat([memory[:200], memory[200 + n :]])
    assert torch.equal(outside, torch.cat([torch.arange(200.0), torch.arange(200.0 + n, 400)]))
    return out, 2 * source


def test_access_within_tensors() -> None:
    assert torch.equal(*doubled("", 64))
    assert torch.equal(*doubled(""))
    assert doubled("", 0)[0].numel() == 0  # masks let nothing through


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("a load", "a load reaches beyond its tensor: element 63 of source, which has 50"),
        ("before", "a load reaches beyond its tensor: element -1 of source"),
        ("a copy", "a copy reaches beyond its tensor: element 63 of source"),
        ("a store", "a store reaches beyond its tensor: element 63 of out"),
        ("an atomic", "an atomic reaches beyond its tensor: element 50 of out"),
        ("never written", "a load of element 0 of scratch: nobody wrote it"),
    ],
)
def test_access_beyond_tensors_and_of_what_nobody_wrote(fault: str, message: str) -> None:
    with pytest.raises(SimulationError, match=message):
        doubled(fault)


def test_what_host_code_writes_is_written() -> None:
    n = 50
    out = torch.zeros(n)
    with simulation():
        scratch = torch.empty_like(out)
        assert bool(scratch.isnan().all())
        scratch.copy_(torch.ones(n))
        FAULTS.double[(1,)](out, out, scratch, n, "never written")
    assert torch.equal(out, torch.full((n,), 2.0))


@pytest.mark.parametrize("rows", [64, 128])
def test_copies_of_what_is_not_the_tensors(rows: int) -> None:
    """A descriptor that says more rows than its tensor has: those after it are in the same storage."""
    x = torch.randn(256, 64).half()
    out = torch.zeros(64, 64).half()
    target = Descriptor(out, out.shape, out.stride(), [64, 64], None)
    source = Descriptor(x[64 : 64 + rows], [128, 64], [64, 1], [64, 64], None)
    with simulation():
        if rows == 128:
            FAULTS.sum_of_products[(1,)](source, target, 2, "")
        else:
            with pytest.raises(SimulationError, match="the copy engine reaches beyond its tensor"):
                FAULTS.sum_of_products[(1,)](source, target, 2, "")
