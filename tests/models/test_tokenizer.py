"""Tokenizers of directories and GGUF files against transformers' and the tokenizers library."""

from __future__ import annotations

import json
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, trainers

from rooftile.models.gguf import GGUFFile
from rooftile.models.gguf_tokenizer import tokenizer_from_gguf
from rooftile.models.tokenizer import Tokenizer, tokenizer_from_directory

CORPUS = [
    "the quick brown fox jumps over the lazy dog, and then it doesn't stop: 12 345 6789 times",
    "Hello there! What's the time? It's 10:42. HELLO THERE. don't, can't, I'll, we've",
    "naïve café — 日本語 text with line\nbreaks\n\n  and   runs of spaces",
]
TEXTS = [
    *CORPUS,
    "",
    " leading",
    "trailing ",
    "1234567890 12 ٣٤",
    "I'LL DON'T don't Ünïcode e\u0301",
    "a\r\n\r\n b\n /x/\n",
    "🙂 emoji <|end|> inside",
    "HTMLParser camelCase ALLCaps",
]
GPT2_REGEX = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


@pytest.fixture(scope="module")
def trained() -> Backend:
    """A small byte-level BPE with one special token."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.train_from_iterator(
        CORPUS * 3,
        trainers.BpeTrainer(
            vocab_size=400,
            show_progress=False,
            special_tokens=["<|begin|>", "<|end|>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        ),
    )
    return backend


def gguf_of(metadata: dict[str, Any]) -> GGUFFile:
    fields = {f"tokenizer.ggml.{name}": value for name, value in metadata.items()}
    return GGUFFile(Path("a.gguf"), fields, {}, memoryview(b""))


def byte_level_metadata(backend: Backend, pre: str) -> dict[str, Any]:
    model = json.loads(backend.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    return {
        "model": "gpt2",
        "pre": pre,
        "tokens": tokens,
        "token_type": [3 if token in ("<|begin|>", "<|end|>") else 1 for token in tokens],
        "merges": [" ".join(pair) for pair in model["merges"]],
        "bos_token_id": 0,
        "eos_token_id": 1,
    }


@pytest.mark.parametrize("pre", ["default", "gpt-2", "llama-bpe", "qwen2", "tekken"])
def test_byte_level_gguf_equals_transformers(trained: Backend, pre: str) -> None:
    from transformers.integrations.gguf.gguf_tokenizer_mapping import convert_gguf_tokenizer

    metadata = byte_level_metadata(trained, pre)
    described = {
        "tokenizer_type": "gpt2",
        "pre_tokenizer_type": pre,
        **{name: metadata[name] for name in ("tokens", "merges", "token_type")},
    }
    theirs, _ = convert_gguf_tokenizer("llama", described)
    ours = tokenizer_from_gguf(gguf_of({**metadata, "add_bos_token": False}))
    assert ours is not None
    for text in TEXTS:
        if pre == "qwen2":
            import unicodedata

            text = unicodedata.normalize("NFC", text)  # Qwen's own tokenizer does so, theirs not
        ids = ours.encode(text)
        if pre not in ("llama-bpe", "tekken"):  # the other two may take whole words unmerged
            assert ids == theirs.encode(text, add_special_tokens=False).ids, text
        assert ours.decode(ids, skip_special_tokens=False) == text
    if pre == "qwen2":
        assert ours.encode("e\u0301") == ours.encode("é")


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("gpt-2", "it'S 1234  x", ["it", "'", "S", " 1234", " ", " x"]),
        ("smollm", "it's 123  4 x", ["it", "'s", " ", "1", "2", "3", "  ", "4", " x"]),
        (
            "llama-bpe",
            "it'S 12345  (x)\n\n",
            ["it", "'S", " ", "123", "45", " ", " (", "x", ")\n\n"],
        ),
        ("qwen2", "it's 123 (x", ["it", "'s", " ", "1", "2", "3", " (", "x"]),
        ("tekken", "camelCase 12 -/\n", ["camel", "Case", " ", "1", "2", " -/\n"]),
    ],
)
def test_how_text_is_cut_before_merging(
    trained: Backend, pre: str, text: str, pieces: list[str]
) -> None:
    tokenizer = tokenizer_from_gguf(gguf_of(byte_level_metadata(trained, pre)))
    assert tokenizer is not None
    cut = tokenizer.backend.pre_tokenizer.pre_tokenize_str(text)
    decoder = decoders.ByteLevel()
    assert [decoder.decode([piece]) for piece, _ in cut] == pieces


def test_whole_words_of_the_vocabulary_need_no_merges(trained: Backend) -> None:
    metadata = byte_level_metadata(trained, "llama-bpe")
    metadata["tokens"] = [*metadata["tokens"], "xylophone"]
    metadata["token_type"] = [*metadata["token_type"], 1]
    last = len(metadata["tokens"]) - 1
    llama = tokenizer_from_gguf(gguf_of(metadata))
    qwen = tokenizer_from_gguf(gguf_of({**metadata, "pre": "qwen2"}))
    assert llama is not None
    assert qwen is not None
    assert llama.encode("xylophone") == [0, last], "and Llama 3 begins texts with its first token"
    assert last not in qwen.encode("xylophone")
    assert 0 not in qwen.encode("xylophone")


def sentence_piece_metadata() -> dict[str, Any]:
    """A vocabulary as SentencePiece makes it: pieces by falling score, then single characters."""
    pieces = [
        "▁t",
        "he",
        "▁the",
        "in",
        "er",
        "▁a",
        "ing",
        "on",
        "▁s",
        "▁the▁",
        "re",
        "▁in",
        "▁▁",
        "el",
        "ell",
        "lo",
        "▁h",
        "▁hell",
        "hello",
        "▁hello",
    ]
    characters = sorted(
        {c for text in CORPUS for c in text.replace(" ", "▁") if ord(c) < 128 or c == "▁"}
    )
    tokens = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        *pieces,
        *characters,
    ]
    special = [2, 3, 3, *[6] * 256]
    scores = [0.0] * 259 + [-float(index) for index in range(len(pieces) + len(characters))]
    return {
        "model": "llama",
        "tokens": tokens,
        "scores": scores,
        "token_type": special + [1] * (len(tokens) - len(special)),
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
    }


def merged_by_score(text: str, metadata: dict[str, Any]) -> list[int]:
    """SentencePiece's algorithm, by its definition: merge the adjacent pair that scores highest."""
    ids = {token: index for index, token in enumerate(metadata["tokens"])}
    parts = list(text)
    while True:
        best = max(
            (
                (metadata["scores"][ids[left + right]], -at)
                for at, (left, right) in enumerate(pairwise(parts))
                if left + right in ids
            ),
            default=None,
        )
        if best is None:
            break
        at = -best[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    result = []
    for part in parts:
        if part in ids:
            result.append(ids[part])
        else:
            result += [ids[f"<0x{byte:02X}>"] for byte in part.encode()]
    return result


def test_sentence_piece_gguf_equals_the_algorithm() -> None:
    metadata = sentence_piece_metadata()
    tokenizer = tokenizer_from_gguf(gguf_of(metadata))
    assert tokenizer is not None
    rng = random.Random(5)
    words = ["the", "hello", "in", "then", "singing", "hell", "a", "日本", "é", "  ", "here", "ß\n"]
    texts = [" ".join(rng.choices(words, k=rng.randrange(1, 9))) for _ in range(200)]
    for text in texts:
        expected = merged_by_score("▁" + text.replace(" ", "▁"), metadata)
        assert tokenizer.encode(text) == [1, *expected]
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode("<s>", add_special_tokens=False) == [1]
    assert tokenizer.decode([metadata["tokens"].index("<0xE6>")]) == "\ufffd"


def test_sentence_piece_without_the_space_in_front() -> None:
    metadata = {**sentence_piece_metadata(), "add_space_prefix": False, "add_bos_token": False}
    tokenizer = tokenizer_from_gguf(gguf_of(metadata))
    assert tokenizer is not None
    assert tokenizer.encode("the in") == merged_by_score("the▁in", metadata)
    assert tokenizer.decode(tokenizer.encode(" the")) == " the"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "bert"}, "tokenizer.ggml.model is 'bert'; supported are 'gpt2' and 'llama'"),
        ({"pre": "deepseek-llm"}, "tokenizer.ggml.pre is 'deepseek-llm'; supported pre-token"),
        ({"merges": None}, "tokenizer.ggml.merges is missing"),
        ({"merges": ["ab"]}, "merges holds 'ab'; expected two parts"),
        ({"merges": ["nope nope"]}, "tokens and merges do not fit together"),
        ({"token_type": [1]}, "but 1 tokenizer.ggml.token_type"),
        ({"eos_token_id": 9999}, "eos_token_id is 9999, but there are"),
        ({"model": "llama"}, "needs one of tokenizer.ggml.scores for each of"),
    ],
)
def test_gguf_tokenizers_that_are_refused(
    trained: Backend, changes: dict[str, Any], message: str
) -> None:
    metadata = {**byte_level_metadata(trained, "default"), **changes}
    metadata = {name: value for name, value in metadata.items() if value is not None}
    with pytest.raises(ValueError, match=message):
        tokenizer_from_gguf(gguf_of(metadata))


