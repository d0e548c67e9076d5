"""Sampling on a CPU without sorting the vocabulary.

The same definition as the reference, whose functions do the exact work on few tokens: each row is
first cut to candidates, a set that holds every token its filters can keep, found by comparing
scores with one threshold. Where nothing filters, weights are float32 and their sums float64. What
to do is decided on values, which a CPU reads for nothing, and rows are taken in groups whose
temporaries stay in its caches.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from rooftile.kernels import Kernel
from rooftile.kernels.reference.philox import uniform
from rooftile.kernels.reference.sampling import draw, filtered_weights, penalise

# Candidates are found in float32; the margin keeps those whose exact weight is at the border.
MARGIN = 0.999
# Rows with more candidates than this are filtered one by one, not padded to a common width.
WIDE = 4096
BLOCK = 256
# Up to so many rows one thread samples: torch wakes and joins its threads for each of some thirty
# small operations, which beside a busy neighbour takes ten times as long as the work.
FEW_ROWS = 8
GROUP_ELEMENTS = 2**19

P = ParamSpec("P")
R = TypeVar("R")


def few_rows_alone(kernel: Callable[P, R]) -> Callable[P, R]:
    @wraps(kernel)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        logits, threads = args[0], torch.get_num_threads()
        assert isinstance(logits, Tensor)
        if logits.shape[0] > FEW_ROWS or threads == 1:
            return kernel(*args, **kwargs)
        torch.set_num_threads(1)
        try:
            return kernel(*args, **kwargs)
        finally:
            torch.set_num_threads(threads)

    return run


@few_rows_alone
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
    scores = scores_of(
        logits,
        repetition_penalty,
        presence_penalty,
        frequency_penalty,
        prompt_mask,
        output_counts,
        bias_rows,
        bias_ids,
        bias_values,
        banned_rows,
        banned_ids,
    )
    valid = logits.amax(-1).isfinite()
    if scores is not logits:
        valid &= scores.amax(-1).isfinite()
    drawn = torch.zeros_like(valid) if temperature is None else valid & (temperature > 0)
    rows = drawn.nonzero().squeeze(1)
    tokens = torch.empty_like(rows) if rows.numel() == drawn.numel() else first_argmax(scores)
    if rows.numel():
        assert temperature is not None
        assert seeds is not None
        assert position is not None
        index = torch.zeros_like(seeds) if sample_index is None else sample_index
        uniforms = uniform(seeds[rows], index[rows], position[rows])
        size = _group_size(scores)
        for group, numbers in zip(rows.split(size), uniforms.split(size), strict=True):
            tokens[group] = _drawn(
                scores[group],
                numbers,
                temperature[group],
                _rows_of(top_k, group),
                _rows_of(top_p, group),
                _rows_of(min_p, group),
            )
    logprobs = torch.log_softmax(logits, -1).gather(1, tokens.unsqueeze(1)).squeeze(1)
    return tokens.where(valid, -1), logprobs.where(valid, torch.nan)


def scores_of(
    logits: Tensor,  # [rows, vocab]
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
) -> Tensor:
    """Logits after penalties, bias and bans: `logits` itself where there are none, dense rows else."""
    scores = logits
    if any(p is not None for p in (repetition_penalty, presence_penalty, frequency_penalty)):
        scores = _penalised(
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
    return scores


def _rows_of(parameter: Tensor | None, rows: Tensor) -> Tensor | None:
    return None if parameter is None else parameter[rows]


def _group_size(scores: Tensor) -> int:
    return max(1, GROUP_ELEMENTS // scores.shape[1])


def first_argmax(scores: Tensor) -> Tensor:
    """argmax with the lowest index among equals, by the maxima of blocks, which torch finds faster."""
    rows, vocab = scores.shape
    blocks = vocab // BLOCK
    if rows == 1 or blocks < 2:
        return scores.argmax(-1)
    body = scores[:, : blocks * BLOCK].unflatten(1, (blocks, BLOCK))
    maxima = body.amax(-1)
    block = maxima.argmax(-1)
    best = maxima.amax(-1)
    each = torch.arange(rows, device=scores.device)
    index = block * BLOCK + body[each, block].argmax(-1)
    if vocab > blocks * BLOCK:
        rest = scores[:, blocks * BLOCK :]
        index = torch.where(rest.amax(-1) > best, blocks * BLOCK + rest.argmax(-1), index)
    return index


def _penalised(
    logits: Tensor,
    repetition_penalty: Tensor | None,
    presence_penalty: Tensor | None,
    frequency_penalty: Tensor | None,
    prompt_mask: Tensor | None,
    output_counts: Tensor | None,
) -> Tensor:
    """The penalties at the tokens seen: each as a row of one token."""
    scores = logits.clone()
    for start in range(0, logits.shape[0], _group_size(logits)):
        group = slice(start, start + _group_size(logits))
        seen = None if output_counts is None else output_counts[group] > 0
        if prompt_mask is not None:
            seen = prompt_mask[group] if seen is None else seen | prompt_mask[group]
        assert seen is not None
        rows, ids = seen.nonzero(as_tuple=True)
        rows += start
        penalised = penalise(
            logits[rows, ids].unsqueeze(1),
            _rows_of(repetition_penalty, rows),
            _rows_of(presence_penalty, rows),
            _rows_of(frequency_penalty, rows),
            None if prompt_mask is None else prompt_mask[rows, ids].unsqueeze(1),
            None if output_counts is None else output_counts[rows, ids].unsqueeze(1),
        )
        scores[rows, ids] = penalised.squeeze(1)
    return scores


def _drawn(
    scores: Tensor,  # [rows, vocab], each row with a finite largest score
    uniforms: Tensor,
    temperature: Tensor,
    top_k: Tensor | None,
    top_p: Tensor | None,
    min_p: Tensor | None,
) -> Tensor:
    if top_k is None and top_p is None and min_p is None:
        return draw_from_all(scores, uniforms, temperature)
    floor, total = _thresholds(scores, temperature, top_k, top_p, min_p)
    candidates = scores >= floor.unsqueeze(1)
    counts = candidates.sum(-1)
    tokens = torch.empty_like(counts)
    wide = (counts > WIDE).nonzero().squeeze(1)
    for rows in ((counts <= WIDE).nonzero().squeeze(1), *wide.split(1)):
        if rows.numel() == 0:
            continue
        few, ids = _compact(scores, candidates, counts, rows)
        weights = filtered_weights(
            few,
            temperature[rows],
            _rows_of(top_k, rows),
            _rows_of(top_p, rows),
            _rows_of(min_p, rows),
            least_total=total[rows],
        )
        tokens[rows] = ids.gather(1, draw(weights, uniforms[rows]).unsqueeze(1)).squeeze(1)
    return tokens


def draw_from_all(scores: Tensor, uniforms: Tensor, temperature: Tensor) -> Tensor:
    """The draw from an unfiltered row: first the block of tokens, then the token in it."""
    rows, vocab = scores.shape
    weights = (scores - scores.amax(-1, keepdim=True)).div_(temperature.unsqueeze(1)).exp_()
    weights = torch.nn.functional.pad(weights, (0, -vocab % BLOCK)).unflatten(1, (-1, BLOCK))
    mass = weights.sum(-1, dtype=torch.float64).cumsum(-1)
    target = uniforms.unsqueeze(1) * mass[:, -1:]
    block = torch.searchsorted(mass, target, right=True).clamp_max(mass.shape[1] - 1)
    before = mass.gather(1, (block - 1).clamp_min(0)).where(block > 0, 0.0)
    each = torch.arange(rows, device=scores.device)
    inner = weights[each, block.squeeze(1)].double().cumsum(-1)
    # A target at the block's very end, by rounding, still is the last token that has mass.
    last = inner[:, -1:].nextafter(torch.zeros_like(before))
    token = torch.searchsorted(inner, (target - before).minimum(last), right=True)
    return (block * BLOCK + token).squeeze(1)


def _thresholds(
    scores: Tensor,
    temperature: Tensor,
    top_k: Tensor | None,
    top_p: Tensor | None,
    min_p: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Least score of a candidate [rows], and the mass of the vocabulary where top_p needs it."""
    rows, vocab = scores.shape
    peak = scores.amax(-1)
    total = torch.zeros(rows, dtype=torch.float64, device=scores.device)
    least = torch.zeros_like(total)
    if top_p is not None and bool((top_p < 1).any()):
        weights = (scores - peak.unsqueeze(1)).div_(temperature.unsqueeze(1)).exp_()
        total = weights.sum(-1, dtype=torch.float64)
        # All tokens below this weight together have less than 1 - p of the mass.
        least = ((1 - top_p.double()) * total / vocab).clamp_min(0)
    if min_p is not None:
        least = least.maximum(min_p.double())
    floor = peak.double() + temperature.double() * (MARGIN * least).log()
    floor = floor.float().nextafter(torch.full_like(peak, -torch.inf))
    if top_k is not None:
        limited = (top_k > 0) & (top_k < vocab)
        places = top_k.where(limited, 1)
        best = scores.topk(int(places.max()), -1).values
        kth = best.gather(1, places.unsqueeze(1) - 1).squeeze(1)
        # top_p then works on what top_k left, all of which are candidates.
        floor, total = kth.where(limited, floor), total.where(~limited, 0.0)
    return floor, total


