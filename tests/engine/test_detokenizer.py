"""Streams of text: never half a character, never what a stop string takes back."""

from __future__ import annotations

from collections.abc import Sequence

import hypothesis.strategies as st
from hypothesis import example, given

from rooftile.engine.core import SequenceDelta
from rooftile.engine.detokenizer import IncrementalDecoder, StopStrings
from rooftile.engine.frontend import TextState
from rooftile.engine.outputs import CompletionOutput
from rooftile.engine.params import SamplingParams


def decode_bytes(ids: Sequence[int]) -> str:
    """A tokenizer whose tokens are bytes: the hardest one for whole characters."""
    return bytes(ids).decode(errors="replace")


@given(st.text(), st.text(max_size=4))
@example("naïve 😀 日本", "é")
def test_pieces_are_whole_characters_and_add_up(text: str, context: str) -> None:
    decoder = IncrementalDecoder(decode_bytes, list(context.encode()))
    pieces = [decoder.push(byte) for byte in text.encode()]
    pieces.append(decoder.flush())
    assert "".join(pieces) == text
    shown = ""
    for piece in pieces:
        shown += piece
        assert text.startswith(shown)


@given(st.binary(max_size=200))
@example(b"\xe2\x82" * 3 + "€".encode())
@example(b"\xff" * 100 + b"ok")
def test_invalid_bytes_come_out_as_the_whole_decode_has_them(data: bytes) -> None:
    decoder = IncrementalDecoder(decode_bytes)
    pieces = [decoder.push(byte) for byte in data] + [decoder.flush()]
    assert "".join(pieces) == data.decode(errors="replace")


def test_a_character_cut_by_the_end_is_shown_as_incomplete() -> None:
    decoder = IncrementalDecoder(decode_bytes)
    assert [decoder.push(byte) for byte in "a😀".encode()[:-1]] == ["a", "", "", ""]
    assert decoder.flush() == "\ufffd"


@given(
    st.text(alphabet="ab", max_size=30),
    st.lists(st.text(alphabet="abc", min_size=1, max_size=4), max_size=4),
    st.lists(st.integers(1, 4), max_size=30),
)
def test_stop_strings_in_any_chunking(text: str, stops: list[str], chunks: list[int]) -> None:
    """Whatever the chunks, the text ends before the first stop string, and never shrinks."""
    output = CompletionOutput(0)
    params = SamplingParams(stop=stops, max_tokens=None)
    state = TextState(output, params, IncrementalDecoder(decode_bytes))
    data, shown = list(text.encode()), ""
    ends = []
    while data and not ends:
        size = chunks.pop() if chunks else 1
        tokens, data = data[:size], data[size:]
        last = not data
        delta = SequenceDelta(
            "a", 0, tuple(tokens), (None,) * len(tokens), finish_reason="length" if last else None
        )
        ends = [True] if state.apply(delta) else []
        assert output.text.startswith(shown)
        shown = output.text
        if output.finished:
            break
    # The stop string that ends first; of those that end together, the one that begins first.
    found = [(text.find(s) + len(s), text.find(s), s) for s in stops if s in text]
    assert output.text == (text[: min(found)[1]] if found else text)
    if found:
        assert output.finish_reason == "stop"
        assert output.stop_reason == min(found)[2]


def test_only_a_possible_beginning_is_held_back() -> None:
    stops = StopStrings(["END", "\n\n"])
    assert stops.safe_length("text E") == 5
    assert stops.safe_length("text EN") == 5
    assert stops.safe_length("text Ex") == 7
    assert stops.safe_length("line\n") == 4
    assert stops.safe_length("") == 0
    assert StopStrings([]).safe_length("anything") == 8


def test_min_tokens_lets_early_stop_strings_pass() -> None:
    output = CompletionOutput(0)
    state = TextState(
        output, SamplingParams(stop="b", min_tokens=3), IncrementalDecoder(decode_bytes)
    )
    for token in b"abc":
        assert not state.apply(SequenceDelta("a", 0, (token,), (None,)))
    assert state.apply(SequenceDelta("a", 0, (ord("b"),), (None,)))
    assert output.text == "abc"
