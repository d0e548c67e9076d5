"""Streams of text: never half a character, never what a stop string takes back."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import hypothesis.strategies as st
import pytest
from hypothesis import example, given
from tokenizers import Tokenizer, decoders, models

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


# A vocabulary as SentencePiece has it: whole pieces, "▁" for a space, and a token for each byte.
PIECES = ["<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁a", "a", "bc", "é"]
SPECIAL = frozenset({0, 1})


def sentence_piece() -> Callable[[Sequence[int]], str]:
    backend = Tokenizer(models.BPE({piece: i for i, piece in enumerate(PIECES)}, []))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    backend.add_special_tokens(PIECES[:2])
    return lambda ids: backend.decode(list(ids), skip_special_tokens=True)


def bytes_of(text: str) -> list[int]:
    return [PIECES.index(f"<0x{byte:02X}>") for byte in text.encode()]


SPELLED = st.lists(
    st.one_of(
        st.sampled_from("é€😀日本").map(bytes_of),
        st.sampled_from([[token] for token in (0, 1, *range(258, len(PIECES)))]),
    ),
    max_size=12,
).map(lambda groups: [token for group in groups for token in group])


@given(SPELLED, SPELLED)
@example([], bytes_of("€€"))  # the second character's bytes break the run of the first for a while
@example([], bytes_of("a😀日本"))
@example([PIECES.index("▁a")], [1, 1, PIECES.index("▁a")])  # hidden tokens lose no space
@example([PIECES.index("▁a"), *[0] * 9], [PIECES.index("▁a")])
@example(bytes_of("é😀日"), [PIECES.index("a")])  # the context begins within a character
@example([0], [258, PIECES.index("▁a")])
def test_pieces_and_bytes_add_up_to_the_whole_decode(context: list[int], ids: list[int]) -> None:
    decode = sentence_piece()
    decoder = IncrementalDecoder(decode, context, SPECIAL)
    pieces = [decoder.push(token) for token in ids] + [decoder.flush()]
    assert "".join(pieces) == decode([*context, *ids])[len(decode(context)) :]


@pytest.mark.parametrize("text", ["€b", "😀", "日本"])
def test_a_character_that_the_prompt_begins_costs_no_other(text: str) -> None:
    for encode, decode in ((bytes_of, sentence_piece()), (str.encode, decode_bytes)):
        tokens = list(encode(text))
        for before in ("", "a€€"):
            for cut in range(1, len(text[0].encode())):
                decoder = IncrementalDecoder(decode, [*encode(before), *tokens[:cut]])
                pieces = [decoder.push(token) for token in tokens[cut:]] + [decoder.flush()]
                assert "".join(pieces) == text


def test_a_replacement_character_of_the_prompt_stays_there() -> None:
    for encode, decode in ((bytes_of, sentence_piece()), (str.encode, decode_bytes)):
        decoder = IncrementalDecoder(decode, list(encode("\ufffd")))
        pieces = [decoder.push(token) for token in encode("€")] + [decoder.flush()]
        assert "".join(pieces) == "€"


def test_an_end_within_a_run_of_bytes_spoils_only_its_own_character() -> None:
    decoder = IncrementalDecoder(sentence_piece())
    pieces = [decoder.push(token) for token in bytes_of("€😀")[:-1]] + [decoder.flush()]
    assert "".join(pieces) == "€" + "\ufffd" * 3


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
