"""Tokenizers of GGUF files, family by family, against transformers' on hard strings."""

from __future__ import annotations

import unicodedata
from dataclasses import replace
from typing import Any

import pytest
from tokenizers import AddedToken, pre_tokenizers
from tokenizers import Tokenizer as Backend
from transformers.integrations.gguf.gguf_tokenizer_mapping import convert_gguf_tokenizer
from transformers.models.qwen2.tokenization_qwen2 import Qwen2Tokenizer

from rooftile.models.gguf_tokenizer import FIELDS, PRE_TOKENIZERS, tokenizer_from_gguf
from rooftile.models.tokenizer import Tokenizer
from tests.models.test_tokenizer import byte_level_metadata, gguf_of, trained

__all__ = ["trained"]  # the fixture

HARD = [
    "Hello, world!",
    "  two leading and trailing  ",
    " one",
    "\ttabs\t\tand\n\n\nline breaks\r\n",
    "a  1 and 12 345 678 and x2y",
    "½ Ⅻ ٣٤ ²",
    "I've you'll DON'T we're it's IT'S",
    "HTMLParser camelCase ALLCaps iPhone a/b//c /\n",
    "naïve café — “quotes” … 日本語テキスト العربية हिन्दी",
    "🙂👩‍👩‍👧🇫🇷 e\u0301 \u200b\u00a0|",
    "def f(x):\n    return {x: [i ** 2 for i in range(10)]}  # done\n",
    "\x00\x01\x7f",
    "a" * 100,
    " " * 33 + "x",
    "the quick brown fox doesn't stop at 12:45",
    "",
]
# With tokens that mean something, in places that matter.
MARKED = [
    "<|begin|>x<|end|>",
    "say <|end|> now",
    "<|end|>\n\n  <|end|> <|begin|> the\n",
    "<think>the fox</think> it",
    "<|end|",
]


def same(
    ours: Tokenizer,
    theirs: Backend,
    texts: list[str],
    *,
    composed: bool = False,
    front: str = "",
) -> None:
    """Ids and text alike, with special tokens found in texts, and with none of them found.

    composed: the tokenizer composes characters. front: what may be lost in front of a text.
    """
    for text in texts:
        for special in (True, False):
            theirs.encode_special_tokens = not special
            expected = theirs.encode(text, add_special_tokens=False).ids
            ids = ours.encode(text, add_special_tokens=False, parse_special=special)
            assert ids == expected, (text, special)
            text_again = ours.decode(ids, skip_special_tokens=False)
            assert text_again == theirs.decode(ids, skip_special_tokens=False)
            if not special:
                assert not ours.special_ids.intersection(ids), text
                if composed:
                    text = unicodedata.normalize("NFC", text)
                # A space in front of what follows a user-defined token stays: decoders cannot know.
                assert text_again.lstrip(front) == text.lstrip(front) or "<think>" in text
    theirs.encode_special_tokens = False


def described(metadata: dict[str, Any]) -> dict[str, Any]:
    """The same in the words of transformers."""
    names = ("tokens", "merges", "scores", "token_type")
    return {
        "tokenizer_type": metadata["model"],
        "pre_tokenizer_type": metadata.get("pre"),
        **{name: metadata[name] for name in names if name in metadata},
    }


@pytest.fixture(scope="module")
def byte_level(trained: Backend) -> dict[str, Any]:
    metadata = byte_level_metadata(trained, "default")
    for token in ("<think>", "</think>"):  # user-defined: found whole, but not special
        metadata["tokens"].append(token)
        metadata["token_type"].append(4)
    return {**metadata, "add_bos_token": False}


@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
def test_byte_level(byte_level: dict[str, Any], pre: str) -> None:
    metadata = {**byte_level, "pre": pre}
    theirs, _ = convert_gguf_tokenizer("llama", described(metadata))
    if pre in ("llama-bpe", "llama3", "llama-v3", "tekken"):
        theirs.model.ignore_merges = True  # as their makers publish them
    if pre in ("smollm", "refact", "starcoder"):
        digits = pre_tokenizers.Digits(individual_digits=True)
        theirs.pre_tokenizer = pre_tokenizers.Sequence([digits, theirs.pre_tokenizer])
    ours = tokenizer_from_gguf(gguf_of(metadata))
    assert ours is not None
    texts = [*HARD, *MARKED]
    if pre in ("qwen2", "deepseek-r1-qwen"):
        texts = [unicodedata.normalize("NFC", text) for text in texts]
    same(ours, theirs, texts)


