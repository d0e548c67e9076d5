"""Sampling in Triton's interpreter, against the reference (see test_triton_attention.py).

Distributions and a million draws are tests/ops/test_sampling_gpu.py's: the interpreter takes
milliseconds for each row.
"""

from __future__ import annotations

import math
import os
from typing import Any

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1, in a process of its own", allow_module_level=True)
pytest.importorskip("triton", reason="Triton is not installed")

from rooftile.ops.sampling import SamplingTensors, sample, top_logprobs

ROWS = 3
KINDS = {
    "spread": lambda x: 2 * x,
    "ties": lambda x: x.round(),
    "equal": lambda x: 0 * x,
}


def tensors(**values: Any) -> SamplingTensors:
    each = torch.arange(ROWS)
    return SamplingTensors(
        seeds=each * 7919 + 2**40,
        position=each + 3,
        sample_index=each - 1,
        **{
            name: torch.full(
                (ROWS,), value, dtype=torch.int64 if name == "top_k" else torch.float32
            )
            for name, value in values.items()
        },
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"temperature": 1e-45, "top_k": 7},
        {"temperature": 0.7, "top_k": 5, "top_p": 0.9, "min_p": 0.01},
        {"temperature": 1.3, "top_p": 0.3},
        {"temperature": 1.0, "min_p": 0.2},
        {"temperature": 1.0, "top_k": 1100, "top_p": 0.95},  # searched: more than are ranked
        {"temperature": 1.0, "top_p": 0.8, "top_k": 0},
    ],
    ids=str,
)
def test_tokens_equal_the_references(kind: str, settings: dict[str, Any]) -> None:
    # Columns of a wider tensor; several tiles, the last one cut.
    logits = KINDS[kind](torch.randn(ROWS, 2205))[:, :2200]
    params = tensors(**settings)
    got, expected = (sample(logits, params, kernel=kernel) for kernel in ("triton", "reference"))
    assert torch.equal(got.token_ids, expected.token_ids)
    torch.testing.assert_close(got.logprobs, expected.logprobs, rtol=1e-5, atol=1e-5)


def test_bad_rows_penalties_bias_and_bans() -> None:
    logits = torch.randn(ROWS, 300)
    logits[1, 299] = math.nan
    each = torch.arange(ROWS)
    params = SamplingTensors(
        **{
            **vars(tensors(temperature=0.9, top_k=4)),
            "repetition_penalty": torch.tensor([1.5, 1.0, 0.5]),
            "presence_penalty": torch.tensor([0.3, 0.0, -0.5]),
            "frequency_penalty": torch.tensor([0.1, 0.0, 0.2]),
            "prompt_mask": torch.rand(ROWS, 300) > 0.5,
            "output_counts": torch.randint(0, 3, (ROWS, 300), dtype=torch.int32),
            "bias_rows": each.repeat(2),
            "bias_ids": each.repeat(2),
            "bias_values": torch.full((2 * ROWS,), 2.0),
            "banned_rows": each,
            "banned_ids": logits.nan_to_num().argmax(-1),
        }
    )
    got, expected = (sample(logits, params, kernel=kernel) for kernel in ("triton", "reference"))
    assert torch.equal(got.token_ids, expected.token_ids)
    assert got.token_ids[1] == -1
    assert bool(got.logprobs[1].isnan())


@pytest.mark.parametrize(("kind", "k"), [("spread", 1), ("ties", 30), ("equal", 30), ("ties", 512)])
def test_top_logprobs(kind: str, k: int) -> None:
    logits = KINDS[kind](torch.randn(ROWS, 2500))
    logits[0, 7] = -math.inf
    logprobs, ids = top_logprobs(logits, k, kernel="triton")
    expected, order = top_logprobs(logits, k, kernel="reference")
    assert torch.equal(ids, order)
    torch.testing.assert_close(logprobs, expected, rtol=1e-5, atol=1e-5)
