"""Sampling in plain PyTorch: every step as its definition says, in float64, with full sorts."""

from __future__ import annotations

import torch
from torch import Tensor

from rooftile.kernels import Kernel, anything
from rooftile.kernels.reference.philox import uniform


def sample(
    logits: Tensor,
    temperature: Tensor | None,
    top_k: Tensor | None,
    top_p: Tensor | None,
    min_p: Tensor | None,
    repetition_penalty: Tensor | None,
    presence_penalty: Tensor | None,
    frequency_penalty: Tensor | None,
    prompt_mask: Tensor | None,
    output_counts: Tensor | None,
    bias_rows: Tensor | None,
    bias_ids: Tensor | None,
    bias_values: Tensor | None,
    banned_rows: Tensor | None,
    banned_ids: Tensor | None,
    seeds: Tensor | None,
    sample_index: Tensor | None,
    position: Tensor | None,
) -> tuple[Tensor, Tensor]:
    scores = penalise(
        logits,
        repetition_penalty,
        presence_penalty,
        frequency_penalty,
        prompt_mask,
        output_counts,
    )
    if bias_rows is not None:
        assert bias_ids is not None
        assert bias_values is not None
        scores = scores.index_put((bias_rows, bias_ids), bias_values, accumulate=True)
    if banned_rows is not None:
        assert banned_ids is not None
        banned = scores.new_tensor(-torch.inf)
        scores = scores.index_put((banned_rows, banned_ids), banned)
    tokens = scores.argmax(-1)
    if temperature is not None:
        assert seeds is not None
        assert position is not None
        index = torch.zeros_like(seeds) if sample_index is None else sample_index
        drawn = draw(
            filtered_weights(scores, temperature, top_k, top_p, min_p),
            uniform(seeds, index, position),
        )
        tokens = torch.where(temperature > 0, drawn, tokens)
    logprobs = torch.log_softmax(logits.double(), -1).gather(1, tokens.unsqueeze(1)).squeeze(1)
    valid = logits.amax(-1).isfinite() & scores.amax(-1).isfinite()
    return tokens.where(valid, -1), logprobs.where(valid, torch.nan).float()


def penalise(
    logits: Tensor,
    repetition_penalty: Tensor | None,
    presence_penalty: Tensor | None,
    frequency_penalty: Tensor | None,
    prompt_mask: Tensor | None,
    output_counts: Tensor | None,
) -> Tensor:
    scores = logits
    if repetition_penalty is not None:
        seen = torch.zeros_like(scores, dtype=torch.bool)
        if prompt_mask is not None:
            seen = seen | prompt_mask
        if output_counts is not None:
            seen = seen | (output_counts > 0)
        factor = repetition_penalty.unsqueeze(1)
        penalised = torch.where(scores > 0, scores / factor, scores * factor)
        scores = torch.where(seen, penalised, scores)
    if presence_penalty is not None:
        assert output_counts is not None
        scores = scores - presence_penalty.unsqueeze(1) * (output_counts > 0)
    if frequency_penalty is not None:
        assert output_counts is not None
        scores = scores - frequency_penalty.unsqueeze(1) * output_counts
    return scores


def filtered_weights(
    scores: Tensor,  # [rows, vocab]
    temperature: Tensor,  # [rows], 0 where the row is greedy and its weights do not matter
    top_k: Tensor | None,
    top_p: Tensor | None,
    min_p: Tensor | None,
    least_total: Tensor | None = None,  # [rows] float64
) -> Tensor:
    """Unnormalised probabilities in float64, the largest 1, and 0 where a filter took a token.

    least_total: the mass that top_p is a share of, where `scores` are not the whole vocabulary.
    """
    heat = temperature.double().where(temperature > 0, 1.0).unsqueeze(1)
    # The largest is subtracted before the division, so that no temperature overflows.
    weights = ((scores.double() - scores.double().amax(-1, keepdim=True)) / heat).exp()
    if top_k is not None or top_p is not None:
        order = scores.sort(dim=-1, descending=True, stable=True).indices
        ranked = weights.gather(1, order)
        if top_k is not None:
            place = torch.arange(scores.shape[1], device=scores.device)
            limit = top_k.where(top_k > 0, scores.shape[1]).unsqueeze(1)
            ranked = ranked.where(place < limit, 0.0)
        if top_p is not None:
            mass = ranked.cumsum(-1)
            total = mass[:, -1:]
            if least_total is not None:
                total = total.maximum(least_total.unsqueeze(1))
            share = top_p.double().unsqueeze(1)
            # The mass before a token: the token that crosses p stays; at p = 1 all do.
            kept = ((mass - ranked) < share * total) | (share >= 1)
            ranked = ranked.where(kept, 0.0)
        weights = torch.zeros_like(weights).scatter(1, order, ranked)
    if min_p is not None:
        weights = weights.where(weights >= min_p.double().unsqueeze(1), 0.0)
    return weights


def draw(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Inverse cumulative distribution: the first token whose mass up to and with it exceeds u."""
    mass = weights.cumsum(-1)
    target = uniforms.unsqueeze(1) * mass[:, -1:]
    return torch.searchsorted(mass, target, right=True).squeeze(1).clamp_max(weights.shape[1] - 1)


def top_logprobs(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    ids = logits.sort(dim=-1, descending=True, stable=True).indices[:, :k]
    return torch.log_softmax(logits.double(), -1).gather(1, ids).float(), ids.clone()


def token_ranks(logits: Tensor, token_ids: Tensor) -> Tensor:
    column = token_ids.unsqueeze(1)
    score = logits.gather(1, column)
    ids = torch.arange(logits.shape[1], device=logits.device)
    ahead = (logits > score) | ((logits == score) & (ids < column))
    return ahead.sum(-1) + 1


KERNELS = {
    "sample": Kernel(sample, anything, efficiency=0.1),
    "top_logprobs": Kernel(top_logprobs, anything, efficiency=0.1),
    "token_ranks": Kernel(token_ranks, anything, efficiency=0.3),
}
