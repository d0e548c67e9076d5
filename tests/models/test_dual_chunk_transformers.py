"""Whole models with dual chunk attention: transformers', whose attention is the matrix of positions."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rooftile.engine.llm import LLM
from rooftile.engine.params import SamplingParams
from tests.models import hugging_face
from tests.ops.test_dual_chunk import positions_of

CHUNK_SIZE, LOCAL_SIZE, ORIGINAL = 12, 4, 10
DUAL_CHUNK = f"chunk_size={CHUNK_SIZE},local_size={LOCAL_SIZE},original={ORIGINAL}"
TOKENS = torch.randint(3, 67, (60,), generator=torch.Generator().manual_seed(2)).tolist()
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {"head_dim": 8},
    # Windows in half of the layers, which keep them, soft caps and a scale of its own.
    "gemma2": {"head_dim": 8, "sliding_window": 6, "query_pre_attn_scalar": 5, "pad_token_id": 0},
    # Half of each head is turned.
    "phi3": {"partial_rotary_factor": 0.5, "pad_token_id": 0, "eos_token_id": 1},
}


def turn(x: Tensor, by: Tensor, inverse: Tensor) -> Tensor:
    """x [..., tokens, dim], turned by so many positions more [tokens], in float64."""
    x, half = x.double(), len(inverse)
    angles = by[:, None].double() * inverse.double()
    first, second, rest = x.split((half, half, x.shape[-1] - 2 * half), -1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), -1)


def by_matrix(
    module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, *, scaling: float, **options: Any
) -> tuple[Tensor, None]:
    """What transformers calls for attention; q and k [batch, heads, tokens, dim] come rotated."""
    at = torch.arange(q.shape[2])
    k, v = (x.double().repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    hidden = at > at[:, None]
    window = options.get("sliding_window")
    if window is not None:
        hidden = hidden | (at <= at[:, None] - window)
        scores = q.double() @ k.mT
    else:
        query, key, _ = positions_of(CHUNK_SIZE, LOCAL_SIZE, len(at))
        keys = turn(k, key - at, module.inverse)
        factor = (0.1 * torch.log((at + 1).double() / ORIGINAL) + 1).clamp(min=1).square()
        columns = [
            (turn(q, query[:, j] - at, module.inverse) * keys[:, :, j, None]).sum(-1) * factor
            for j in range(len(at))
        ]
        scores = torch.stack(columns, -1)
    scores = scores * scaling
    if options.get("softcap"):
        scores = options["softcap"] * torch.tanh(scores / options["softcap"])
    weights = scores.masked_fill(hidden, -math.inf).softmax(-1)
    return (weights @ v).to(q.dtype).transpose(1, 2), None


def log_probabilities(model: Any) -> Tensor:
    """Of each token of TOKENS but the first."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, eager_mask
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register("dual_chunk", by_matrix)
    ALL_MASK_ATTENTION_FUNCTIONS.register("dual_chunk", eager_mask)
    for layer in model.model.layers:
        layer.self_attn.inverse = model.model.rotary_emb.inv_freq
    model.set_attn_implementation("dual_chunk")
    logits = hugging_face.logits(model, TOKENS)[:-1].log_softmax(-1)
    return logits.gather(1, torch.tensor(TOKENS[1:])[:, None])[:, 0]


@pytest.mark.parametrize("model_type", MODELS)
def test_equals_transformers(model_type: str, tmp_path: Path) -> None:
    model = hugging_face.random_model(model_type, num_hidden_layers=2, **MODELS[model_type])
    hugging_face.save(model, tmp_path)
    expected = log_probabilities(model)
    for tokens_a_step in (None, 7):
        llm = LLM(
            str(tmp_path),
            dtype="float32",
            page_size=4,
            num_pages=100,
            max_model_len=len(TOKENS) + 1,
            max_num_batched_tokens=tokens_a_step,
            dual_chunk=DUAL_CHUNK,
        )
        (output,) = llm.generate([TOKENS], SamplingParams(max_tokens=0, prompt_logprobs=0))
        assert output.prompt_logprobs is not None
        got = [entry.logprob for entry in output.prompt_logprobs[1:] if entry is not None]
        torch.testing.assert_close(torch.tensor(got), expected, rtol=1e-4, atol=1e-4)
