"""The engine's loop against an oracle that reads tokens through the pages."""

from __future__ import annotations

import random
from collections.abc import Callable

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rooftile.engine.core import EngineCore, SequenceDelta
from rooftile.engine.memory import Demand
from rooftile.engine.params import BeamSearchParams, SamplingParams
from rooftile.engine.request import Sequence
from rooftile.engine.step import StepInput, StepOutput
from tests.engine.paged_oracle import (
    EOS,
    VOCAB,
    Windows,
    expected_beams,
    expected_output,
    make_core,
)

# Of one KV group or two: full ones, and windows from nothing but the token itself to everything.
WINDOWS = st.lists(st.sampled_from([None, None, 0, 1, 3, 6, 17, 100]), min_size=1, max_size=2)


class Collected:
    """What the deltas of one engine say, by request and sequence."""

    def __init__(self) -> None:
        self.tokens: dict[tuple[str, int], list[int]] = {}
        self.reasons: dict[tuple[str, int], str] = {}
        self.cached: dict[str, int] = {}

    def take(self, deltas: list[SequenceDelta]) -> None:
        for delta in deltas:
            key = delta.request_id, delta.index
            assert key not in self.reasons, "news of a finished sequence"
            self.tokens.setdefault(key, []).extend(delta.token_ids)
            self.cached[delta.request_id] = delta.num_cached_tokens
            if delta.finish_reason is not None:
                self.reasons[key] = delta.finish_reason


def run(core: EngineCore, most_steps: int = 2000) -> Collected:
    collected = Collected()
    for _ in range(most_steps):
        if not core.has_unfinished:
            return collected
        collected.take(core.step())
    raise AssertionError("the engine does not come to an end")


def params(**fields: object) -> SamplingParams:
    return SamplingParams(**{"seed": 7, "max_tokens": 8, **fields})


def assert_idle(core: EngineCore) -> None:
    kv = core.stats().kv
    assert kv.in_use == 0
    assert kv.free + kv.cached == kv.total


@given(
    st.lists(
        st.tuples(st.integers(1, 40), st.integers(0, 3), st.integers(1, 3), st.integers(1, 20)),
        min_size=1,
        max_size=8,
    ),
    st.sampled_from([1, 2, 4, 16]),
    st.integers(1, 2),
    WINDOWS,
    st.booleans(),
    st.integers(0, 10**6),
)
@settings(max_examples=150)
def test_every_text_is_its_own_whatever_the_batch(
    requests: list[tuple[int, int, int, int]],
    page_size: int,
    depth: int,
    windows: Windows,
    prefix_cache: bool,
    salt: int,
) -> None:
    """Random prompts with shared beginnings in little memory: preemption, chunks, forks, prefix hits."""
    core, _, _ = make_core(
        num_pages=72 // page_size, page_size=page_size, windows=windows,
        pipeline_depth=depth, prefix_cache=prefix_cache,
    )  # fmt: skip
    expected = {}
    for number, (length, family, n, max_tokens) in enumerate(requests):
        draw = random.Random(family)
        prompt = [draw.randrange(VOCAB) for _ in range(length)]
        core.add_request(str(number), prompt, params(n=n, seed=salt, max_tokens=max_tokens))
        for index in range(n):
            most = min(max_tokens, 64 - length)
            text = expected_output(prompt, salt, index, most, windows=windows)
            expected[str(number), index] = text
    collected = run(core)
    for key, tokens in expected.items():
        reason = collected.reasons[key]
        got = collected.tokens[key]
        assert reason in ("stop", "length")
        assert got == tokens
        assert (reason == "stop") == (tokens[-1] == EOS)
    assert_idle(core)


def test_identical_prompts_of_one_step_take_one_prefill() -> None:
    core, _, cache = make_core(num_pages=16, page_size=4, max_num_batched_tokens=64)
    prompt = list(range(16))
    for number in range(4):
        core.add_request(str(number), prompt, params(max_tokens=1))
    collected = run(core)
    assert core.stats().num_steps == 1
    # Four pages for the first; the others compute their last token only, and write nothing.
    assert cache.stats().cached == 4
    assert collected.cached == {"0": 0, "1": 15, "2": 15, "3": 15}


