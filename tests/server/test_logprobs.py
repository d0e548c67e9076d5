"""Log-probabilities in both formats, against plain recomputation; lm-eval's contract."""

from __future__ import annotations

import math
from typing import Any

import pytest

from rooftile.engine.outputs import CompletionOutput, TokenLogprobs
from rooftile.server.choices import LEAST_LOGPROB, Choice, as_entry
from rooftile.server.tokens import TokenTexts
from tests.server.live import LiveServer

PROMPT = "log probabilities of a prompt"


@pytest.fixture(scope="module")
def reference(tiny_path: Any) -> Any:
    """Log-probabilities of a prompt's tokens in one pass, without a prefix cache."""
    from rooftile.engine.llm import LLM
    from rooftile.engine.params import SamplingParams

    llm = LLM(str(tiny_path), dtype="float32", random_weights=True, num_pages=64, page_size=4,
              prefix_cache=False)  # fmt: skip

    def logprobs(token_ids: list[int]) -> list[float]:
        params = SamplingParams(prompt_logprobs=0, max_tokens=0)
        (output,) = llm.generate([token_ids], params)
        assert output.prompt_logprobs is not None
        return [entry.logprob for entry in output.prompt_logprobs[1:] if entry is not None]

    return logprobs


def complete(server: LiveServer, **body: Any) -> Any:
    with server.http() as http:
        response = http.post("/v1/completions", json={"temperature": 0, **body})
        assert response.status_code == 200, response.text
        return response.json()


def test_completion_format(server: LiveServer, reference: Any) -> None:
    answer = complete(server, prompt=PROMPT, max_tokens=6, logprobs=3, ignore_eos=True)
    (choice,) = answer["choices"]
    found = choice["logprobs"]
    assert len(found["tokens"]) == len(found["top_logprobs"]) == 6
    tokenizer = server.llm.tokenizer
    assert tokenizer is not None
    prompt_ids = tokenizer.encode(PROMPT)
    for own, top in zip(found["token_logprobs"], found["top_logprobs"], strict=True):
        assert own == max(top.values())  # greedy, and bit for bit
        assert len(top) == 3
    texts = TokenTexts(tokenizer)
    by_text = {texts.text_of(token): token for token in range(260)}
    output_ids = [by_text[text] for text in found["tokens"]]
    expected = reference([*prompt_ids, *output_ids])[len(prompt_ids) - 1 :]
    assert found["token_logprobs"] == pytest.approx(expected, abs=1e-4)


def test_the_sampled_token_is_among_the_top_ones(server: LiveServer) -> None:
    answer = complete(
        server, prompt=PROMPT, max_tokens=12, logprobs=1, temperature=5.0, seed=1, ignore_eos=True
    )
    found = answer["choices"][0]["logprobs"]
    for token, own, top in zip(
        found["tokens"], found["token_logprobs"], found["top_logprobs"], strict=True
    ):
        assert top[token] == own
    assert any(len(top) == 2 for top in found["top_logprobs"])


def test_chat_format(server: LiveServer) -> None:
    client = server.openai()
    params: dict[str, Any] = {
        "model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 5,
        "temperature": 0, "logprobs": True, "top_logprobs": 2, "extra_body": {"ignore_eos": True},
    }  # fmt: skip
    whole = client.chat.completions.create(**params).choices[0]
    assert whole.logprobs is not None
    assert len(whole.logprobs.content) == 5
    for entry in whole.logprobs.content:
        assert len(entry.top_logprobs) == 2
        assert entry.top_logprobs[0].logprob == entry.logprob
        assert entry.bytes is not None
    joined = b"".join(bytes(entry.bytes) for entry in whole.logprobs.content)
    assert joined.decode(errors="replace") == whole.message.content
    streamed = [
        entry
        for chunk in client.chat.completions.create(**params, stream=True)
        for entry in chunk.choices[0].logprobs.content
    ]
    assert streamed == whole.logprobs.content
    alone = client.chat.completions.create(**{**params, "top_logprobs": 0}).choices[0]
    assert [entry.top_logprobs for entry in alone.logprobs.content] == [[]] * 5


