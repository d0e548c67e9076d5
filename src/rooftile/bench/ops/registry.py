"""The operators that `rooftile bench ops` measures."""

from __future__ import annotations

from rooftile.bench.ops.attention import SUITE as ATTENTION
from rooftile.bench.ops.differential import SUITE as DIFFERENTIAL
from rooftile.bench.ops.dual_chunk import SUITE as DUAL_CHUNK
from rooftile.bench.ops.gemm import SUITE as GEMM
from rooftile.bench.ops.paged import PLAN_SUITE
from rooftile.bench.ops.paged import SUITE as PAGED
from rooftile.bench.ops.suite import Suite

SUITES: dict[str, Suite] = {
    suite.name: suite for suite in (ATTENTION, DIFFERENTIAL, DUAL_CHUNK, GEMM, PAGED, PLAN_SUITE)
}


def suite_of(name: str) -> Suite:
    """Raises ValueError for an operator without a suite."""
    if name not in SUITES:
        raise ValueError(
            f"there is no operator {name!r} to measure; choose from {', '.join(SUITES)}"
        )
    return SUITES[name]