def test_samples_share_the_prompt_and_copy_only_the_last_page() -> None:
    core, _, cache = make_core(num_pages=64, page_size=4)
    core.add_request("a", list(range(10)), params(n=4, max_tokens=2, ignore_eos=True))
    core.step()  # the prompt, and a first token for each
    assert cache.stats().in_use == 3
    core.step()
    # The last sharer writes in place, so three of four copy the partly filled page.
    assert cache.stats().pages_copied == 3
    assert cache.stats().in_use == 0  # max_tokens reached


def test_multi_turn_finds_the_answer_cached() -> None:
    core, _, _ = make_core(num_pages=64, page_size=4)
    core.add_request("first", list(range(6)), params(max_tokens=6, ignore_eos=True))
    answer = run(core).tokens["first", 0]
    core.add_request("second", [*range(6), *answer, 1, 2], params(max_tokens=1))
    assert run(core).cached["second"] == 8  # 11 of its tokens had KV: two full pages


def test_a_salt_separates_equal_prompts() -> None:
    core, _, _ = make_core(num_pages=64, page_size=4)
    for number, salt in enumerate([None, "tenant", None]):
        core.add_request(str(number), list(range(9)), params(max_tokens=1), cache_salt=salt)
        cached = run(core).cached[str(number)]
        assert cached == (8 if number == 2 else 0)


def test_out_of_pages_the_latest_request_is_preempted_and_loses_nothing() -> None:
    core, _, _ = make_core(num_pages=8, page_size=4, prefix_cache=False)
    prompts = {"old": [1] * 12, "new": [2] * 12}
    for name, prompt in prompts.items():
        core.add_request(name, prompt, params(max_tokens=16, ignore_eos=True))
    collected = run(core)
    assert core.stats().num_preemptions > 0
    for name, prompt in prompts.items():
        expected = expected_output(prompt, 7, 0, 16, ignore_eos=True)
        assert collected.tokens[name, 0] == expected
    assert_idle(core)


def test_alone_and_out_of_pages_it_ends_with_length() -> None:
    core, _, _ = make_core(num_pages=4, page_size=4)
    core.add_request("a", [3] * 10, params(max_tokens=40, ignore_eos=True))
    collected = run(core)
    assert collected.reasons == {("a", 0): "length"}
    # 16 tokens of KV: ten of the prompt, six generated ones, and the one sampled last.
    assert len(collected.tokens["a", 0]) == 7
    assert_idle(core)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("prefix_cache", [True, False])
def test_samples_of_one_request_take_turns_in_little_memory(depth: int, prefix_cache: bool) -> None:
    """Memory for one and a half of them: none is cut short, and all say what they would alone."""
    core, _, _ = make_core(
        num_pages=12, page_size=4, pipeline_depth=depth, prefix_cache=prefix_cache
    )
    core.add_request("a", [3] * 9, params(n=5, max_tokens=30, ignore_eos=True))
    collected = run(core)
    for index in range(5):
        assert collected.tokens["a", index] == expected_output(
            [3] * 9, 7, index, 30, ignore_eos=True
        )
    assert 0 < core.stats().num_preemptions < 12  # one waits until another ends
    assert core.stats().kv.prefix_queries_tokens < 12 * 40
    assert_idle(core)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("prefix_cache", [True, False])
def test_beams_that_were_preempted_share_their_pages_again(depth: int, prefix_cache: bool) -> None:
    """They fit because they share the prompt, also when it is computed again, with a cache or without."""
    core, _, _ = make_core(
        num_pages=15, page_size=4, pipeline_depth=depth, prefix_cache=prefix_cache
    )
    core.add_request("first", [1, 2], params(max_tokens=40, ignore_eos=True))
    collected, prompt = Collected(), [3] * 29
    while len(collected.tokens.get(("first", 0), [])) < 4:
        collected.take(core.step())
    search = BeamSearchParams(width=3, max_tokens=10, n_best=3, ignore_eos=True)
    core.add_request("beams", prompt, search)
    while core.has_unfinished:
        collected.take(core.step())
    assert core.stats().num_preemptions > 0
    best = expected_beams(prompt, search, 64 - len(prompt))
    assert [collected.tokens["beams", i] for i in range(3)] == [list(b.token_ids) for b in best]
    assert_idle(core)
    assert prefix_cache or core.stats().kv.cached == 0


