"""LLM on a tiny random model: texts equal a plain recomputation, whatever the engine did."""

from __future__ import annotations

import gc
import math
import shutil
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from rooftile.engine.llm import LLM
from rooftile.engine.outputs import RequestOutput
from rooftile.engine.params import SamplingParams
from rooftile.engine.sampler import Sampler
from rooftile.engine.step import RowStart, SampleSlot, StepInput, StepOutput
from rooftile.kvcache.spec import group_layers
from rooftile.kvcache.storage import KVStorage
from rooftile.layers.attention import LayerKV
from rooftile.models.loader import load_model
from rooftile.types import PagedBatch

EOS = 257
PROMPTS = [
    "Rooftile",
    "a",
    "The quick brown fox jumps over the lazy dog.",
    "naïve 日本",
    "The quick!",
]


@pytest.fixture(scope="module")
def next_logits(model_path: str) -> Callable[[list[int]], torch.Tensor]:
    """The model's logits after a list of tokens, from one dense pass and no engine."""
    model = load_model(model_path, dtype=torch.float32, random_weights=True)
    groups = group_layers(model.decoder.kv_specs)
    storage = KVStorage(groups, [1] * len(groups), 256)

    def compute(tokens: list[int]) -> torch.Tensor:
        length = len(tokens)
        slots = torch.arange(length)
        batch = PagedBatch(
            torch.tensor([0, length], dtype=torch.int32),
            torch.tensor([length], dtype=torch.int32),
            torch.zeros(1, 1, dtype=torch.int32),
            length,
            length,
        )
        kv = [LayerKV(*storage.layer(i), slots, batch) for i in range(len(model.decoder.kv_specs))]
        with torch.inference_mode():
            hidden = model.decoder.forward(torch.tensor(tokens), slots, kv)
            logits = model.decoder.logits(hidden[-1:])[0]
        return logits.clone()  # a normal tensor, which tests may change

    return compute


@pytest.fixture(scope="module")
def greedy_texts(
    next_logits: Callable[[list[int]], torch.Tensor], shared_llm: LLM
) -> dict[str, list[int]]:
    assert shared_llm.tokenizer is not None
    texts = {}
    for prompt in PROMPTS:
        tokens = shared_llm.tokenizer.encode(prompt)
        start = len(tokens)
        while len(tokens) - start < 12:
            tokens.append(int(next_logits(tokens).argmax()))
        texts[prompt] = tokens[start:]
    return texts


GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"page_size": 1, "num_pages": 160},
        {"page_size": 64},
        {"max_num_batched_tokens": 5},
        {"max_num_seqs": 2},
        {"num_pages": 20, "max_num_batched_tokens": 16},
        {"num_pages": 20, "pipeline_depth": 2},
        {"pipeline_depth": 2, "max_num_batched_tokens": 7},
        {"prefix_cache": False},
    ],
    ids=str,
)
def test_greedy_equals_plain_recomputation(
    make_llm: Callable[..., LLM], greedy_texts: dict[str, list[int]], options: dict[str, object]
) -> None:
    """Chunked prefill, decode in a batch, prefix hits, preemption, late results: same tokens."""
    llm = make_llm(**options)
    for _ in range(2):  # the second time from the prefix cache
        for output in llm.generate(PROMPTS, GREEDY):
            assert output.prompt is not None
            assert output.outputs[0].token_ids == greedy_texts[output.prompt]
            assert output.outputs[0].finish_reason == "length"
    stats = llm.stats()
    if options.get("num_pages") == 20:
        assert stats.num_preemptions > 0
    assert (stats.kv.prefix_hit_tokens > 0) == (
        options != {"prefix_cache": False} and options != {"page_size": 64}
    )
    assert stats.kv.in_use == 0


def test_one_prompt_as_text_or_ids_and_in_order(llm: LLM) -> None:
    assert llm.tokenizer is not None
    ids = llm.tokenizer.encode("abc")
    (text,), (tokens,) = llm.generate("abc", GREEDY), llm.generate(ids, GREEDY)
    assert text.prompt == "abc"
    assert tokens.prompt is None
    assert text.prompt_token_ids == tokens.prompt_token_ids == ids
    assert text.outputs[0].token_ids == tokens.outputs[0].token_ids
    outputs = llm.generate([ids, ids[:2]], [GREEDY, SamplingParams(max_tokens=1)])
    assert [len(o.outputs[0].token_ids) for o in outputs] == [12, 1]
    assert llm.generate([], GREEDY) == []


