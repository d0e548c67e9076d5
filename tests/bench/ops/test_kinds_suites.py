"""The suites of dual chunk and differential attention: cases, oracles, and that mistakes are found."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rooftile.bench.ops import differential, dual_chunk
from rooftile.bench.ops.kinds import case_of
from rooftile.bench.ops.suite import WrongResult

CPU = torch.device("cpu")
CASES = [
    (dual_chunk, "b2 70 q3 h4/2 d16 page4 chunk20"),
    (dual_chunk, "b3 one90 rest20 h4/2 d16 page8 chunk16"),
    (dual_chunk, "b2 70 qall h4/2 d16 dense chunk20"),
    (differential, "b2 70 q3 h4/2 d16 page4"),
    (differential, "b2 70 qall h4/2 d16 dense"),
]


def test_every_case_has_a_name_that_is_understood() -> None:
    for suite, word in ((dual_chunk.SUITE, "chunk"), (differential.SUITE, "")):
        for cases in suite.groups.values():
            for case in cases:
                found, _, number = case_of(case, word)
                assert found.name == case
                assert (number > 0) == bool(word)
    assert dual_chunk.SUITE.cases(["decode"])[0][0] == "dual_chunk_decode"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("suite", "case"), CASES)
def test_kernels_and_peers_agree_with_the_oracle_and_mistakes_do_not(
    suite: Any, case: str, dtype: torch.dtype
) -> None:
    peers = ["plain"] if suite is dual_chunk else ["two", "four"]
    problem = suite.make(case, CPU, dtype, None, peers)
    assert {"reference", "torch"} <= set(problem.kernels)
    for run in (*problem.kernels.values(), *problem.peers.values()):
        out = run()
        assert problem.check(out) < 0.005
        remade = type(out) if isinstance(out, dual_chunk.Plain) else lambda x: x
        values = out.out if isinstance(out, dual_chunk.Plain) else out
        with pytest.raises(WrongResult, match="is off by"):
            problem.check(remade(values * 1.05))
        with pytest.raises(WrongResult):
            problem.check(remade(torch.full_like(values, torch.nan)))
    if suite is dual_chunk:  # plain attention passes for nothing but itself
        with pytest.raises(WrongResult):
            problem.check(problem.peers["plain"]().out)


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("b1 64 h4/2 d16 page4", "has no chunks; add a word such as chunk12288"),
        ("b1 64 h4/2 d16 page4 chunk8 chunk9", "nor any word twice"),
        ("b1 64 h4/2 d16 page4 fp8 chunk8", "pages in 8 bits"),
        ("b1 64 h4/2 d16 dense chunk8", "dense requests have equal lengths and all queries"),
    ],
)
def test_cases_that_are_not_measured(case: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dual_chunk.make(case, CPU, torch.float32, None, [])


def test_peers_that_are_not_there() -> None:
    for suite, case in (CASES[0], CASES[3]):
        with pytest.raises(ValueError, match="there is no peer 'fa9' for d"):
            suite.make(case, CPU, torch.float32, None, ["fa9"])