def test_after_a_failed_step_the_first_to_come_are_still_the_first() -> None:
    """Two requests take all of a step's budget, which fails: the third, which goes on before they do,
    gives its pages to them all the same."""
    core, runner, _ = make_core(num_pages=10, page_size=4, max_num_batched_tokens=4)
    prompts = {"first": [1], "second": [2], "third": [3, 4]}
    for name, prompt in prompts.items():
        n, most = (1, 24) if name == "third" else (2, 12)
        core.add_request(name, prompt, params(n=n, max_tokens=most, ignore_eos=True))
    collected = Collected()
    collected.take(core.step())
    runner.fail_next = 0
    while core.has_unfinished:
        collected.take(core.step())
        arrivals = [request.arrival_index for request in core._scheduler.running]
        assert arrivals == sorted(arrivals)
    for name, index, count in [("first", 1, 12), ("second", 1, 12), ("third", 0, 24)]:
        expected = expected_output(prompts[name], 7, index, count, ignore_eos=True)
        assert collected.tokens[name, index] == expected
    assert_idle(core)


def test_nan_is_that_sequences_error_alone() -> None:
    core, runner, _ = make_core(num_pages=64, page_size=4)
    core.add_request("good", [1, 2, 3], params(ignore_eos=True))
    core.add_request("bad", [4, 5, 6], params(ignore_eos=True))
    core.step()
    runner.nan_rows.add(next(row for row, start in runner.starts.items() if row != 5))
    collected = run(core)
    assert sorted(collected.reasons.values()) == ["error", "length"]
    assert_idle(core)


@pytest.mark.parametrize("when", [0, 1])
def test_a_failed_step_is_repeated_request_by_request(when: int) -> None:
    """One failure hurts nobody: the step's requests are recomputed, each alone at first."""
    core, runner, _ = make_core(num_pages=64, page_size=4)
    for number in range(3):
        core.add_request(str(number), [number] * 9, params(ignore_eos=True))
    deltas = core.step() + core.step()
    runner.fail_next = when
    deltas += core.step()
    collected = run(core)
    before = Collected()
    before.take(deltas)
    for number in range(3):
        tokens = before.tokens[str(number), 0] + collected.tokens[str(number), 0]
        assert tokens == expected_output([number] * 9, 7, 0, 8, ignore_eos=True)
        assert collected.reasons[str(number), 0] == "length"
    assert_idle(core)


def test_a_request_that_always_fails_ends_with_its_error_alone() -> None:
    core, runner, _ = make_core(num_pages=64, page_size=4)
    core.add_request("poison", [13] * 5, params(ignore_eos=True))
    core.add_request("good", [1] * 5, params(ignore_eos=True))
    launch = runner.launch

    def fail_on_poison(step):  # type: ignore[no-untyped-def]
        if any(13 in entry.token_ids for entry in step.entries):
            raise RuntimeError("poisoned")
        return launch(step)

    runner.launch = fail_on_poison  # type: ignore[method-assign]
    collected = run(core)
    assert collected.reasons == {("poison", 0): "error", ("good", 0): "length"}
    assert collected.tokens["good", 0] == expected_output([1] * 5, 7, 0, 8, ignore_eos=True)
    assert_idle(core)


