"""The spellings of words that are never generated."""

from __future__ import annotations

from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers

from rooftile.engine.bad_words import spellings
from rooftile.models.tokenizer import Tokenizer as ModelTokenizer


def test_bad_words_are_spelled_as_they_stand_within_a_text() -> None:
    """Also by a vocabulary that puts a space before every text, and one that leaves things out."""
    pieces = {"▁": 0, "▁foo": 1, "foo": 2, "b": 3, "r": 4, "▁b": 5}
    backend = Tokenizer(models.WordLevel(pieces, unk_token="▁"))
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁"), normalizers.Replace("!", "")]
    )
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("▁?foo|▁?b|r|▁"), "isolated")
    tokenizer = ModelTokenizer(backend)
    assert tokenizer.encode("foo r") == [1, 0, 4]
    assert set(spellings(["foo"], tokenizer)) == {(1,), (0, 1), (2,)}
    assert set(spellings(["br"], tokenizer)) == {(5, 4), (0, 5, 4), (3, 4)}
    assert set(spellings(["r"], tokenizer)) == {(0, 4), (0, 0, 4), (4,)}
    assert () not in spellings(["!"], tokenizer)
