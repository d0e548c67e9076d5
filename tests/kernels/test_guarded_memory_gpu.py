"""What support/guarded_memory.py notices, on a GPU."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


def run(side: str, fault: str) -> tuple[int, str]:
    command = [sys.executable, "-m", "tests.kernels.guarded_faults", side, fault]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    return ended.returncode, ended.stdout + ended.stderr


@pytest.mark.parametrize("side", ["end", "start"])
def test_what_stays_inside_runs(side: str) -> None:
    code, said = run(side, "none")
    assert code == 0, said


@pytest.mark.parametrize(
    ("side", "fault"),
    [
        ("end", "behind load"),
        ("end", "behind store"),
        ("end", "copy"),  # by the copy engine
        ("start", "before load"),
        ("start", "before store"),
        ("end", "after free"),
    ],
)
def test_what_goes_outside_is_an_error(side: str, fault: str) -> None:
    code, said = run(side, fault)
    assert "inside" in said, said
    assert code != 0
    assert "illegal memory access" in said
    assert "not noticed" not in said
