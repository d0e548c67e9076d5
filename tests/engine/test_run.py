"""LLM.run: any number of requests through a window, the same texts as all at once."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from rooftile.engine.llm import LLM, Prompt
from rooftile.engine.outputs import RequestOutput
from rooftile.engine.params import BeamSearchParams, Params, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
PROMPTS = [f"{'word ' * (n % 5)}{n}" for n in range(17)]


def lengths(count: int) -> list[SamplingParams]:
    return [
        SamplingParams(temperature=0, max_tokens=1 + n * 5 % 9, ignore_eos=True)
        for n in range(count)
    ]


def finished(result: RequestOutput | ValueError) -> RequestOutput:
    assert isinstance(result, RequestOutput)
    assert result.finished
    return result


@pytest.mark.parametrize("window", [1, 3, 40, None])
def test_equals_generate(llm: LLM, window: int | None) -> None:
    params = lengths(len(PROMPTS))
    expected = [o.outputs[0].token_ids for o in llm.generate(PROMPTS, params)]
    results = list(llm.run(zip(PROMPTS, params, strict=True), window=window))
    assert sorted(position for position, _ in results) == list(range(len(PROMPTS)))
    for position, result in results:
        assert finished(result).outputs[0].token_ids == expected[position]
    if window != 1:  # short ones overtake
        assert [position for position, _ in results] != sorted(position for position, _ in results)


def test_never_asks_for_more_than_the_window(llm: LLM) -> None:
    asked, answered = 0, 0

    def requests() -> Iterator[tuple[Prompt, Params]]:
        nonlocal asked
        for params in itertools.chain.from_iterable(lengths(9) for _ in itertools.count()):
            asked += 1
            assert asked - answered <= 4
            yield "endless", params

    run = llm.run(requests(), window=4)
    for _ in range(60):
        next(run)
        answered += 1
    run.close()
    assert llm.stats().kv.in_use == 0
    assert llm._frontend._open == {}


def test_the_batch_stays_full(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm(max_num_seqs=4)
    running = []
    requests = [(f"{n}", GREEDY) for n in range(12)]
    list(llm.run(requests, on_step=lambda: running.append(llm.stats().num_running)))
    assert len(running) == 3 * 6  # three full batches, and no step more
    assert set(running[:5]) == {4}


def test_refused_requests_come_out_as_errors(llm: LLM) -> None:
    requests: list[tuple[Prompt, Params]] = [
        ("fine", GREEDY),
        ("x" * 900, GREEDY),
        ([1, 9999], GREEDY),
        ("", SamplingParams(logit_bias={500: 1.0})),
        ("also fine", GREEDY),
    ]
    results = dict(llm.run(requests, window=2))
    said = {p: str(r) for p, r in results.items() if isinstance(r, ValueError)}
    assert set(said) == {1, 2, 3}
    assert said[1].startswith("the prompt has 900 tokens")
    assert "token id 9999" in said[2]
    for position in (0, 4):
        assert len(finished(results[position]).outputs[0].token_ids) == 6


def test_searches_and_samples_side_by_side(llm: LLM) -> None:
    search = BeamSearchParams(width=3, n_best=2, max_tokens=5)
    (alone,) = llm.beam_search("beams", search)
    results = dict(llm.run([("a", SamplingParams(n=3, seed=1, max_tokens=4)), ("beams", search)]))
    assert len(finished(results[0]).outputs) == 3
    found = finished(results[1]).outputs
    assert [c.token_ids for c in found] == [c.token_ids for c in alone.outputs]


def test_other_calls_between_results(llm: LLM) -> None:
    """They take the run's requests along, which must not be lost by that."""
    results = []
    for position, result in llm.run([(p, q) for p, q in zip(PROMPTS, lengths(17), strict=True)]):
        results.append(position)
        finished(result)
        llm.generate("in between", GREEDY)
    assert sorted(results) == list(range(17))


def test_errors_from_outside_end_the_run(llm: LLM) -> None:
    def stop() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        next(llm.run([("a", GREEDY), ("b", GREEDY)], on_step=stop))

    def broken() -> Iterator[tuple[Prompt, Params]]:
        yield "a", GREEDY
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        list(llm.run(broken()))
    assert llm.stats().kv.in_use == 0
    assert list(llm.run([])) == []
    with pytest.raises(ValueError, match="window is 0"):
        llm.run([], window=0)


def test_what_is_no_request_is_its_own_error(llm: LLM) -> None:
    requests: Any = ["text", ("a", GREEDY), ("a",), ("a", GREEDY, 1), None, {"prompt": "a"}]
    results = dict(llm.run(requests))
    finished(results.pop(1))
    assert sorted(results) == [0, 2, 3, 4, 5]
    for result in results.values():
        assert isinstance(result, ValueError)
        assert "a request is a pair of a prompt and SamplingParams, not " in str(result)
