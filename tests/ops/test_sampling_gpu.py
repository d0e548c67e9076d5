"""Sampling in Triton on a GPU: against the reference, and its distribution."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rooftile.kernels.reference import sampling as reference
from rooftile.ops.sampling import SamplingTensors, sample, token_ranks, top_logprobs
from tests.ops.test_sampling import chi_square_fits

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


def logits_of(kind: str, rows: int, vocab: int, seed: int) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    x = torch.randn(rows, vocab + 5, generator=generator, device="cuda")[:, :vocab]
    return {"flat": 0.1 * x, "peaked": 4 * x, "ties": (2 * x).round(), "equal": 0 * x}[kind]


def tensors(rows: int, **values: float) -> SamplingTensors:
    each = torch.arange(rows, device="cuda")
    return SamplingTensors(
        seeds=each * 7919 + 2**40,
        position=each + 3,
        sample_index=each % 3,
        **{
            name: torch.full(
                (rows,),
                value,
                dtype=torch.int64 if name == "top_k" else torch.float32,
                device="cuda",
            )
            for name, value in values.items()
        },
    )


@settings(max_examples=150, deadline=None)
@given(
    kind=st.sampled_from(["flat", "peaked", "ties", "equal"]),
    rows=st.sampled_from([1, 3, 40]),
    vocab=st.sampled_from([1, 7, 128, 5000, 49152, 128256, 262144]),
    temperature=st.sampled_from([0.0, 0.3, 1.0, 1.7]),
    filters=st.fixed_dictionaries(
        {},
        optional={
            "top_k": st.sampled_from([0, 1, 50, 700, 3000]),
            "top_p": st.sampled_from([0.05, 0.9, 0.999, 1.0]),
            "min_p": st.sampled_from([0.0, 0.02, 1.0]),
        },
    ),
    seed=st.integers(0, 2**31),
)
def test_tokens_equal_the_references(
    kind: str, rows: int, vocab: int, temperature: float, filters: dict[str, Any], seed: int
) -> None:
    logits = logits_of(kind, rows, vocab, seed)
    settings = tensors(rows, temperature=temperature, **filters)
    got = sample(logits, settings, kernel="triton")
    expected = sample(logits, settings, kernel="reference")
    torch.testing.assert_close(
        got.logprobs,
        torch.log_softmax(logits.double(), -1).gather(1, got.token_ids[:, None])[:, 0].float(),
        rtol=1e-5,
        atol=1e-5,
    )
    # A number that falls within rounding of a border between two tokens may go either way, where
    # weights are float32: then the neighbour, of nearly the same cumulative mass.
    different = (got.token_ids != expected.token_ids).nonzero()[:, 0]
    assert len(different) <= max(1, rows // 20)
    if len(different) and temperature > 0:
        one = {name: getattr(settings, name) for name in ("top_k", "top_p", "min_p")}
        rows_left = [None if t is None else t[different] for t in one.values()]
        weights = reference.filtered_weights(
            logits[different], settings.temperature[different], *rows_left
        )
        mass = weights.cumsum(-1) / weights.sum(-1, keepdim=True)
        for row, at in enumerate(different.tolist()):
            a, b = sorted((int(got.token_ids[at]), int(expected.token_ids[at])))
            assert float(mass[row, b - 1] - mass[row, a]) < 1e-5


def test_a_million_draws() -> None:
    rows, rounds = 2**16, 16
    logits = torch.randn(1, 50, device="cuda") * 2
    for filters in ({}, {"top_k": 20, "top_p": 0.9, "min_p": 0.01}, {"top_p": 0.8}):
        counts = torch.zeros(50, device="cuda", dtype=torch.int64)
        settings = tensors(rows, temperature=0.8, **filters)
        for number in range(rounds):
            position = torch.arange(rows, device="cuda") + number * rows
            now = SamplingTensors(
                **{**vars(settings), "position": position, "seeds": position * 0 + 9}
            )
            ids = sample(logits.expand(rows, -1), now, kernel="triton").token_ids
            counts += ids.bincount(minlength=50)
        weights = reference.filtered_weights(
            logits,
            *(getattr(settings, n) if getattr(settings, n) is None else getattr(settings, n)[:1]
              for n in ("temperature", "top_k", "top_p", "min_p")),
        )[0]  # fmt: skip
        assert chi_square_fits(counts.cpu(), (weights / weights.sum()).cpu())


@settings(max_examples=40, deadline=None)
@given(
    kind=st.sampled_from(["flat", "peaked", "ties", "equal"]),
    vocab=st.sampled_from([3, 1000, 49152, 151936]),
    k=st.sampled_from([0, 1, 3, 20, 512, 700]),
    seed=st.integers(0, 2**31),
)
def test_top_logprobs(kind: str, vocab: int, k: int, seed: int) -> None:
    k = min(k, vocab)
    logits = logits_of(kind, 5, vocab, seed)
    logprobs, ids = top_logprobs(logits, k, kernel="triton")
    expected, order = top_logprobs(logits, k, kernel="reference")
    assert torch.equal(ids, order)
    torch.testing.assert_close(logprobs, expected, rtol=1e-5, atol=1e-5)
    if k:
        assert token_ranks(logits, ids[:, k - 1].contiguous()).tolist() == [k] * 5


def test_penalties_bias_and_bans() -> None:
    rows, vocab = 30, 5000
    logits = 3 * torch.randn(rows, vocab, device="cuda")
    each = torch.arange(rows, device="cuda")
    settings = SamplingTensors(
        **{
            **vars(tensors(rows, temperature=0.7, top_p=0.9)),
            "repetition_penalty": torch.linspace(0.5, 2, rows, device="cuda"),
            "presence_penalty": torch.linspace(-1, 1, rows, device="cuda"),
            "frequency_penalty": torch.linspace(1, -1, rows, device="cuda"),
            "prompt_mask": torch.rand(rows, vocab, device="cuda") > 0.5,
            "output_counts": torch.randint(0, 4, (rows, vocab), device="cuda", dtype=torch.int32),
            "bias_rows": each.repeat(2),
            "bias_ids": (each * 7).repeat(2),
            "bias_values": torch.full((2 * rows,), 4.0, device="cuda"),
            "banned_rows": each,
            "banned_ids": logits.argmax(-1),
        }
    )
    got, expected = (sample(logits, settings, kernel=k) for k in ("triton", "reference"))
    assert (got.token_ids == expected.token_ids).sum() >= rows - 1


def test_bad_rows_fail_alone() -> None:
    logits = torch.randn(6, 128256, device="cuda")
    clean = sample(logits, tensors(6, temperature=1.0, top_k=50), kernel="triton")
    logits[0, 128255], logits[2, 1], logits[4] = math.nan, math.inf, -math.inf
    out = sample(logits, tensors(6, temperature=1.0, top_k=50), kernel="triton")
    assert out.token_ids[[0, 2, 4]].tolist() == [-1] * 3
    assert bool(out.logprobs[[0, 2, 4]].isnan().all())
    assert torch.equal(out.token_ids[[1, 3, 5]], clean.token_ids[[1, 3, 5]])


def test_graph_replay_and_no_waiting() -> None:
    logits = torch.randn(8, 128256, device="cuda")
    settings = tensors(8, temperature=1.0, top_k=50, top_p=0.9)
    expected = sample(logits, settings)
    torch.cuda.set_sync_debug_mode("error")
    try:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = sample(logits, settings)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    out.token_ids.fill_(-5)
    graph.replay()
    assert torch.equal(out.token_ids, expected.token_ids)