def test_refusals_name_value_and_limit() -> None:
    core, _, _ = make_core(num_pages=4, page_size=4, max_model_len=64)
    for prompt, fields, message in [
        ([], {}, "the prompt is empty"),
        ([1] * 64, {}, "64 tokens; with max_model_len 64 it may have at most 63"),
        ([1] * 17, {}, "17 tokens, but all KV memory holds 16"),
        ([1, VOCAB], {}, "token id 50 is outside the vocabulary 0..49"),
        ([1, -1], {}, "token id -1 is outside"),
        ([1, True], {}, "token id True is outside"),
        ([1], {"n": 7}, "n is 7; the engine runs max_num_seqs 6"),
        ([1], {"logit_bias": {50: 1.0}}, "logit_bias has token id 50; the vocabulary ends at 49"),
        ([1], {"stop_token_ids": [99]}, "stop_token_ids has token id 99"),
        ([1], {"logprobs": 51}, "logprobs is 51; the vocabulary has 50 tokens"),
    ]:
        with pytest.raises(ValueError, match=message):
            core.add_request("a", prompt, params(**fields))
    core.add_request("a", [1], params())
    with pytest.raises(ValueError, match="request id 'a' is in use"):
        core.add_request("a", [1], params())
    run(core)
    assert_idle(core)