def test_llama_2s_regex_is_not_qwens(byte_level: dict[str, Any]) -> None:
    """The cases above tell the rules apart: no two pre-tokenizers agree on every hard string."""
    cuts = {}
    for pre in ("default", "smollm", "llama-bpe", "gpt-4o", "qwen2", "tekken"):
        tokenizer = tokenizer_from_gguf(gguf_of({**byte_level, "pre": pre}))
        assert tokenizer is not None
        pieces = [tokenizer.backend.pre_tokenizer.pre_tokenize_str(text) for text in HARD]
        cuts[pre] = str(pieces)
    assert len(set(cuts.values())) == len(cuts)


def test_qwens_own_class(byte_level: dict[str, Any]) -> None:
    """Qwen2, 2.5 and 3, by the class that reads their vocab.json and merges.txt."""
    vocab = {token: index for index, token in enumerate(byte_level["tokens"])}
    merges = [tuple(merge.split(" ")) for merge in byte_level["merges"]]
    theirs = Qwen2Tokenizer(vocab=vocab, merges=merges).backend_tokenizer
    theirs.add_special_tokens(["<|begin|>", "<|end|>"])
    theirs.add_tokens(["<think>", "</think>"])
    ours = tokenizer_from_gguf(gguf_of({**byte_level, "pre": "qwen2"}))
    assert ours is not None
    same(ours, theirs, [*HARD, *MARKED], composed=True)


@pytest.fixture(scope="module")
def sentence_piece(trained: Backend) -> dict[str, Any]:
    """A vocabulary like SentencePiece's: special, user-defined, bytes, pieces by score, characters."""
    from tokenizers import models, trainers

    from tests.models.test_tokenizer import CORPUS

    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme="always", split=True)
    code = ["def f(x):\n    return x", "s> <s s>> <|end |end|> end|>"]
    trainer = trainers.BpeTrainer(vocab_size=260, show_progress=False)
    backend.train_from_iterator([*CORPUS, *code] * 3, trainer)
    by_id = sorted(backend.get_vocab().items(), key=lambda item: item[1])
    pieces = [token for token, _ in by_id if len(token) > 1]
    characters = [token for token, _ in by_id if len(token) == 1]
    special = ["<unk>", "<s>", "</s>", "<|begin|>", "<|end|>", "<|endoftext|>"]
    defined = ["<think>", "</think>"]
    # Pieces from which a special token could be put together.
    pieces += ["s>", "<|", "end|>", "</"]
    pieces = list(dict.fromkeys(pieces))
    numbers = [f"<0x{byte:02X}>" for byte in range(256)]
    tokens = [*special, *defined, *numbers, *pieces, *characters]
    types = [2, *[3] * 5, *[4] * 2, *[6] * 256, *[1] * (len(pieces) + len(characters))]
    scores = [0.0] * (len(tokens) - len(pieces) - len(characters))
    scores += [-float(index) for index in range(len(pieces) + len(characters))]
    return {
        "model": "llama",
        "tokens": tokens,
        "token_type": types,
        "scores": scores,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
        "add_bos_token": False,
    }


def transformers_of(metadata: dict[str, Any], architecture: str, **changes: bool) -> Backend:
    """Built by transformers, with `changes` to what its special tokens swallow.

    Merges that would spell a special token out are left out: SentencePiece has none.
    """
    from transformers.tokenization_utils_base import generate_merges

    tokens, scores = metadata["tokens"], metadata["scores"]
    normal = {
        token: score
        for token, score, kind in zip(tokens, scores, metadata["token_type"], strict=True)
        if kind in (1, 4)
    }
    if architecture.startswith("gemma"):
        normal = {
            "▁" * len(token) if not token.strip(" ") else token: score
            for token, score in normal.items()
        }
    merges = generate_merges({token: index for index, token in enumerate(normal)}, normal)
    given = {**described(metadata), "merges": [" ".join(merge) for merge in merges]}
    plain = {
        **given,
        "token_type": [1 if kind in (2, 3, 4) else kind for kind in given["token_type"]],
    }
    backend, _ = convert_gguf_tokenizer(architecture, plain)
    for token, kind in zip(tokens, metadata["token_type"], strict=True):
        swallows = changes.get("rstrip", False) and token not in ("<unk>", "<s>", "<|endoftext|>")
        entry = AddedToken(token, normalized=False, special=kind in (2, 3), rstrip=swallows)
        if kind in (2, 3):
            backend.add_special_tokens([entry])
        elif kind == 4 and token.strip(" "):
            backend.add_tokens([entry])
    return backend


def ours_of(metadata: dict[str, Any], architecture: str) -> Tokenizer:
    file = gguf_of(metadata)
    file.metadata["general.architecture"] = architecture  # type: ignore[index]
    tokenizer = tokenizer_from_gguf(file)
    assert tokenizer is not None
    return tokenizer


def test_llama_2_and_the_first_mistral(sentence_piece: dict[str, Any]) -> None:
    """A space in front of the text and of what follows a special token, as their tokenizer.json."""
    same(
        ours_of(sentence_piece, "llama"), transformers_of(sentence_piece, "phi3"), [*HARD, *MARKED]
    )


