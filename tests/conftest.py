"""Test settings: one thread a worker, the same inputs in every run, no wall-clock deadlines.

`make test` repeats the same examples, so that it fails for a change and not for a draw;
ROOFTILE_EXPLORE=1 (as `make test-all` sets it) draws new ones.
"""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers

from rooftile.kernels.cpu import library
from tests.support import guarded_memory

EXPLORE = os.environ.get("ROOFTILE_EXPLORE") == "1"

torch.set_num_threads(1)
settings.register_profile(
    "repeat",
    deadline=None,
    derandomize=True,
    max_examples=40,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("explore", settings.get_profile("repeat"), derandomize=False)
settings.load_profile("explore" if EXPLORE else "repeat")
if not EXPLORE and hasattr(providers, "_get_local_constants"):
    # It also draws numbers that it reads in the source of whatever is imported by then: other ones
    # in another order of tests, in another worker, and after a change of any constant anywhere.
    providers._get_local_constants = lambda: providers._local_constants  # which are none


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--guard",
        choices=("end", "start"),
        help="CUDA tensors end, or start, beside memory that is not there: support/guarded_memory.py",
    )


def pytest_configure(config: pytest.Config) -> None:
    """The CPU kernels are compiled before the workers start and any test waits for a process; not on
    a machine that is lent for its GPU."""
    if not hasattr(config, "workerinput") and not torch.cuda.is_available():
        library.load()
    side = config.getoption("guard")
    if side:
        if not torch.cuda.is_available():
            raise pytest.UsageError("--guard needs an NVIDIA GPU")
        guarded_memory.install(side)
        torch.cuda.CUDAGraph = lambda: pytest.skip("captures a graph")  # type: ignore


@pytest.fixture(autouse=True)
def seeded() -> None:
    """The same random tensors in every run, unless exploring."""
    if EXPLORE:
        print(f"torch.manual_seed({torch.seed()})")  # shown where the test fails
    else:
        torch.manual_seed(0)