def _compact(
    scores: Tensor, candidates: Tensor, counts: Tensor, rows: Tensor
) -> tuple[Tensor, Tensor]:
    """The candidates of some rows side by side, in order of id: scores, padded with -inf, and ids."""
    counts = counts[rows]
    row, ids = candidates[rows].nonzero(as_tuple=True)
    starts = counts.cumsum(0) - counts
    column = torch.arange(ids.numel(), device=ids.device) - starts[row]
    shape = (rows.numel(), int(counts.max()))
    few_scores = scores.new_full(shape, -torch.inf)
    few_scores[row, column] = scores[rows[row], ids]
    few_ids = ids.new_zeros(shape)
    few_ids[row, column] = ids
    return few_scores, few_ids


@few_rows_alone
def top_logprobs(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """A stable sort of the tokens that are at least as large as the k-th."""
    ids = [_top_ids(group, k) for group in logits.split(_group_size(logits))]
    chosen = torch.cat(ids)
    return torch.log_softmax(logits, -1).gather(1, chosen), chosen


def _top_ids(logits: Tensor, k: int) -> Tensor:
    if k == 0 or logits.shape[0] == 0:
        return torch.empty(logits.shape[0], k, dtype=torch.int64, device=logits.device)
    ordered = logits.nan_to_num(nan=torch.inf, posinf=torch.inf, neginf=-torch.inf)
    candidates = ordered >= ordered.topk(k, -1).values[:, -1:]
    every_row = torch.arange(logits.shape[0], device=logits.device)
    few, ids = _compact(ordered, candidates, candidates.sum(-1), every_row)
    return ids.gather(1, few.sort(dim=-1, descending=True, stable=True).indices[:, :k])


def supports(call: Any) -> str | None:
    return None if call.device == "cpu" else "it reads values on the host, which only a CPU can"


KERNELS = {
    "sample": Kernel(sample, supports, efficiency=0.4),
    "top_logprobs": Kernel(top_logprobs, supports, efficiency=0.4),
}
