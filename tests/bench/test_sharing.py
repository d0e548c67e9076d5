"""Pages saved by sharing: counted right on a tiny engine, recorded, refused where they mean nothing."""

from __future__ import annotations

import pytest

from rooftile.bench.failure import MeasurementFailed
from rooftile.bench.sharing import (
    LENGTHS,
    Lengths,
    Passage,
    Saving,
    beams,
    measure_sharing,
    passages,
    sampling,
)
from rooftile.engine.llm import LLM
from tests.engine.conftest import write_model

SHORT = Lengths("short", 12, 8)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_model(tmp_path_factory.mktemp("tiny")))


def tiny(path: str, num_pages: int = 400) -> LLM:
    return LLM(path, dtype="float32", random_weights=True, num_pages=num_pages, page_size=4)


def test_shares_by_hand() -> None:
    saving = Saving(in_use=(1, 3, 2), copied=(2, 4, 8))
    assert saving.average == pytest.approx((1 / 2 + 1 / 4 + 3 / 4) / 3)
    assert saving.peak == 1 - 3 / 8


def test_samples_share_the_full_pages_of_their_prompt(path: str) -> None:
    """Two full pages for all, everything after them for each: known to the page."""
    prompt = Passage(tuple(range(8)), 8)
    saving = measure_sharing(tiny(path), [prompt], sampling(3))
    assert saving.in_use[0] == 2  # the prompt alone
    assert saving.copied[0] == 3 * 2
    assert saving.in_use[1:] == (5,) * 4 + (8,) * 2
    assert saving.copied[1:] == (9,) * 4 + (12,) * 2
    one = measure_sharing(tiny(path), [prompt], sampling(1))
    assert one.in_use == one.copied
    assert one.average == one.peak == 0.0


def test_beams_save_more_than_samples(path: str) -> None:
    llm = tiny(path)
    assert llm.tokenizer is not None
    prompts = passages(llm.tokenizer.encode, Lengths("some", 20, 40), 3)
    samples, searched = (measure_sharing(llm, prompts, p) for p in (sampling(4), beams(4)))
    assert 0 < samples.average < searched.average < 0.75
    assert 0 < samples.peak < searched.peak < 0.75
    assert llm.stats().kv.in_use == 0


def test_prompts_are_prose_that_does_not_begin_alike(path: str) -> None:
    tokenizer = tiny(path).tokenizer
    assert tokenizer is not None
    for lengths in LENGTHS.values():
        found = passages(tokenizer.encode, lengths, 40)
        assert found == passages(tokenizer.encode, lengths, 40)
        assert len({p.prompt_token_ids[:8] for p in found}) == 40
        for passage in found:
            assert lengths.prompt // 2 <= len(passage.prompt_token_ids) <= lengths.prompt * 3 // 2
            assert lengths.output // 2 <= passage.max_tokens <= lengths.output * 3 // 2
        text = tokenizer.decode(found[0].prompt_token_ids)
        assert sum(c.isalpha() or c == " " for c in text) > 0.8 * len(text)
    for count in (0, 10**6):
        with pytest.raises(ValueError, match=f"num_prompts is {count}"):
            passages(tokenizer.encode, SHORT, count)


def test_counts_that_mean_nothing_are_refused(path: str) -> None:
    prompts = [Passage(tuple(range(n, n + 20)), 30) for n in range(4)]
    with pytest.raises(MeasurementFailed, match="KV pages ran out"):
        measure_sharing(tiny(path, num_pages=30), prompts, sampling(2))
    with pytest.raises(MeasurementFailed, match="prompt 0 cannot run"):
        measure_sharing(tiny(path, num_pages=4), prompts, sampling(2))
    with pytest.raises(MeasurementFailed, match="prompt 0 made 1[0-9] of 30 tokens"):
        measure_sharing(tiny(path, num_pages=8), prompts[:1], sampling(1))
