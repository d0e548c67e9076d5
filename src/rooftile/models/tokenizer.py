"""Text to token ids and back, on the `tokenizers` library."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rooftile.models.chat_template import ChatTemplate

if TYPE_CHECKING:
    import tokenizers

TOKEN_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


class Tokenizer:
    """A vocabulary, its special tokens, and the model's chat template where it has one.

    special_tokens: by role, as Hugging Face names them ("bos_token", "eos_token", ...) -> the token.
    add_bos, add_eos: what `encode` puts around a text; `None` leaves it to the backend's own rule.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        special_tokens: Mapping[str, str] | None = None,
        chat_template: str | Mapping[str, str] | None = None,
        add_bos: bool | None = None,
        add_eos: bool | None = None,
    ) -> None:
        self.backend = backend
        self.special_tokens = dict(special_tokens or {})
        backend.no_truncation()
        backend.no_padding()
        if add_bos is not None or add_eos is not None:
            self._surround(bool(add_bos), bool(add_eos))
        self._template = (
            None if chat_template is None else ChatTemplate(chat_template, self.special_tokens)
        )

    def encode(
        self, text: str, add_special_tokens: bool = True, *, parse_special: bool = True
    ) -> list[int]:
        """Token ids of `text`.

        add_special_tokens: put around it what the model expects (often a token that begins the
            text); leave it off for a rendered chat, which has them already.
        parse_special: a special token's text inside `text` becomes that token; otherwise it is
            spelled out like any other text, so that users cannot forge it.

        Raises:
            ValueError: text that UTF-8 cannot express.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:  # a lone surrogate, as JSON may escape one
            raise ValueError(f"not valid Unicode text: {error}") from None
        backend = self.backend if parse_special else self._literal
        return backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of these ids; bytes that are no whole character become U+FFFD."""
        return self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """The prompt's text for a conversation, as the model's chat template writes it.

        Encode it with add_special_tokens=False. variables: passed to the template (tools, ...).

        Raises:
            ValueError: the model has no chat template, or it refuses these messages.
        """
        if self._template is None:
            raise ValueError(
                "this model has no chat template: it completes text; use generate, or an instruct model"
            )
        return self._template.render(
            messages, add_generation_prompt=add_generation_prompt, **variables
        )

    @property
    def has_chat_template(self) -> bool:
        return self._template is not None

    @property
    def vocab_size(self) -> int:
        """Tokens in the vocabulary, added ones included (a model's matrices may have more rows)."""
        return self.backend.get_vocab_size(with_added_tokens=True)

    @property
    def bos_token_id(self) -> int | None:
        return self._id_of("bos_token")

    @property
    def eos_token_id(self) -> int | None:
        return self._id_of("eos_token")

    def token_to_id(self, token: str) -> int | None:
        return self.backend.token_to_id(token)

    def id_to_token(self, token_id: int) -> str | None:
        """The token as the vocabulary spells it, which is not its text; `None` outside of it."""
        return self.backend.id_to_token(token_id)

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """The ids that `decode` skips."""
        added = self.backend.get_added_tokens_decoder()
        return frozenset(token_id for token_id, token in added.items() if token.special)

    @cached_property
    def _literal(self) -> tokenizers.Tokenizer:
        # A second one, because the switch is a state of the backend and encodings run in threads.
        backend = copy.deepcopy(self.backend)
        backend.encode_special_tokens = True
        return backend

    def _id_of(self, role: str) -> int | None:
        token = self.special_tokens.get(role)
        return None if token is None else self.backend.token_to_id(token)

    def _surround(self, add_bos: bool, add_eos: bool) -> None:
        from tokenizers.processors import TemplateProcessing

        around = {}
        for role, wanted in (("bos_token", add_bos), ("eos_token", add_eos)):
            token, token_id = self.special_tokens.get(role), self._id_of(role)
            if wanted and token is not None and token_id is not None:
                around[role] = (token, token_id)
        pieces = [
            *([around["bos_token"][0]] if "bos_token" in around else []),
            "$A",
            *([around["eos_token"][0]] if "eos_token" in around else []),
        ]
        self.backend.post_processor = TemplateProcessing(
            single=pieces,
            pair=[*pieces, *(piece.replace("$A", "$B") for piece in pieces)],
            special_tokens=list(around.values()),
        )


