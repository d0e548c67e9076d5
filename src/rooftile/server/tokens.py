"""Single tokens as text, and what may be said about a text before it is encoded."""

from __future__ import annotations

from functools import cached_property

from rooftile.engine.token_bytes import TokenBytes
from rooftile.models.tokenizer import Tokenizer


class TokenTexts:
    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._bytes = None if tokenizer is None else TokenBytes(tokenizer)
        # Answers with log-probabilities ask again and again, on the event loop.
        self._known_bytes: dict[int, bytes] = {}
        self._known_texts: dict[int, str] = {}

    def bytes_of(self, token_id: int) -> bytes:
        known = self._known_bytes.get(token_id)
        if known is None:
            known = b"" if self._bytes is None else self._bytes[token_id]
            self._known_bytes[token_id] = known
        return known

    def text_of(self, token_id: int) -> str:
        """The token as text; `bytes:\\xe2\\x82` where it is no whole characters, as OpenAI has it."""
        known = self._known_texts.get(token_id)
        if known is None:
            known = self._known_texts[token_id] = self._text_of(token_id)
        return known

    def _text_of(self, token_id: int) -> str:
        raw = self.bytes_of(token_id)
        if not raw:
            return f"token_id:{token_id}"
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    @cached_property
    def special_ids(self) -> frozenset[int]:
        return frozenset() if self._tokenizer is None else self._tokenizer.special_ids

    def least_tokens(self, text: str) -> int:
        """A lower bound of the tokens of `text`, without encoding it."""
        return -(-len(text) // self._most_characters) if self._most_characters else 0

    @cached_property
    def _most_characters(self) -> int:
        """Of one token; 0 where a normalizer, a token that swallows the white space around it, or
        unknown characters that become one token could make a text shorter."""
        if self._tokenizer is None:
            return 0
        backend = self._tokenizer.backend
        added = backend.get_added_tokens_decoder().values()
        if (
            backend.normalizer is not None
            or any(token.lstrip or token.rstrip for token in added)
            or getattr(backend.model, "fuse_unk", False)
        ):
            return 0
        vocabulary = backend.get_vocab(with_added_tokens=True)
        return max(map(len, vocabulary), default=0)  # never fewer characters than it stands for