def test_seeds(llm: LLM) -> None:
    params = SamplingParams(n=3, seed=5, max_tokens=10, ignore_eos=True)
    (first,) = llm.generate("seed", params)
    texts = [completion.token_ids for completion in first.outputs]
    assert len({tuple(t) for t in texts}) == 3
    # The same among neighbours, and one by one from the same seed.
    again = llm.generate(["other", "seed", "else"], [GREEDY, params, GREEDY])[1]
    assert [completion.token_ids for completion in again.outputs] == texts
    (alone,) = llm.generate("seed", SamplingParams(seed=5, max_tokens=10, ignore_eos=True))
    assert alone.outputs[0].token_ids == texts[0]
    (unseeded,) = llm.generate("seed", SamplingParams(max_tokens=10, ignore_eos=True))
    assert unseeded.outputs[0].token_ids not in texts


def test_logprobs_are_the_models(
    llm: LLM, next_logits: Callable[[list[int]], torch.Tensor]
) -> None:
    params = SamplingParams(
        temperature=0.7, top_k=5, max_tokens=4, logprobs=3, seed=1, ignore_eos=True
    )
    (output,) = llm.generate("logprobs", params)
    (completion,) = output.outputs
    assert completion.logprobs is not None
    tokens = list(output.prompt_token_ids)
    for entry, token in zip(completion.logprobs, completion.token_ids, strict=True):
        logprobs = next_logits(tokens).log_softmax(-1)
        assert entry.token_id == token
        assert math.isclose(entry.logprob, float(logprobs[token]), abs_tol=1e-4)
        top = logprobs.topk(3)
        assert [i for i, _ in entry.top] == top.indices.tolist()
        assert [p for _, p in entry.top] == pytest.approx(top.values.tolist(), abs=1e-4)
        tokens.append(token)
    assert completion.cumulative_logprob == pytest.approx(
        sum(entry.logprob for entry in completion.logprobs)
    )
    (plain,) = llm.generate("logprobs", GREEDY)
    assert plain.outputs[0].logprobs is None
    (only,) = llm.generate("logprobs", SamplingParams(max_tokens=1, logprobs=0))
    assert only.outputs[0].logprobs is not None
    assert only.outputs[0].logprobs[0].top == ()


def assert_prompt_logprobs(
    output: RequestOutput, top: int, next_logits: Callable[[list[int]], torch.Tensor]
) -> None:
    entries = output.prompt_logprobs
    assert entries is not None
    assert len(entries) == len(output.prompt_token_ids)
    assert entries[0] is None
    for at, entry in enumerate(entries[1:], 1):
        assert entry is not None
        logprobs = next_logits(output.prompt_token_ids[:at]).log_softmax(-1)
        assert entry.token_id == output.prompt_token_ids[at]
        assert entry.logprob == pytest.approx(float(logprobs[entry.token_id]), abs=1e-4)
        best = logprobs.topk(top)
        assert [i for i, _ in entry.top] == best.indices.tolist()
        assert [p for _, p in entry.top] == pytest.approx(best.values.tolist(), abs=1e-4)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_batched_tokens": 7},
        {"num_pages": 16, "pipeline_depth": 2},
        {"max_num_batched_tokens": 7, "pipeline_depth": 2},
    ],
    ids=str,
)
def test_prompt_logprobs_also_when_the_prefix_is_cached(
    make_llm: Callable[..., LLM],
    next_logits: Callable[[list[int]], torch.Tensor],
    options: dict[str, object],
) -> None:
    llm = make_llm(**options)
    prompts = ["a prompt to be scored", "a prompt of others", "x"]
    llm.generate(prompts, GREEDY)
    params = [
        SamplingParams(max_tokens=0, prompt_logprobs=2),
        SamplingParams(max_tokens=3, prompt_logprobs=2, n=2, ignore_eos=True),
        SamplingParams(max_tokens=0, prompt_logprobs=2),
    ]
    outputs = llm.generate(prompts, params)
    for output in outputs:
        assert_prompt_logprobs(output, 2, next_logits)
        assert output.num_cached_tokens == 0
        assert {completion.finish_reason for completion in output.outputs} == {"length"}
    assert [len(o.outputs[0].token_ids) for o in outputs] == [0, 3, 0]
    assert llm.generate("x", GREEDY)[0].prompt_logprobs is None
    (longest,) = llm.generate(["y" * 64], params[:1])  # as long as KV memory or the model allows
    assert longest.prompt_logprobs is not None
    assert len(longest.prompt_logprobs) == 64
    assert llm.stats().kv.in_use == 0