@pytest.mark.parametrize("max_tokens", [0, 1])
@pytest.mark.parametrize("batch", [1, 3])
def test_what_lm_eval_asks_for(
    server: LiveServer, reference: Any, max_tokens: int, batch: int
) -> None:
    """Token ids, echo, logprobs 1: also the second time, when the prefix cache is warm."""
    tokenizer = server.llm.tokenizer
    assert tokenizer is not None
    prompts = [
        tokenizer.encode(f"{PROMPT} {number} and its continuation") for number in range(batch)
    ]
    for _ in range(2):
        answer = complete(
            server, prompt=prompts, max_tokens=max_tokens, echo=True, logprobs=1, seed=1234
        )
        assert len(answer["choices"]) == batch
        for choice, prompt in zip(answer["choices"], prompts, strict=True):
            found = choice["logprobs"]
            for values in found.values():
                assert len(values) == len(prompt) + max_tokens
            assert (found["token_logprobs"][0], found["top_logprobs"][0]) == (None, None)
            own = found["token_logprobs"][1 : len(prompt)]
            assert own == pytest.approx(reference(prompt), abs=1e-4)
            for value, top in zip(own, found["top_logprobs"][1:], strict=False):
                assert max(top.values()) >= value
            assert "".join(found["tokens"][: len(prompt)]) == tokenizer.decode(prompt)
            assert found["text_offset"][: len(prompt)] == list(range(len(prompt)))
            assert all(value <= 0 for value in own)
        if max_tokens == 0:
            complete(server, prompt=prompts, max_tokens=1)  # warms the prefix cache


def test_a_greedy_prompt_is_recognised_as_such(server: LiveServer) -> None:
    """What lm-eval calls is_greedy: the token's own number is the top one's, exactly."""
    tokenizer = server.llm.tokenizer
    assert tokenizer is not None
    prompt = tokenizer.encode("greedy")
    first = complete(server, prompt=prompt, max_tokens=5, logprobs=1, ignore_eos=True)
    texts = TokenTexts(tokenizer)
    by_text = {texts.text_of(token): token for token in range(260)}
    continuation = [by_text[text] for text in first["choices"][0]["logprobs"]["tokens"]]
    again = complete(server, prompt=prompt + continuation, max_tokens=1, echo=True, logprobs=1)
    found = again["choices"][0]["logprobs"]
    own, top = found["token_logprobs"][6:-1], found["top_logprobs"][6:-1]
    assert [value == max(t.values()) for value, t in zip(own, top, strict=True)] == [True] * 5
    forced = tokenizer.encode("greedy, this is not")
    other = complete(server, prompt=forced, max_tokens=1, echo=True, logprobs=1)
    found = other["choices"][0]["logprobs"]
    own, top = found["token_logprobs"][6:-1], found["top_logprobs"][6:-1]
    assert not all(value == max(t.values()) for value, t in zip(own, top, strict=True))


def test_minus_infinity_is_clamped() -> None:
    entry = as_entry(TokenLogprobs(3, -math.inf, ((1, -0.5), (2, -math.inf))), 0)
    assert (entry.logprob, entry.top) == (LEAST_LOGPROB, ((1, -0.5), (2, LEAST_LOGPROB)))


def test_log_probabilities_wait_for_their_text(server: LiveServer) -> None:
    """A stop string that is taken back takes its tokens along."""
    output = CompletionOutput(0, logprobs=[])
    tokenizer = server.llm.tokenizer
    assert tokenizer is not None
    choice = Choice(0, output, TokenTexts(tokenizer))
    a, b, c = (tokenizer.encode(letter)[0] for letter in "abc")

    def add(token: int, text: str) -> None:
        assert output.logprobs is not None
        output.token_ids.append(token)
        output.logprobs.append(TokenLogprobs(token, -1.0))
        output.text = text

    add(a, "a")
    news = choice.news()
    assert news is not None
    assert news.entries is not None
    assert (news.text, [entry.token_id for entry in news.entries]) == ("a", [a])
    add(b, "a")  # "bc" is a stop string: b is held back
    assert choice.news() is None
    add(c, "a")
    output.finish_reason, output.stop_reason = "stop", "bc"
    news = choice.news()
    assert news is not None
    assert (news.text, news.entries, news.finish_reason) == ("", [], "stop")
    assert choice.news() is None
