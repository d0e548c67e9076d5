"""The quality bench: its text, its windows, and what quantisation may cost the demo model."""

from __future__ import annotations

import math

import pytest

from rooftile.bench.quality import loss, reference_text, windows
from rooftile.engine.llm import LLM
from rooftile.kernels.cpu import library


def test_the_text_is_english_and_long_enough() -> None:
    text = reference_text()
    assert len(text) > 300_000
    assert text.count(" the ") > 3000
    assert text == reference_text()


def test_windows_are_spread_over_the_text() -> None:
    found = list(windows(range(1000), 40, 10))
    assert [w[0] for w in found] == [0, 330, 660, 990]
    assert all(w == list(range(w[0], w[0] + 10)) for w in found)
    assert list(windows(range(9), 9, 9)) == [list(range(9))]
    with pytest.raises(ValueError, match="the text has 5 tokens; 6 were asked for"):
        list(windows(range(5), 6, 3))


@pytest.mark.skipif(library.refusal() is not None, reason=str(library.refusal()))
def test_quantised_weights_lose_little() -> None:
    losses = {}
    for quantization in ("none", "int8", "int4"):
        llm = LLM("demo", quantization=quantization, max_num_seqs=8)
        assert llm.tokenizer is not None
        ids = llm.tokenizer.encode(reference_text(), add_special_tokens=False)
        losses[quantization] = loss(llm, list(windows(ids, 1024, 256)))
    assert 1 < losses["none"] < 4
    assert math.isclose(losses["int8"], losses["none"], rel_tol=0.005)
    assert math.isclose(losses["int4"], losses["none"], rel_tol=0.04)
