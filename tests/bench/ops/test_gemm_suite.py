"""The suite of `matmul`: cases, who runs them, and what a wrong result does."""

from __future__ import annotations

import pytest
import torch

from rooftile.bench.ops.gemm import GROUPS, SUITE
from rooftile.bench.ops.suite import WrongResult
from rooftile.planning.stream_k import product_of


def test_every_case_is_understood() -> None:
    for cases in GROUPS.values():
        for case in cases:
            assert str(product_of(case)) == case
    assert all(product_of(c).k % 8 == 0 for c in GROUPS["aligned"])
    assert any(product_of(c).k % 8 for c in GROUPS["misaligned"])


def test_a_case_on_the_cpu() -> None:
    alone = SUITE.make("40x24x64", torch.device("cpu"), torch.float32, None, [])
    assert set(alone.kernels) == {"torch", "reference"}  # what kernel="auto" takes is among them
    problem = SUITE.make("40x24x64", torch.device("cpu"), torch.float32, None, ["torch"])
    assert set(problem.kernels) == {"reference"}
    assert set(problem.peers) == {"torch"}
    assert problem.work.flops == 2 * 40 * 24 * 64
    for run in (*problem.kernels.values(), *problem.peers.values()):
        out = run()
        assert problem.check(out) < 1e-6
        with pytest.raises(WrongResult, match="40x24x64 is off by"):
            problem.check(out * 1.01)
        out[0, 3] = torch.nan
        with pytest.raises(WrongResult, match="off by inf"):
            problem.check(out)


def test_bad_names() -> None:
    cpu = torch.device("cpu")
    with pytest.raises(ValueError, match="no peer 'mkl' for matmul"):
        SUITE.make("8x8x8", cpu, torch.float32, None, ["mkl"])
    with pytest.raises(NotImplementedError, match="needs a GPU"):
        SUITE.make("8x8x8", cpu, torch.float32, ["gluon"], [])
