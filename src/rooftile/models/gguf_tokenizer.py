"""The tokenizer that a GGUF file describes in its metadata."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rooftile.models.gguf import GGUFFile
from rooftile.models.tokenizer import Tokenizer

if TYPE_CHECKING:
    import tokenizers

# Token types of llama.cpp.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4

# How each vocabulary cuts text before merging, as its maker published it. Contractions, a word with
# at most one character before it, numbers of up to N digits, punctuation, line breaks, spaces.
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}]*[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}]+{_CONTRACTION}"
    rf"|[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}]+[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}]*{_CONTRACTION}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPLITS = {
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "smaug-bpe": _LLAMA3,  # fine-tunes of Llama 3
    "dbrx": _LLAMA3,  # OLMo 2 and Phi-4
    "gpt-4o": _GPT4O,  # Phi-4-mini
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "tekken": _TEKKEN,
}
# GPT-2's rule, numbers cut into digits first; "refact" and "starcoder" are Granite's.
DIGITS = ("smollm", "refact", "starcoder")
PRE_TOKENIZERS = ("default", "gpt-2", *DIGITS, *SPLITS)
# A whole pre-token that is in the vocabulary is taken without merging.
IGNORE_MERGES = ("llama-bpe", "llama3", "llama-v3", "tekken")
# Where the file does not say, these begin every text with the begin-of-text token.
ADD_BOS = ("llama-bpe", "llama3", "llama-v3", "tekken")
# Composed characters; the makers' own tokenizers do so.
NFC = ("qwen2", "deepseek-r1-qwen")

# Phi-3's SentencePiece tokens swallow the white space that follows them, but for these.
PHI3_KEEPS = frozenset({"<unk>", "<s>", "<|endoftext|>"})
# Mistral's second and third SentencePiece vocabularies, and only they, have this control token.
MISTRAL_INSTRUCTION = "[INST]"

SPECIAL_ROLES = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}

TEMPLATE = "tokenizer.chat_template"
# Of each field: its type, or that of the entries of its list (which a file has of one type only).
TEXT, NUMBER, WHOLE, SWITCH = (str,), (int, float), (int,), (bool,)
FIELDS: dict[str, tuple[bool, tuple[type, ...]]] = {
    **{f"tokenizer.ggml.{name}": (True, TEXT) for name in ("tokens", "merges")},
    TEMPLATE: (False, TEXT),
    "tokenizer.ggml.token_type": (True, WHOLE),
    "tokenizer.ggml.scores": (True, NUMBER),
    "tokenizer.chat_templates": (True, TEXT),
    **{f"tokenizer.ggml.{name}": (False, TEXT) for name in ("model", "pre")},
    **{f"tokenizer.ggml.{name}": (False, WHOLE) for name in SPECIAL_ROLES.values()},
    **{
        f"tokenizer.ggml.{name}": (False, SWITCH)
        for name in ("add_bos_token", "add_eos_token", "add_space_prefix")
    },
}
NAMES: dict[tuple[type, ...], str] = {
    TEXT: "text",
    NUMBER: "numbers",
    WHOLE: "whole numbers",
    SWITCH: "true or false",
}


def tokenizer_from_gguf(file: GGUFFile) -> Tokenizer | None:
    """The tokenizer of a GGUF file, or `None` where it has no vocabulary.

    Kinds: "gpt2" (byte-level BPE) and "llama" (SentencePiece BPE with byte fallback).

    Raises:
        ValueError: another kind, an unknown pre-tokenizer, a field of another type, or lists that do
            not fit together.
    """
    metadata = file.metadata
    if "tokenizer.ggml.tokens" not in metadata:
        return None
    _check_types(file)
    kind = metadata.get("tokenizer.ggml.model")
    tokens = metadata["tokenizer.ggml.tokens"]
    types = metadata.get("tokenizer.ggml.token_type", [1] * len(tokens))
    if len(types) != len(tokens):
        raise ValueError(
            f"{file.path}: {len(tokens)} tokenizer.ggml.tokens but {len(types)} tokenizer.ggml.token_type"
        )
    pre = metadata.get("tokenizer.ggml.pre", "default")
    if kind == "gpt2":
        backend = _byte_level(file, tokens, pre)
        add_bos = pre in ADD_BOS
    elif kind == "llama":
        backend = _sentence_piece(file, tokens, types)
        add_bos = True
    else:
        raise ValueError(
            f"{file.path}: tokenizer.ggml.model is {kind!r}; supported are 'gpt2' and 'llama'"
        )
    strips = kind == "llama" and metadata.get("general.architecture") == "phi3"
    _add_tokens(backend, tokens, types, frozenset(tokens) - PHI3_KEEPS if strips else frozenset())
    special = {}
    for role, key in SPECIAL_ROLES.items():
        token_id = metadata.get(f"tokenizer.ggml.{key}")
        if token_id is None:
            continue
        if not 0 <= token_id < len(tokens):
            raise ValueError(
                f"{file.path}: tokenizer.ggml.{key} is {token_id}, but there are {len(tokens)} tokens"
            )
        special[role] = tokens[token_id]
    return Tokenizer(
        backend,
        special_tokens=special,
        chat_template=_templates(metadata),
        add_bos=metadata.get("tokenizer.ggml.add_bos_token", add_bos),
        add_eos=metadata.get("tokenizer.ggml.add_eos_token", False),
    )


def _check_types(file: GGUFFile) -> None:
    for key, value in file.metadata.items():
        listed, kinds = (
            (False, TEXT) if key.startswith(f"{TEMPLATE}.") else FIELDS.get(key, (False, ()))
        )
        if not kinds:
            continue
        entries = value if listed and isinstance(value, list) else [value]
        if isinstance(value, list) == listed and (not entries or type(entries[0]) in kinds):
            continue
        expected = f"a list of {NAMES[kinds]}" if listed else NAMES[kinds]
        raise ValueError(f"{file.path}: {key} is {value!r:.80}; expected {expected}")


def _byte_level(file: GGUFFile, tokens: Sequence[str], pre: str) -> tokenizers.Tokenizer:
    from tokenizers import Regex, Tokenizer, decoders, normalizers, pre_tokenizers

    if pre not in PRE_TOKENIZERS:
        raise ValueError(
            f"{file.path}: tokenizer.ggml.pre is {pre!r}; supported pre-tokenizers are "
            f"{', '.join(PRE_TOKENIZERS)}"
        )
    merges = file.metadata.get("tokenizer.ggml.merges")
    if merges is None:
        raise ValueError(
            f"{file.path}: tokenizer.ggml.merges is missing; a 'gpt2' tokenizer needs it"
        )
    backend = Tokenizer(
        _bpe(
            file,
            vocab={token: index for index, token in enumerate(tokens)},
            merges=[_pair(file, merge) for merge in merges],
            ignore_merges=pre in IGNORE_MERGES,
        )
    )
    bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if pre in SPLITS:
        split = pre_tokenizers.Split(Regex(SPLITS[pre]), "isolated")
        backend.pre_tokenizer = pre_tokenizers.Sequence([split, bytes_only])
    elif pre in DIGITS:
        digits = pre_tokenizers.Digits(individual_digits=True)
        backend.pre_tokenizer = pre_tokenizers.Sequence([digits, gpt2])
    else:
        backend.pre_tokenizer = gpt2
    if pre in NFC:
        backend.normalizer = normalizers.NFC()
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentence_piece(
    file: GGUFFile, tokens: Sequence[str], types: Sequence[int]
) -> tokenizers.Tokenizer:
    from tokenizers import Tokenizer, decoders, normalizers, pre_tokenizers

    scores = file.metadata.get("tokenizer.ggml.scores")
    if scores is None or len(scores) != len(tokens):
        raise ValueError(
            f"{file.path}: a 'llama' tokenizer needs one of tokenizer.ggml.scores for each of "
            f"{len(tokens)} tokens, found {0 if scores is None else len(scores)}"
        )
    unknown = [token for token, kind in zip(tokens, types, strict=True) if kind == UNKNOWN]
    backend = Tokenizer(
        _bpe(
            file,
            vocab={token: index for index, token in enumerate(tokens)},
            merges=_merges_from_scores(tokens, scores, types),
            unk_token=unknown[0] if unknown else None,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    add_prefix = file.metadata.get("tokenizer.ggml.add_space_prefix", True)
    spaces = normalizers.Replace(" ", "▁")
    if not add_prefix:
        backend.normalizer = spaces
    elif (MISTRAL_INSTRUCTION, CONTROL) in zip(tokens, types, strict=True):
        # A space in front of the text only, not after each special token.
        backend.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme="first", split=False)
    else:
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence(
        [*steps, *([decoders.Strip(" ", 1, 0)] if add_prefix else [])]
    )
    return backend


def _bpe(file: GGUFFile, **options: Any) -> tokenizers.models.BPE:
    from tokenizers import models

    try:
        return models.BPE(**options)
    except Exception as error:  # the library raises no narrower class
        raise ValueError(f"{file.path}: tokens and merges do not fit together: {error}") from None


def _pair(file: GGUFFile, merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    if not left or not right:
        raise ValueError(f"{file.path}: tokenizer.ggml.merges holds {merge!r}; expected two parts")
    return left, right


def _merges_from_scores(
    tokens: Sequence[str], scores: Sequence[float], types: Sequence[int]
) -> list[tuple[str, str]]:
    """SentencePiece merges the pair whose result scores highest: so that is the order of merges.

    Among the ways to split one token, longer left parts come first. Text can only become normal
    tokens: the others are found before, or must not be spelled out by a user.
    """
    score_of = {
        token: score
        for token, score, kind in zip(tokens, scores, types, strict=True)
        if kind == NORMAL
    }
    normal = set(score_of)
    merges = []
    # Plain loops: a large vocabulary has a million splits, and this is much of its time to load.
    for token in sorted(score_of, key=score_of.__getitem__, reverse=True):
        for cut in range(len(token) - 1, 0, -1):
            if (right := token[cut:]) in normal and (left := token[:cut]) in normal:
                merges.append((left, right))
    return merges


def _add_tokens(
    backend: tokenizers.Tokenizer,
    tokens: Sequence[str],
    types: Sequence[int],
    strips: frozenset[str],
) -> None:
    """strips: the tokens that swallow the white space after them."""
    from tokenizers import AddedToken

    special = [
        AddedToken(token, normalized=False, special=True, rstrip=token in strips)
        for token, kind in zip(tokens, types, strict=True)
        if kind in (CONTROL, UNKNOWN)
    ]
    backend.add_special_tokens(special)
    backend.add_tokens(
        [
            AddedToken(token, normalized=False, special=False, rstrip=token in strips)
            for token, kind in zip(tokens, types, strict=True)
            if kind == USER_DEFINED
        ]
    )


def _templates(metadata: Mapping[str, Any]) -> str | dict[str, str] | None:
    template = metadata.get(TEMPLATE)
    names = metadata.get("tokenizer.chat_templates", [])
    named = {
        name: metadata[f"{TEMPLATE}.{name}"] for name in names if f"{TEMPLATE}.{name}" in metadata
    }
    if not named:
        return template
    return {**({"default": template} if template else {}), **named}