def test_a_gguf_without_a_vocabulary_has_no_tokenizer() -> None:
    assert tokenizer_from_gguf(gguf_of({})) is None


@pytest.fixture
def directory(trained: Backend, tmp_path: Path) -> Path:
    trained.save(str(tmp_path / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|begin|>",
        "eos_token": {"__type": "AddedToken", "content": "<|end|>", "lstrip": False},
        "chat_template": "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ eos_token }}{% endfor %}",
        "model_max_length": 100,
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    return tmp_path


def edit(directory: Path, **changes: Any) -> None:
    path = directory / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def load(directory: Path) -> Tokenizer:
    tokenizer = tokenizer_from_directory(directory)
    assert tokenizer is not None
    return tokenizer


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"add_bos_token": True},
        {"add_bos_token": True, "add_eos_token": True},
        {
            "added_tokens_decoder": {
                "400": {"content": "<|new|>", "special": True, "normalized": False},
                "401": {"content": "<tool>", "special": False, "normalized": False},
            }
        },
        {"pad_token": "<|pad|>"},
    ],
)
def test_a_directory_equals_transformers(directory: Path, changes: dict[str, Any]) -> None:
    from transformers import AutoTokenizer

    edit(directory, **changes)
    theirs = AutoTokenizer.from_pretrained(str(directory))
    ours = load(directory)
    for text in [*TEXTS, "<|begin|>x<|new|> <tool>y<|pad|><|end|>"]:
        for special in (True, False):
            ids = ours.encode(text, add_special_tokens=special)
            assert ids == theirs.encode(text, add_special_tokens=special), text
            for skip in (True, False):
                assert ours.decode(ids, skip) == theirs.decode(ids, skip_special_tokens=skip)
    assert ours.vocab_size == len(theirs)
    assert (ours.bos_token_id, ours.eos_token_id) == (theirs.bos_token_id, theirs.eos_token_id)
    messages = [{"role": "user", "content": "hi"}]
    assert ours.render_chat(messages) == theirs.apply_chat_template(messages, tokenize=False)