def test_score_shares_the_context(
    llm: LLM, next_logits: Callable[[list[int]], torch.Tensor]
) -> None:
    assert llm.tokenizer is not None
    context = "the context of them all, five pages long"
    continuations = [" one", " two", " thirty three"]
    best = int(next_logits(llm.tokenizer.encode(context)).argmax())
    scores = llm.score(context, [*continuations, [best]])
    for score, continuation in zip(scores, continuations, strict=False):
        tokens = llm.tokenizer.encode(context)
        for token, logprob in zip(score.token_ids, score.logprobs, strict=True):
            expected = next_logits(tokens).log_softmax(-1)[token]
            assert logprob == pytest.approx(float(expected), abs=1e-4)
            tokens.append(token)
        assert llm.tokenizer.decode(score.token_ids) == continuation
        assert score.logprob == pytest.approx(sum(score.logprobs))
        assert not score.is_greedy
    assert scores[3].is_greedy
    for one in (" thirty three", llm.tokenizer.encode(" thirty three", add_special_tokens=False)):
        (alone,) = llm.score(context, one)  # a text is one continuation, not one for each letter
        assert alone.token_ids == scores[2].token_ids
    pages = len(llm.tokenizer.encode(context)) // 4
    assert llm.stats().kv.pages_shared_by_prefix >= 3 * (pages - 1)
    for context_, wrong, message in [
        ([], ["a"], "the context is empty"),
        ("a", [""], "a continuation is empty"),
        ("a", ["b" * 200], "the prompt has 201 tokens"),
    ]:
        with pytest.raises(ValueError, match=message):
            llm.score(context_, wrong)


