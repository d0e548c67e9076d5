"""Single tokens as bytes, read off the vocabulary."""

from __future__ import annotations

from functools import cached_property

from rooftile.models.tokenizer import Tokenizer

SPACE = "\u2581"  # how SentencePiece spells a space


class TokenBytes:
    """Decoding a token alone would lose spaces and parts of characters; its spelling has them all."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def __getitem__(self, token_id: int) -> bytes:
        """The bytes that a token stands for; none for an id without a token."""
        piece = self._tokenizer.id_to_token(token_id)
        if piece is None:
            return b""
        if token_id in self._added_ids:
            return piece.encode()
        if self._is_byte_level:
            try:
                return bytes(BYTE_OF[character] for character in piece)
            except KeyError:  # a token that is spelled out
                return piece.encode()
        if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
            return bytes.fromhex(piece[3:5])
        return piece.replace(SPACE, " ").encode()

    @cached_property
    def _added_ids(self) -> frozenset[int]:
        return frozenset(self._tokenizer.backend.get_added_tokens_decoder())

    @cached_property
    def _is_byte_level(self) -> bool:
        decoder = self._tokenizer.backend.decoder
        return decoder is not None and b'"ByteLevel"' in decoder.__getstate__()


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's: printable bytes are themselves, the others are counted up from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {
        **{chr(byte): byte for byte in printable},
        **{chr(0x100 + rank): byte for rank, byte in enumerate(others)},
    }


BYTE_OF = _byte_alphabet()
