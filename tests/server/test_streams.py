"""Streams in whatever pieces they come: whole characters, no stop text, the same as at once."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest
import tokenizers
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import decoders, models

from rooftile.engine.core import SequenceDelta
from rooftile.engine.frontend import Frontend
from rooftile.engine.limits import Limits
from rooftile.engine.outputs import TokenLogprobs
from rooftile.engine.params import SamplingParams
from rooftile.engine.token_bytes import BYTE_OF, TokenBytes
from rooftile.models.tokenizer import Tokenizer
from rooftile.server.choices import Choice, Offsets, prompt_entries
from rooftile.server.logprobs import completion_logprobs
from rooftile.server.tokens import TokenTexts
from tests.server.live import LiveServer

LIMITS = Limits(vocab_size=260, max_model_len=10_000, kv_tokens=10_000, max_num_seqs=4)
TEXTS = st.text(
    st.sampled_from("ab é€😀\u0301") | st.characters(exclude_categories=["Cs"]), max_size=30
)
STOPS = st.lists(st.text("abé", min_size=1, max_size=4), max_size=3)


def tokenizer_of(server: LiveServer) -> Tokenizer:
    assert server.llm.tokenizer is not None
    return server.llm.tokenizer


def pieces(tokens: Sequence[int], cuts: Sequence[int]) -> list[tuple[int, ...]]:
    """The tokens in groups of the given sizes, as a busy event loop would see them."""
    groups, at = [], 0
    for size in [*cuts, len(tokens)]:
        groups.append(tuple(tokens[at : at + size]))
        at += size
    return [group for group in groups if group]


@given(text=TEXTS, stops=STOPS, cuts=st.lists(st.integers(1, 9), max_size=60))
def test_the_pieces_of_a_stream_make_the_whole(
    shared_server: LiveServer, text: str, stops: list[str], cuts: list[int]
) -> None:
    tokenizer = tokenizer_of(shared_server)
    texts = TokenTexts(tokenizer)
    tokens = tokenizer.encode(text) or tokenizer.encode("x")
    frontend = Frontend(tokenizer, LIMITS)
    params = SamplingParams(stop=stops, logprobs=0, max_tokens=None)
    output = frontend.open("r", None, tokenizer.encode("p"), params)
    choice = Choice(0, output.outputs[0], texts, texts.special_ids)
    shown, offsets, last = "", [], None
    groups = pieces(tokens, cuts)
    for number, group in enumerate(groups):
        delta = SequenceDelta(
            "r", 0, group, tuple(TokenLogprobs(token, -1.0) for token in group),
            finish_reason="length" if number == len(groups) - 1 else None,
        )  # fmt: skip
        frontend.apply(delta)
        news = choice.news()
        if news is None:
            continue
        last = news
        shown += news.text
        shown.encode()
        assert output.outputs[0].text.startswith(shown)
        assert news.entries is not None
        offsets += [entry.offset for entry in news.entries]
        if output.outputs[0].finished:
            break
        assert all(stop not in shown for stop in stops)
    assert last is not None
    assert last.finish_reason in ("stop", "length")
    assert shown == output.outputs[0].text
    whole = tokenizer.decode(tokens)
    cut = min((whole.find(stop) for stop in stops if stop in whole), default=len(whole))
    if last.finish_reason == "length":
        assert shown == whole
    else:
        assert whole.startswith(shown)
        assert cut <= len(whole)
    assert offsets == sorted(offsets)
    assert all(offset <= len(shown) for offset in offsets)
    if last.finish_reason == "length":
        assert len(offsets) == len(tokens)


@given(
    tokens=st.lists(st.sampled_from([*"ab€😀".encode(), 256]), min_size=1, max_size=12),
    stops=st.lists(st.sampled_from(["€", "b", "a\ufffd", "\ufffd"]), max_size=2),
)
@example(tokens=[*"a€".encode()], stops=["€"])  # its first byte is no part of what comes before it
@example(tokens=[ord("a"), 256, *b"bb"], stops=["bb"])
def test_tokens_of_a_stream_are_those_of_the_whole(
    shared_server: LiveServer, tokens: list[int], stops: list[str]
) -> None:
    """Byte by byte or at once: the same tokens come with the text, also where a stop string cuts it."""
    tokenizer = tokenizer_of(shared_server)
    texts = TokenTexts(tokenizer)
    spelled = {texts.bytes_of(token)[0]: token for token in range(256)}
    ids = [spelled.get(token, token) for token in tokens]
    found = []
    for reads in (True, False):
        frontend = Frontend(tokenizer, LIMITS)
        output = frontend.open("r", None, [1], SamplingParams(stop=stops, logprobs=0))
        choice = Choice(0, output.outputs[0], texts, texts.special_ids)
        entries = []
        for at, token in enumerate(ids):
            reason = "length" if at == len(ids) - 1 else None
            frontend.apply(SequenceDelta("r", 0, (token,), (TokenLogprobs(token, -1.0),), reason))
            if (reads or output.finished) and (news := choice.news()) is not None:
                entries += [(entry.token_id, entry.offset) for entry in news.entries or ()]
            if output.finished:
                break
        found.append(entries)
    assert found[0] == found[1]


def test_the_space_that_a_vocabulary_spells_before_a_text_is_not_counted() -> None:
    backend = tokenizers.Tokenizer(models.BPE({"▁a": 0, "b": 1, "<s>": 2}, []))
    steps = [decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps)
    backend.add_special_tokens(["<s>"])
    tokenizer = Tokenizer(backend)
    texts = TokenTexts(tokenizer)
    ids = [2, 0, 0, 1]
    assert tokenizer.decode(ids) == "a ab"
    given = [TokenLogprobs(token, -1.0) for token in ids]
    assert [entry.offset for entry in prompt_entries("a ab", ids, given, texts)] == [0, 0, 1, 3]
    for context, offsets in ([2], [0, 1, 3]), ([0], [0, 2, 4]):
        frontend = Frontend(tokenizer, LIMITS)
        output = frontend.open("r", None, context, SamplingParams(logprobs=0))
        choice = Choice(0, output.outputs[0], texts, texts.special_ids)
        found = []
        for token in ids[1:]:
            frontend.apply(SequenceDelta("r", 0, (token,), (TokenLogprobs(token, -1.0),)))
            news = choice.news()
            assert news is not None
            found += [entry.offset for entry in news.entries or ()]
        assert found == offsets


@given(text=TEXTS)
def test_the_bytes_of_tokens_are_those_of_the_text(shared_server: LiveServer, text: str) -> None:
    tokenizer = tokenizer_of(shared_server)
    token_bytes = TokenBytes(tokenizer)
    tokens = tokenizer.encode(text)
    assert b"".join(token_bytes[token] for token in tokens) == text.encode()
    offsets = Offsets(TokenTexts(tokenizer))
    for token in tokens:
        offsets.take(token, hidden=False)
    assert offsets.total == len(text)


def test_tokens_of_all_kinds(server: LiveServer) -> None:
    texts = TokenTexts(tokenizer_of(server))
    assert sorted(BYTE_OF.values()) == list(range(256))
    assert texts.text_of(256) == "<|bos|>"
    assert texts.text_of(259) == "token_id:259"  # the model has it, the tokenizer does not
    assert TokenTexts(None).text_of(5) == "token_id:5"
    assert completion_logprobs([], texts).tokens == []
    assert texts.least_tokens("x" * 121) == 11  # no token is longer than <|im_start|>


@pytest.mark.parametrize("kind", ["swallows", "fuses", "plain"])
def test_a_text_is_never_said_to_have_more_tokens_than_it_has(kind: str) -> None:
    vocabulary = {"a": 0, "b": 1, " ": 2, "<unk>": 3}
    model = models.BPE(vocabulary, [], unk_token="<unk>", fuse_unk=kind == "fuses")
    backend = tokenizers.Tokenizer(model)
    added = tokenizers.AddedToken("<end>", rstrip=kind == "swallows", special=True)
    backend.add_special_tokens([added])
    tokenizer = Tokenizer(backend)
    texts = TokenTexts(tokenizer)
    for text in ("<end>" + " " * 100, "x" * 100, "ab" * 50):
        assert texts.least_tokens(text) <= len(tokenizer.encode(text))
    assert (texts.least_tokens("ab" * 50) > 0) == (kind == "plain")


def test_a_stream_of_bytes_that_are_no_characters(server: LiveServer) -> None:
    """Random weights make mostly such: each event is valid UTF-8, and the end is the same."""
    body = {"prompt": "noise", "max_tokens": 60, "ignore_eos": True, "seed": 9, "temperature": 3}
    with server.http() as http:
        whole = http.post("/v1/completions", json=body).json()["choices"][0]["text"]
        text = ""
        with http.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
            for line in response.iter_raw():
                line.decode()
        with http.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    text += json.loads(line[6:])["choices"][0]["text"]
    assert text == whole