def test_truncation_in_the_file_is_not_applied(trained: Backend, directory: Path) -> None:
    cut = Backend.from_str(trained.to_str())
    cut.enable_truncation(3)
    cut.enable_padding(length=10)
    cut.save(str(directory / "tokenizer.json"))
    assert load(directory).encode(CORPUS[0]) == trained.encode(CORPUS[0]).ids


def test_where_chat_templates_come_from(directory: Path) -> None:
    messages = [{"role": "user", "content": "hi"}]
    (directory / "chat_template.jinja").write_text("from jinja")
    assert load(directory).render_chat(messages) == "from jinja"
    (directory / "chat_template.jinja").unlink()
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    edit(directory, chat_template=named)
    assert load(directory).render_chat(messages) == "plain"
    assert load(directory).render_chat(messages, tools=[{"name": "f"}]) == "tools"
    edit(directory, chat_template=None)
    (directory / "chat_template.json").write_text('{"chat_template": "from json"}')
    assert load(directory).render_chat(messages) == "from json"
    (directory / "chat_template.json").unlink()
    assert not load(directory).has_chat_template
    with pytest.raises(ValueError, match="no chat template: it completes text"):
        load(directory).render_chat(messages)


def test_directories_without_or_with_bad_files(directory: Path, tmp_path: Path) -> None:
    (directory / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer\.json: not a tokenizer that can be read"):
        tokenizer_from_directory(directory)
    (directory / "tokenizer.json").unlink()
    assert tokenizer_from_directory(directory) is None
    (directory / "tokenizer.model").write_bytes(b"")
    with pytest.raises(ValueError, match=r"has tokenizer\.model but no tokenizer\.json; make one"):
        tokenizer_from_directory(directory)


DEEP = "[" * 100_000 + "]" * 100_000


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(
            ("chat_template", value)
            for value in (
                5, True, ["x"], [{"name": "default"}], [{"template": "x"}], [[]], {"default": 5},
                [{"name": 5, "template": "x"}],
            )
        ),
        *(
            ("added_tokens_decoder", value)
            for value in (
                5, "x", ["x"], {"x": {"content": "<a>"}}, {"-1": {"content": "<a>"}}, {"1": 5},
                {"1": "<a>"}, {"1": {}}, {"1": {"content": 5}}, {"1": {"content": "\ud800"}},
                {"1": {"content": "<a>", "special": "yes"}},
                {"1": {"content": "<a>", "lstrip": []}},
            )
        ),
    ],
)  # fmt: skip
def test_settings_of_another_form_name_file_and_field(
    directory: Path, field: str, value: Any
) -> None:
    edit(directory, **{field: value})
    with pytest.raises(ValueError, match=rf"tokenizer_config\.json: {field}.* expected"):
        load(directory)


@pytest.mark.parametrize(
    "name", ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"]
)
@pytest.mark.parametrize("content", [DEEP, '{"a": ' + DEEP + "}", "\0", "{"])
def test_json_that_cannot_be_read_names_its_file(directory: Path, name: str, content: str) -> None:
    (directory / name).write_text(content)
    with pytest.raises(ValueError, match=rf"/{name}: "):
        load(directory)


def test_a_template_that_is_no_text_names_its_file(directory: Path) -> None:
    (directory / "chat_template.jinja").write_bytes(b"\xff\xfe\0")
    with pytest.raises(ValueError, match=r"chat_template\.jinja: not UTF-8 text"):
        load(directory)
    (directory / "chat_template.jinja").unlink()
    edit(directory, chat_template=None)
    (directory / "chat_template.json").write_text('{"chat_template": [5]}')
    with pytest.raises(ValueError, match=r"chat_template\.json: chat_template is \[5\]; expected"):
        load(directory)
