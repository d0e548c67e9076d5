"""The suite of paged_attention: its cases, its oracle, and that wrong results are found."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rooftile.bench.ops.paged import GROUPS, PLAN_SUITE, SUITE, inputs, make
from rooftile.bench.ops.run import measure
from rooftile.bench.ops.suite import WrongResult
from rooftile.cli.bench_ops import _table
from rooftile.planning.decode_case import decode_case

CPU = torch.device("cpu")


def test_every_case_has_a_name_that_is_understood() -> None:
    for suite in (SUITE, PLAN_SUITE):
        for cases in suite.groups.values():
            for case in cases:
                assert decode_case(case).name == case
    assert SUITE.cases(["forward"])[0] == ("paged", "b1 1k h32/8 d128 page16")
    assert SUITE.cases(["fp8"])[0][0] == "paged_fp8"
    assert len(GROUPS["forward"]) == 12  # the decode table of PEERS.md


@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        ("b2 70 h4/2 d16 page4", torch.bfloat16),
        ("b2 70 q3 h4/2 d16 page4 window20", torch.float16),
        ("b2 30 qall h4/2 d16 page4", torch.float32),
        ("b2 5 q9 h4/2 d16 page4", torch.float32),  # four queries stand before the first key
        ("b3 one90 rest20 h4/2 d16 page8 fp8", torch.bfloat16),
        ("b2 40 h4/1 d288/256 page8", torch.bfloat16),
    ],
)
def test_kernels_agree_with_the_oracle_and_mistakes_do_not(case: str, dtype: torch.dtype) -> None:
    problem = make(case, CPU, dtype, None, [])
    assert "reference" in problem.kernels
    for run in problem.kernels.values():
        out = run()
        assert problem.check(out) < 0.01
        assert isinstance(out, Tensor)
        for head in (0, 3):
            wrong = out.clone()
            wrong[:, head] *= 1.05
            with pytest.raises(WrongResult, match="is off by"):
                problem.check(wrong)
        with pytest.raises(WrongResult):
            problem.check(torch.full_like(out, torch.nan))


def test_the_dense_peer_computes_the_same_and_others_say_why_not() -> None:
    for case in ("b2 70 h4/2 d16 page4", "b2 30 qall h4/2 d16 page4"):
        problem = make(case, CPU, torch.float32, [], ["sdpa", "read"])
        assert problem.check(problem.peers["sdpa"]()) < 1e-5
        assert problem.absent == {"read": "it needs an NVIDIA GPU"}
        assert problem.check(None) == 0.0  # what a peer returns that only reads
    problem = make("b2 70 q3 h4/2 d16 page4", CPU, torch.float32, [], ["sdpa"])
    assert problem.absent == {"sdpa": "it aligns a causal mask to the first key, not to the last"}
    with pytest.raises(ValueError, match="there is no peer 'fa9' for paged"):
        make("b2 70 h4/2 d16", CPU, torch.float32, None, ["fa9"])


def test_shared_keys_lie_in_the_same_pages() -> None:
    case = "b70 76 shared64 h4/2 d16 page8"
    made = inputs(decode_case(case), CPU, torch.bfloat16)
    assert bool((made.batch.page_table[:, :8] == made.batch.page_table[0, :8]).all())
    assert made.batch.prefix is not None
    assert made.batch.prefix.lens.tolist() == [64]
    problem = make(case, CPU, torch.bfloat16, ["reference"], ["unshared"])
    assert problem.check(problem.kernels["reference"]()) < 0.01
    assert problem.check(problem.peers["unshared"]()) < 0.01


def test_a_latent_pool_holds_each_key_once() -> None:
    made = inputs(decode_case("b2 40 h4/1 d576/512 page8"), CPU, torch.bfloat16)
    assert made.k_pages.data_ptr() == made.v_pages.data_ptr()
    assert made.v_pages.shape[-1] == 512


def test_plans_are_made_on_a_cpu_too() -> None:
    problem = PLAN_SUITE.make("b3 loguniform64..900 h4/2 d16", CPU, torch.float32, None, [])
    words = problem.kernels["reference"]()
    assert problem.check(words) == 0.0
    words[0] += 1
    with pytest.raises(WrongResult, match=r"not that of planning.split_kv"):
        problem.check(words)


def test_the_table_has_the_share_of_what_reading_reaches() -> None:
    name = "b2 70 h4/2 d16 page4"
    measured = measure(
        "paged", make(name, CPU, torch.float32, ["reference"], []), CPU, machine=None
    )
    table = _table([measured], [], bandwidth=measured.rows[0].tbps * 2e12)
    column = next(c for c in table.columns if c.header == "of reading")
    assert list(column.cells) == ["", "50%"]
    assert "of reading" not in [c.header for c in _table([measured], []).columns]