def test_logits_processor_sees_its_tokens_and_fails_alone(llm: LLM) -> None:
    seen: list[tuple[int, ...]] = []

    def count_up(output_ids: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
        seen.append(tuple(output_ids))
        logits[: len(output_ids)] = -math.inf
        logits[len(output_ids)] = 1000.0
        return logits

    def broken(output_ids: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
        if len(output_ids) == 2:
            raise KeyError("mine")
        return logits

    def misshapen(output_ids: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
        return logits[:1]  # which torch would broadcast

    options = {"max_tokens": 4, "ignore_eos": True, "temperature": 0}
    first, second, third, plain = llm.generate(
        ["a", "b", "c", "d"],
        [
            SamplingParams(logits_processor=count_up, logprobs=0, **options),
            SamplingParams(logits_processor=broken, **options),
            SamplingParams(logits_processor=misshapen, **options),
            SamplingParams(**options),
        ],
    )
    assert first.outputs[0].token_ids == [0, 1, 2, 3]
    assert seen == [(), (0,), (0, 1), (0, 1, 2)]
    assert first.outputs[0].logprobs is not None
    assert first.outputs[0].logprobs[0].logprob < -1  # the model's own, not the processed one
    assert second.outputs[0].error == "logits_processor failed: KeyError: 'mine'"
    assert len(second.outputs[0].token_ids) == 2
    assert third.outputs[0].error == (
        "logits_processor failed: ValueError: it returned Tensor of shape [1]; "
        "return a tensor [vocab] = [260]"
    )
    assert plain.outputs[0].finish_reason == "length"


def test_bad_words_are_never_generated(llm: LLM) -> None:
    assert llm.tokenizer is not None
    x, y = (llm.tokenizer.encode(letter)[-1] for letter in "xy")
    options = {"temperature": 0, "max_tokens": 6, "logit_bias": {x: 100.0, y: 50.0}}

    def text(**fields: object) -> str:
        params = SamplingParams(**options, **fields)  # type: ignore[arg-type]
        return llm.generate("bad", params)[0].outputs[0].text

    assert text() == "xxxxxx"
    assert text(bad_words=["xx"]) == "xyxyxy"
    assert text(bad_words="x") == "yyyyyy"
    assert text(bad_words=["xyx", "xx"]) == "xyyxyy"

    def prefer_y(output_ids: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
        logits[y] += 1000
        return logits

    assert text(bad_words=["yy"], logits_processor=prefer_y) == "yxyxyx"


def test_the_stop_string_may_stay(llm: LLM) -> None:
    assert llm.tokenizer is not None
    x = llm.tokenizer.encode("x")[-1]
    params = SamplingParams(
        logit_bias=force(x), temperature=0, stop="xxx", include_stop_str_in_output=True
    )
    assert llm.generate("a", params)[0].outputs[0].text == "xxx"


def force(token: int) -> dict[int, float]:
    return {token: 100.0}


def test_stop_tokens_and_eos(llm: LLM) -> None:
    assert llm.tokenizer is not None
    x = llm.tokenizer.encode("x")[-1]
    (eos,) = llm.generate("a", SamplingParams(logit_bias=force(EOS), temperature=0))
    assert (eos.outputs[0].finish_reason, eos.outputs[0].stop_reason) == ("stop", None)
    assert (eos.outputs[0].text, eos.outputs[0].token_ids) == ("", [EOS])
    ignoring = SamplingParams(
        logit_bias=force(EOS),
        temperature=0,
        ignore_eos=True,
        max_tokens=3,
        skip_special_tokens=False,
    )
    (ignored,) = llm.generate("a", ignoring)
    assert ignored.outputs[0].text == "<|im_end|>" * 3
    assert ignored.outputs[0].finish_reason == "length"
    (stopped,) = llm.generate("a", SamplingParams(logit_bias=force(x), stop_token_ids=[x]))
    assert (stopped.outputs[0].finish_reason, stopped.outputs[0].stop_reason) == ("stop", x)
    assert stopped.outputs[0].text == ""
    late = SamplingParams(logit_bias=force(EOS), temperature=0, min_tokens=4, max_tokens=9)
    (banned,) = llm.generate("a", late)
    assert len(banned.outputs[0].token_ids) == 5
    assert EOS not in banned.outputs[0].token_ids[:4]


def test_stop_strings_cut_the_text_and_free_the_pages(llm: LLM) -> None:
    assert llm.tokenizer is not None
    x = llm.tokenizer.encode("x")[-1]
    params = SamplingParams(
        logit_bias=force(x), temperature=0, stop=["nothing", "xxx"], max_tokens=50, n=2
    )
    (output,) = llm.generate("a", params)
    for completion in output.outputs:
        assert (completion.text, completion.finish_reason) == ("", "stop")
        assert completion.stop_reason == "xxx"
        assert len(completion.token_ids) == 3
    assert llm.stats().kv.in_use == 0


def test_biases_and_bans_of_a_step_are_those_of_its_rows() -> None:
    sampler = Sampler(8, 260, torch.device("cpu"))
    rows = {
        5: SamplingParams(logit_bias={7: 1.5, 3: -2}, min_tokens=2, stop_token_ids=[9, 4]),
        2: SamplingParams(),
        6: SamplingParams(logit_bias={8: 100}, min_tokens=1, stop_token_ids=[1]),
        0: SamplingParams(min_tokens=3),  # whose model has no end
    }
    for row, params in rows.items():
        sampler.start(RowStart(row, params, 0, 0, frozenset(params.stop_token_ids)))
    slots = [SampleSlot(at, row, position=1) for at, row in enumerate(rows)]
    given = sampler._tensors(slots, [sampler._start_of(slot) for slot in slots])
    assert given.bias_rows is not None
    assert given.bias_rows.tolist() == [0, 0, 2]
    assert given.bias_ids.tolist() == [7, 3, 8]
    assert given.bias_values.tolist() == [1.5, -2, 100]
    assert given.banned_rows.tolist() == [0, 0]
    assert given.banned_ids.tolist() == [4, 9]
    sampler.start(RowStart(5, SamplingParams(), 0, 0, frozenset([3])))
    sampler.drop(6)
    plain = [slots[0]]
    assert sampler._tensors(plain, [sampler._start_of(s) for s in plain]).bias_rows is None


def test_penalties_act_on_the_right_tokens(
    llm: LLM, next_logits: Callable[[list[int]], torch.Tensor]
) -> None:
    """Greedy under each penalty equals the same arithmetic on the model's own logits."""
    for fields in (
        {"repetition_penalty": 1.8},
        {"presence_penalty": 1.5},
        {"frequency_penalty": 0.7},
        {"repetition_penalty": 0.5, "frequency_penalty": -0.3},
    ):
        params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, **fields)
        (output, _) = llm.generate(["penalty", "neighbour"], params)
        prompt, generated = output.prompt_token_ids, []
        for token in output.outputs[0].token_ids:
            logits = next_logits(prompt + generated)
            seen = torch.tensor(sorted({*prompt, *generated}))
            factor = params.repetition_penalty
            values = logits[seen]
            logits[seen] = torch.where(values > 0, values / factor, values * factor)
            for other in set(generated):
                logits[other] -= params.presence_penalty
                logits[other] -= params.frequency_penalty * generated.count(other)
            assert token == int(logits.argmax())
            generated.append(token)


def test_penalties_survive_preemption(make_llm: Callable[..., LLM]) -> None:
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, frequency_penalty=1.0)
    prompts = ["first prompt", "other prompt", "third prompt"]
    wide, narrow = make_llm(), make_llm(num_pages=20, prefix_cache=False)
    expected = [output.outputs[0].token_ids for output in wide.generate(prompts, params)]
    assert [output.outputs[0].token_ids for output in narrow.generate(prompts, params)] == expected
    assert narrow.stats().num_preemptions > 0


def test_chat_goes_through_the_template(llm: LLM) -> None:
    messages = [{"role": "user", "content": "hi"}]
    (output,) = llm.chat(messages, GREEDY)
    assert llm.tokenizer is not None
    rendered = llm.tokenizer.decode(output.prompt_token_ids, skip_special_tokens=False)
    assert rendered == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    both = llm.chat([messages, messages], GREEDY)
    assert [o.outputs[0].token_ids for o in both] == [output.outputs[0].token_ids] * 2


def test_stream_grows_and_equals_generate(llm: LLM) -> None:
    params = SamplingParams(seed=3, n=2, max_tokens=20, ignore_eos=True, stop=["zz"])
    shown = ["", ""]
    updates = 0
    for output in llm.stream("stream", params):
        updates += 1
        for completion in output.outputs:
            assert completion.text.startswith(shown[completion.index])
            shown[completion.index] = completion.text
    (whole,) = llm.generate("stream", params)
    assert shown == [completion.text for completion in whole.outputs]
    assert updates >= 10
    assert whole.metrics.time_to_first_token is not None
    assert whole.metrics.latency is not None


def test_leaving_a_stream_early_frees_its_pages(llm: LLM) -> None:
    stream = llm.stream("early", SamplingParams(n=3, max_tokens=100, ignore_eos=True))
    output = next(stream)
    assert llm.stats().kv.in_use > 0
    stream.close()
    assert llm.stats().kv.in_use == 0
    assert {completion.finish_reason for completion in output.outputs} == {"abort"}


def test_two_streams_at_once(llm: LLM) -> None:
    expected = [o.outputs[0].text for o in llm.generate(["one", "two"], GREEDY)]
    streams = [llm.stream(prompt, GREEDY) for prompt in ("one", "two")]
    final = [None, None]
    for _ in range(30):
        for at, stream in enumerate(streams):
            final[at] = next(stream, final[at])  # type: ignore[call-overload]
    assert [output.outputs[0].text for output in final] == expected  # type: ignore[union-attr]


def test_an_interrupt_loses_nothing(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = iter(range(5))
    step = llm._core.step

    def interrupted() -> object:
        if next(steps, None) is None:
            raise KeyboardInterrupt
        return step()

    monkeypatch.setattr(llm._core, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["a", "b"], SamplingParams(n=2, max_tokens=100, ignore_eos=True))
    monkeypatch.undo()
    assert llm.stats().kv.in_use == 0
    assert len(llm.generate("after", GREEDY)[0].outputs[0].token_ids) == 12


def test_an_interrupt_within_a_step_leaves_other_requests_whole(llm: LLM) -> None:
    def interrupt(output_ids: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
        raise KeyboardInterrupt

    expected = llm.generate("other", GREEDY)[0].outputs[0].token_ids
    stream = llm.stream("other", GREEDY)
    next(stream)
    with pytest.raises(KeyboardInterrupt):
        llm.generate("stopped", SamplingParams(logits_processor=interrupt))
    *_, last = stream
    assert last.outputs[0].token_ids == expected


def test_an_interrupt_while_a_step_is_waited_for_leaves_other_requests_whole(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = llm.generate("other", GREEDY)[0].outputs[0].token_ids
    stream = llm.stream("other", GREEDY)
    next(stream)
    runner = llm._core._runner
    launch = runner.launch

    def interrupted(step: StepInput) -> Callable[[], StepOutput]:
        launch(step)

        def wait() -> StepOutput:
            raise KeyboardInterrupt

        return wait

    monkeypatch.setattr(runner, "launch", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate("stopped", SamplingParams())
    monkeypatch.undo()
    *_, last = stream
    assert last.outputs[0].token_ids == expected


def test_an_interrupt_while_prompts_are_added_leaves_none(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    add, prompts = llm._core.add_request, iter(range(2))

    def interrupted(*args: Any, **options: Any) -> None:
        if next(prompts, None) is None:
            raise KeyboardInterrupt
        add(*args, **options)

    monkeypatch.setattr(llm._core, "add_request", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["a", "b", "c", "d"])
    assert not llm._core.has_unfinished
    assert not llm._frontend._open


def test_a_text_that_cannot_be_decoded_is_its_own_error_alone(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = llm.generate(["good", "fine", [1, 2, 3]], GREEDY)
    broken = expected[2].outputs[0].token_ids[4:6]
    assert llm.tokenizer is not None
    decode = llm.tokenizer.decode

    def fails(ids: Sequence[int], **options: Any) -> str:
        if list(ids[-2:]) == broken:
            raise RuntimeError("no such text")
        return decode(ids, **options)

    monkeypatch.setattr(llm.tokenizer, "decode", fails)
    good, bad, fine = llm.generate(["good", [1, 2, 3], "fine"], GREEDY)
    assert [good.outputs[0].text, fine.outputs[0].text] == [o.outputs[0].text for o in expected[:2]]
    assert bad.outputs[0].finish_reason == "error"
    assert "its text failed: RuntimeError: no such text" in (bad.outputs[0].error or "")


def test_a_bad_prompt_among_good_ones_runs_none(llm: LLM) -> None:
    before = llm.stats().prompt_tokens
    for bad, message in [
        ([], "prompt 1: the prompt is empty"),
        ([1, 260], "prompt 1: prompt token id 260 is outside the vocabulary 0..259"),
        ("x" * 200, "prompt 1: the prompt has 200 tokens; with max_model_len 160"),
        ("\ud800", "not valid Unicode text: .*surrogates"),
        (b"bytes", "a prompt is a string or a list of token ids, not b'bytes'"),
        ({"prompt": "x"}, "a prompt is a string or a list of token ids"),
        ([1.5], "a prompt is a string or a list of token ids"),
        (None, "a prompt is a string or a list of token ids"),
    ]:
        with pytest.raises(ValueError, match=message):
            llm.generate(["good", bad], GREEDY)  # type: ignore[list-item]
    with pytest.raises(ValueError, match="2 params for 1 prompts"):
        llm.generate("a", [GREEDY, GREEDY])
    for wrong in (b"bytes", {"prompt": "x"}, {"a", "b"}, 5, None, torch.tensor(3)):
        with pytest.raises(ValueError, match="prompts are a string, a list of token ids, or"):
            llm.generate(wrong, GREEDY)  # type: ignore[arg-type]
    for params in ({"temperature": 0}, [{"temperature": 0}], "x", 3, SamplingParams):
        with pytest.raises(ValueError, match="takes SamplingParams or BeamSearchParams, not"):
            llm.generate("a", params)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="beam_search takes BeamSearchParams, not SamplingParams"):
        llm.beam_search("a", GREEDY)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="prompt_logprobs is 261; the vocabulary has 260 tokens"):
        llm.generate("a", SamplingParams(prompt_logprobs=261))
    assert llm.stats().prompt_tokens == before


def test_a_poisoned_prompt_is_its_own_error_alone(make_llm: Callable[..., LLM]) -> None:
    """NaN weights for one token: requests with it fail, their neighbours and successors do not."""
    llm = make_llm(prefix_cache=False)
    poison = 256  # <|bos|>; nobody may generate it
    params = SamplingParams(
        temperature=0, max_tokens=12, ignore_eos=True, logit_bias={poison: -100.0}
    )
    expected = [o.outputs[0].token_ids for o in llm.generate(["good", "fine"], params)]
    llm._core._runner._decoder.embedding.weight[poison] = math.nan
    good, bad, fine = llm.generate(["good", "x<|bos|>", "fine"], params)
    assert bad.outputs[0].finish_reason == "error"
    assert "not finite" in (bad.outputs[0].error or "")
    assert [good.outputs[0].token_ids, fine.outputs[0].token_ids] == expected
    assert llm.stats().kv.in_use == 0
    # Its pages, full of NaN, are used again by others without harm.
    for _ in range(3):
        again = llm.generate(["good", "fine"] * 5, params)
        assert [o.outputs[0].token_ids for o in again] == expected * 5


def test_the_models_limit_ends_with_length(llm: LLM) -> None:
    (output,) = llm.generate("x" * 150, SamplingParams(max_tokens=None, ignore_eos=True))
    assert len(output.outputs[0].token_ids) == 10
    assert output.outputs[0].finish_reason == "length"


def test_without_a_tokenizer_ids_still_work(model_path: str, tmp_path: Path) -> None:
    shutil.copy(f"{model_path}/config.json", tmp_path)
    llm = LLM(str(tmp_path), random_weights=True, dtype="float32", num_pages=16)
    (output,) = llm.generate([1, 2, 3], SamplingParams(max_tokens=2, ignore_eos=True))
    assert (output.outputs[0].text, len(output.outputs[0].token_ids)) == ("", 2)
    with pytest.raises(ValueError, match="no tokenizer; give the prompt as token ids"):
        llm.generate("text")
    with pytest.raises(ValueError, match="stop strings need a tokenizer"):
        llm.generate([1], SamplingParams(stop="x"))
    with pytest.raises(ValueError, match="cannot chat"):
        llm.chat([{"role": "user", "content": "hi"}])


def test_what_finished_sequences_kept_goes_with_the_next_step(llm: LLM) -> None:
    """Token counts of penalties take a vocabulary a row; a processor holds whatever it refers to."""

    class Processor:
        def __call__(self, output_ids: tuple[int, ...], logits: torch.Tensor) -> torch.Tensor:
            return logits

    def tables() -> int:
        gc.collect()
        return sum(
            type(thing) is torch.Tensor
            and thing.shape == (llm.model_config.vocab_size,)
            and thing.dtype in (torch.bool, torch.int32)
            for thing in gc.get_objects()
        )

    before = tables()
    processor = Processor()
    alive = weakref.ref(processor)
    options = {"max_tokens": 3, "seed": 1, "ignore_eos": True}
    llm.generate([[1, 2, 3]], SamplingParams(n=3, frequency_penalty=0.5, **options))
    llm.generate([[1, 2, 3]], SamplingParams(n=3, logits_processor=processor, **options))
    del processor
    llm.generate([[4]], SamplingParams(max_tokens=1))
    assert tables() == before
    assert alive() is None


@pytest.mark.parametrize(
    "fields",
    [
        {"presence_penalty": 1.5, "frequency_penalty": 0.5, "repetition_penalty": 1.3},
        {"bad_words": ["a", "e"], "logprobs": 1},
        {"logits_processor": lambda ids, logits: logits.roll(len(ids))},
    ],
    ids=["penalties", "bad words", "processor"],
)
@pytest.mark.parametrize("depth", [1, 2])
def test_samples_that_waited_for_pages_go_on_as_if_they_had_not(
    make_llm: Callable[..., LLM], fields: dict[str, Any], depth: int
) -> None:
    """What sampling knows of their tokens outlives their pages."""
    params = SamplingParams(n=4, seed=3, max_tokens=24, ignore_eos=True, **fields)
    texts = []
    for num_pages in (64, 12):
        llm = make_llm(num_pages=num_pages, pipeline_depth=depth)
        (output,) = llm.generate("a prompt", params)
        texts.append([completion.token_ids for completion in output.outputs])
        assert (llm.stats().num_preemptions > 0) == (num_pages == 12)
        assert llm.stats().kv.in_use == 0
    assert texts[0] == texts[1]