def tokenizer_from_directory(directory: Path) -> Tokenizer | None:
    """The tokenizer of a model in Hugging Face format, or `None` where the directory has none.

    What `encode` puts around a text is what tokenizer.json says, as in transformers 5: the flags
    add_bos_token and add_eos_token of tokenizer_config.json only matter where there is no such file.

    Raises:
        ValueError: files that are damaged, or a vocabulary without a tokenizer.json.
    """
    file = directory / "tokenizer.json"
    if not file.is_file():
        others = [
            name
            for name in ("tokenizer.model", "tekken.json", "vocab.json", "vocab.txt")
            if (directory / name).is_file()
        ]
        if others:
            raise ValueError(
                f"{directory}: has {', '.join(others)} but no tokenizer.json; make one with "
                f"transformers' AutoTokenizer.from_pretrained(…).save_pretrained(…)"
            )
        return None
    import tokenizers

    try:
        backend = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises no narrower class
        raise ValueError(f"{file}: not a tokenizer that can be read: {error}") from None
    settings = directory / "tokenizer_config.json"
    config = read_json(settings)
    special = {
        role: text
        for role, value in {**read_json(directory / "special_tokens_map.json"), **config}.items()
        if role.endswith("_token") and (text := _text_of(value)) is not None
    }
    try:
        _add_missing_tokens(backend, config, special)
    except ValueError as error:
        raise ValueError(f"{settings}: {error}") from None
    return Tokenizer(
        backend,
        special_tokens=special,
        chat_template=_template_of(directory, config),
    )


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file, empty where there is no such file."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value


def _text_of(token: Any) -> str | None:
    """A token in a configuration is a string, or an object with the string as "content"."""
    text = token.get("content") if isinstance(token, Mapping) else token
    if not isinstance(text, str):
        return None
    try:
        text.encode()
    except UnicodeEncodeError:  # a lone surrogate, which no vocabulary can hold
        return None
    return text


def _add_missing_tokens(
    backend: tokenizers.Tokenizer, config: Mapping[str, Any], special: Mapping[str, str]
) -> None:
    """Tokens that only tokenizer_config.json knows, in the order of their ids; and their being special."""
    from tokenizers import AddedToken

    for content, flags in _added_tokens(config):
        if backend.token_to_id(content) is None:
            backend.add_tokens([AddedToken(content, **flags)])
    known = {
        token.content for token in backend.get_added_tokens_decoder().values() if token.special
    }
    extra = [text for text in special.values() if text not in known]
    if extra:
        backend.add_special_tokens([AddedToken(text, normalized=False) for text in extra])


def _added_tokens(config: Mapping[str, Any]) -> list[tuple[str, dict[str, bool]]]:
    """Text and flags of each entry of added_tokens_decoder, in the order of their ids."""
    name = "added_tokens_decoder"
    entries = config.get(name) or {}
    if not isinstance(entries, dict):
        raise ValueError(f"{name} is {entries!r:.80}; expected an object")
    tokens = {}
    for key, entry in entries.items():
        if not key.isdecimal():
            raise ValueError(f"{name} has the key {key!r:.80}; expected a token id")
        content = _text_of(entry) if isinstance(entry, dict) else None
        if content is None:
            raise ValueError(
                f"{name}[{key!r:.80}] is {entry!r:.80}; expected an object with its text as content"
            )
        flags = {flag: entry[flag] for flag in TOKEN_FLAGS if flag in entry}
        for flag, value in flags.items():
            if not isinstance(value, bool):
                raise ValueError(
                    f"{name}[{key!r:.80}]: {flag} is {value!r:.80}; expected true or false"
                )
        tokens[int(key)] = (content, flags)
    return [tokens[token_id] for token_id in sorted(tokens)]


def _template_of(directory: Path, config: Mapping[str, Any]) -> str | dict[str, str] | None:
    file = directory / "chat_template.jinja"
    if file.is_file():
        try:
            return file.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{file}: not UTF-8 text: {error}") from None
    file, template = directory / "tokenizer_config.json", config.get("chat_template")
    if not template:
        file = directory / "chat_template.json"
        template = read_json(file).get("chat_template")
    if template is None or isinstance(template, str):
        return template
    named = template
    if isinstance(template, list) and all(isinstance(entry, dict) for entry in template):
        named = {entry.get("name"): entry.get("template") for entry in template}
    if not isinstance(named, dict) or not all(isinstance(t, str) for p in named.items() for t in p):
        raise ValueError(
            f"{file}: chat_template is {template!r:.80}; expected a text, or a list of objects with "
            f"the texts name and template"
        )
    return named
