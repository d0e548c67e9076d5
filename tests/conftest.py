"""Test settings: one thread a worker, the same inputs in every run, no wall-clock deadlines.

`make test` repeats the same examples, so that it fails for a change and not for a draw;
ROOFTILE_EXPLORE=1 (as `make test-all` sets it) draws new and more ones.
"""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import HealthCheck, settings

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


@pytest.fixture(autouse=True)
def seeded() -> None:
    """The same random tensors in every run, unless exploring."""
    if EXPLORE:
        torch.seed()
    else:
        torch.manual_seed(0)