def test_later_mistrals(sentence_piece: dict[str, Any]) -> None:
    """The vocabularies with control tokens for instructions have a space in front of the text only."""
    metadata = dict(sentence_piece)
    metadata["tokens"] = [*metadata["tokens"], "[INST]", "[/INST]"]
    metadata["token_type"] = [*metadata["token_type"], 3, 3]
    metadata["scores"] = [*metadata["scores"], 0.0, 0.0]
    ours = ours_of(metadata, "llama")
    instructions = ["<s>[INST] the fox[/INST] it</s>", "[INST]the", "a [INST]  the"]
    theirs = transformers_of(metadata, "llama")
    same(ours, theirs, [*HARD, *MARKED, *instructions], front=" ")
    assert ours.encode("[INST] the") == [ours.token_to_id("[INST]"), *ours.encode("the")]


def test_phi_3(sentence_piece: dict[str, Any]) -> None:
    """Its special tokens swallow the white space after them, but for three."""
    ours = ours_of(sentence_piece, "phi3")
    more = ["<|begin|>\nthe<|end|>\n<|endoftext|>\n<s> it <|begin|> \n x"]
    same(ours, transformers_of(sentence_piece, "phi3", rstrip=True), [*HARD, *MARKED, *more])
    begin = ours.token_to_id("<|begin|>")
    assert ours.encode("<|begin|>\n the") == [begin, *ours.encode("the")]
    assert ours.encode("<s>\nthe") != [1, *ours.encode("the")]


def test_gemma(sentence_piece: dict[str, Any]) -> None:
    """No space in front; runs of spaces and line breaks are user-defined tokens, longest first."""
    spaces, breaks = ["  ", "   ", "    "], ["\n", "\n\n", "\n\n\n"]
    metadata = dict(sentence_piece, add_space_prefix=False)
    metadata["tokens"] = [*spaces, *breaks, *metadata["tokens"]]
    metadata["token_type"] = [*[4] * 6, *metadata["token_type"]]
    metadata["scores"] = [*[1.0] * 6, *metadata["scores"]]
    for key in ("bos_token_id", "eos_token_id", "unknown_token_id"):
        metadata[key] += 6
    # transformers has no user-defined run of spaces: it merges them, longest left part first.
    texts = [text for text in [*HARD, *MARKED] if " " * 5 not in text]
    ours = ours_of(metadata, "gemma2")
    same(ours, transformers_of(metadata, "gemma2"), texts)
    assert ours.encode("  x", add_special_tokens=False) == [0, ours.token_to_id("x")]
    assert ours.encode("a" + " " * 7)[-2:] == [2, 1], "as many as there are, from the left"


def test_no_text_spells_a_special_token(sentence_piece: dict[str, Any]) -> None:
    """ "<" and "s>" are pieces, and "<s>" is a token: but not one that text may become."""
    for architecture in ("llama", "phi3", "gemma2"):
        ours = ours_of(sentence_piece, architecture)
        for text in ("<s>", "x</s>y", "<|end|><|begin|>", "<unk>", "<0x41>", "<|endoftext|>"):
            ids = ours.encode(text, parse_special=False)
            assert not ours.special_ids.intersection(ids), text
            assert ours.decode(ids).strip() == text
    assert ours.encode("<s>") == [1]
    assert ours.encode("x<0x41>")[-1] == ours.token_to_id(">"), "a byte's name is plain text"


def test_begin_and_end_are_added_as_the_file_says(sentence_piece: dict[str, Any]) -> None:
    plain = ours_of(sentence_piece, "llama").encode("the")
    for bos in (True, False):
        for eos in (True, False):
            tokenizer = ours_of(
                {**sentence_piece, "add_bos_token": bos, "add_eos_token": eos}, "llama"
            )
            assert tokenizer.encode("the") == [*[1] * bos, *plain, *[2] * eos]
            assert tokenizer.encode("the", add_special_tokens=False) == plain


@pytest.mark.parametrize("key", sorted(FIELDS))
@pytest.mark.parametrize("value", [5, "x", [5], ["x"], [True], True, 1.5, [[1]]], ids=repr)
def test_a_field_of_another_type_is_named(byte_level: dict[str, Any], key: str, value: Any) -> None:
    file = gguf_of({**byte_level, "pre": "default", "scores": [0.5] * len(byte_level["tokens"])})
    for kind in ("gpt2", "llama"):
        changed = {**file.metadata, "tokenizer.ggml.model": kind, key: value}
        try:
            tokenizer_from_gguf(replace(file, metadata=changed))
        except ValueError as error:
            assert "a.gguf" in str(error)  # noqa: PT017