@pytest.mark.parametrize("windows", [(5,), (None, 5), (1, 9), (3, None, 1)], ids=str)
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("depth", [1, 2])
def test_a_window_group_holds_its_window_and_the_step_of_each_sequence(
    windows: Windows, page_size: int, depth: int
) -> None:
    """Alone in window groups of the least size it runs up to max_model_len, and never keeps more."""
    budget, longest = 7, 150
    demand = Demand(page_size, 1, longest, budget)
    pages = demand.pages(windows)
    core, _, cache = make_core(
        num_pages=pages, page_size=page_size, windows=windows, max_num_batched_tokens=budget,
        max_model_len=longest, pipeline_depth=depth,
    )  # fmt: skip
    prompt = [5] * 60
    core.add_request("a", prompt, params(max_tokens=None, ignore_eos=True))
    collected = Collected()
    most = [0] * len(windows)
    while core.has_unfinished:
        collected.take(core.step())
        groups = cache.stats().groups
        most = [max(before, group.in_use) for before, group in zip(most, groups, strict=True)]
    expected = expected_output(prompt, 7, 0, longest - 60, ignore_eos=True, windows=windows)
    assert collected.tokens["a", 0] == expected
    for window, count in zip(windows, most, strict=True):
        if window is None:
            assert count >= (longest - 2) // page_size
        else:
            assert (count - 2) * page_size < window + budget
    assert_idle(core)
    # All of it but the last token, which was not computed, is found again.
    core.add_request("b", [*prompt, *expected[:-1]], params(max_tokens=1))
    cached = min((longest - 1) // page_size * page_size, longest - 2)
    assert run(core).cached["b"] == cached


class EngineMachine(RuleBasedStateMachine):
    """Random arrivals, aborts, failures and steps: every finished text is right, nothing leaks."""

    @initialize(
        page_size=st.sampled_from([1, 2, 4]),
        depth=st.integers(1, 2),
        windows=WINDOWS,
        tokens=st.integers(24, 72),
        scarce=st.booleans(),
    )
    def start(
        self, page_size: int, depth: int, windows: Windows, tokens: int, scarce: bool
    ) -> None:
        self.windows = windows
        pages = [tokens // page_size] * len(windows)
        if scarce:  # a window group only has what one sequence needs
            least = Demand(page_size, 1, tokens, 12).pages(windows)
            pages = [min(both) for both in zip(pages, least, strict=True)]
        self.core, self.runner, self.cache = make_core(
            num_pages=pages, page_size=page_size, pipeline_depth=depth,
            windows=windows, max_num_batched_tokens=12,
        )  # fmt: skip
        self.prompts: dict[str, list[int]] = {}
        self.collected = Collected()
        self.beams: dict[str, BeamSearchParams] = {}
        self.stuck: set[str] = set()  # searches cut short for want of pages
        stuck_sequence = self.core._scheduler.stuck_sequence

        def record() -> Sequence:
            sequence = stuck_sequence()
            self.stuck.add(sequence.request.request_id)
            running = [s for r in self.core._scheduler.running for s in r.sequences if s.table]
            # Nobody is cut short for others' pages; the beams of a search only for each other's.
            if sequence.request.beam is None:
                assert running == [sequence]
            assert {s.request for s in running} <= {sequence.request}
            return sequence

        self.core._scheduler.stuck_sequence = record  # type: ignore[method-assign]

    @rule(
        family=st.integers(0, 2), length=st.integers(1, 22), n=st.integers(1, 4),
        max_tokens=st.integers(1, 24),
    )  # fmt: skip
    def add(self, family: int, length: int, n: int, max_tokens: int) -> None:
        name = str(len(self.prompts))
        draw = random.Random(family)
        self.prompts[name] = [draw.randrange(VOCAB) for _ in range(length)]
        self.core.add_request(name, self.prompts[name], params(n=n, max_tokens=max_tokens))

    @rule(
        family=st.integers(0, 2), length=st.integers(1, 16), width=st.integers(1, 4),
        max_tokens=st.integers(1, 8), early=st.sampled_from([True, False, "never"]),
    )  # fmt: skip
    def add_beam(
        self, family: int, length: int, width: int, max_tokens: int, early: bool | str
    ) -> None:
        name = f"beam{len(self.prompts)}"
        draw = random.Random(family)
        self.prompts[name] = [draw.randrange(VOCAB) for _ in range(length)]
        beam = BeamSearchParams(width, max_tokens, 0.7, early, n_best=width)  # type: ignore[arg-type]
        self.beams[name] = beam
        self.core.add_request(name, self.prompts[name], beam)

    @precondition(lambda self: self.prompts)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.prompts)))
        index = None if name in self.beams else data.draw(st.sampled_from([None, 0]))
        self.core.finish(name, index)

    @rule(when=st.integers(0, 1))
    def fail(self, when: int) -> None:
        self.runner.fail_next = when

    @rule(steps=st.integers(1, 6))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            self.collected.take(self.core.step())

    @invariant()
    def texts_are_right(self) -> None:
        if not hasattr(self, "core"):
            return
        for (name, index), tokens in self.collected.tokens.items():
            prompt = self.prompts[name]
            if name in self.beams:
                continue
            expected = expected_output(prompt, 7, index, len(tokens), windows=self.windows)
            assert tokens == expected[: len(tokens)]

    def beams_are_right(self) -> None:
        """Every search that ran to its end found what the same search without pages finds."""
        for name, beam in self.beams.items():
            reasons = {self.collected.reasons.get((name, i)) for i in range(beam.width)}
            if name in self.stuck or not reasons <= {"stop", "length"}:
                continue
            tokens = [self.collected.tokens[name, i] for i in range(beam.width)]
            prompt = self.prompts[name]
            expected = expected_beams(prompt, beam, 64 - len(prompt), self.windows)
            assert tokens == [list(hypothesis.token_ids) for hypothesis in expected]

    def teardown(self) -> None:
        if not hasattr(self, "core"):
            return
        self.runner.fail_next = None
        for _ in range(3000):
            if not self.core.has_unfinished:
                break
            self.collected.take(self.core.step())
        assert not self.core.has_unfinished
        self.texts_are_right()
        self.beams_are_right()
        assert_idle(self.core)
        assert len(self.core._scheduler.free_rows) == 6


TestEngineMachine = EngineMachine.TestCase
TestEngineMachine.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)


def test_rows_are_named_once_their_sequence_is_gone() -> None:
    """Also of sequences that were preempted, and never those that the step itself uses."""
    core, runner, _ = make_core(num_pages=9, page_size=2, pipeline_depth=2, max_num_seqs=4)
    held: set[int] = set()
    launch = runner.launch

    def watched(step: StepInput) -> Callable[[], StepOutput]:
        held.difference_update(step.freed)
        held.update(start.row for start in step.starts)
        assert {entry.row for entry in step.entries} <= held
        assert {sample.row for sample in step.samples} <= held
        return launch(step)

    runner.launch = watched  # type: ignore[method-assign]
    for index in range(6):
        core.add_request(str(index), [index, 1, 2], params(n=2, ignore_eos=True))
    run(core)
    assert core.stats().num_preemptions > 0
    core.add_request("last", [1], params(max_tokens=2, ignore_eos=True))
    run(core)
    assert len(held) == 1
