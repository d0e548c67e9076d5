"""Beam search on the demo model finds what transformers finds, on 20 prompts of real English."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from rooftile.engine.llm import LLM
from rooftile.engine.params import BeamSearchParams
from rooftile.models.resolve import resolve

FIXTURE = Path(__file__).parents[1] / "models" / "smollm2_greedy.json"
PROMPTS = [entry["prompt_token_ids"] for entry in json.loads(FIXTURE.read_text())]
NEW_TOKENS = 10


@pytest.mark.slow
def test_equals_transformers_on_the_demo_model() -> None:
    pytest.importorskip("accelerate", reason="transformers needs it to read a GGUF file")
    from transformers import AutoModelForCausalLM

    llm = LLM("demo", dtype="float32", max_num_seqs=64)
    path = resolve("demo").path
    peer = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    ).eval()
    assert len(PROMPTS) == 20
    for width in (2, 4, 8):
        params = BeamSearchParams(width=width, max_tokens=NEW_TOKENS)
        outputs = llm.beam_search(PROMPTS, params)
        for prompt, output in zip(PROMPTS, outputs, strict=True):
            ids = torch.tensor([prompt])
            with torch.no_grad():
                result = peer.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    num_beams=width,
                    max_new_tokens=NEW_TOKENS,
                    do_sample=False,
                    eos_token_id=sorted(llm._core._eos_token_ids),
                    pad_token_id=0,
                    output_scores=True,
                    return_dict_in_generate=True,
                )
            (best,) = output.outputs
            expected = result.sequences[0, ids.shape[1] :].tolist()[: len(best.token_ids)]
            assert best.token_ids == expected, (width, prompt)
            assert best.score == pytest.approx(float(result.sequences_scores[0]), abs=1e-3)
    assert llm.stats().kv.in_use == 0
