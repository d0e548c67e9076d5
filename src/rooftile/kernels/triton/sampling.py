"""Sampling in portable Triton without sorting the vocabulary: one pass over it, then a few tokens.

The first launch has a program for each 2,048 tokens of a row. It keeps the largest score of each
chunk of 128 tokens, and the tile's sum of weights. The second has a program a row:

- greedy, the first chunk that has the largest score has the token;
- without filters, the tile sums say in which tile the drawn token lies, and the tile is read again;
- with filters, a bound on the scores that can be kept follows from the chunks' maxima (k chunks
  have a score of at least the k-th largest maximum) or from the total mass. Only chunks whose
  maximum reaches it are read. Their tokens above it, the candidates, are ranked pairwise in float64;
- where there are more candidates than that pays for (a flat nucleus, thousands of equal scores), a
  search over the order of all tokens, by score and then by id, finds the last one that is kept, by
  counts and masses over the row (`search_last`).

Tokens are compared as the reference compares them: by score, and among equals by id. Numbers come
from the same Philox stream.
"""
# mypy: disable-error-code="no-untyped-def, attr-defined"

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from rooftile.kernels import Kernel
from rooftile.kernels.reference import sampling as reference
from rooftile.kernels.triton.interpreter import INTERPRETED
from rooftile.kernels.triton.pointwise import where

CHUNK = 128
TILE = 2048
CANDIDATES = 1024  # ranked pairwise; more are searched
MARGIN = 0.999  # candidates are found in float32; it keeps those at the border
CHOOSE_WARPS = 8
MOST_TOP = 512  # of top_logprobs


@triton.jit
def score_key(x):
    """int32 in the order of the float32 x, which is not NaN; -0.0 equals 0.0."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def order_key(x, ids):
    """int64, larger for what comes earlier: by falling score, then by rising id."""
    return (score_key(x).to(tl.int64) << 32) | (0x7FFFFFFF - ids).to(tl.int64)


@triton.jit
def weight_of(x, peak, heat):
    """exp((x - peak) / temperature) in float32; heat: log2 e / temperature."""
    return tl.exp2((x - peak) * heat)


@triton.jit
def scan_kernel(
    logits,
    scores,
    temperature,
    chunk_max,
    tile_max,
    tile_mass,
    raw_max,
    raw_sum,
    broken,
    logits_stride,
    scores_stride,
    vocab,
    chunks,
    tiles,
    has_scores: tl.constexpr,
    has_temperature: tl.constexpr,
    chunk: tl.constexpr,
    tile_chunks: tl.constexpr,
):
    """Program (row, tile)."""
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    number = tile * tile_chunks + tl.arange(0, tile_chunks)
    ids = number[:, None] * chunk + tl.arange(0, chunk)[None, :]
    inside = ids < vocab
    x = tl.load(logits + row * logits_stride + ids, mask=inside, other=float("-inf"))
    bad = (x != x) | (x == float("inf"))
    x = tl.where(bad, float("-inf"), x)
    peak = tl.max(x)
    base = tl.where(peak > float("-inf"), peak, 0.0)
    at = row * tiles + tile
    tl.store(raw_max + at, peak)
    tl.store(raw_sum + at, tl.sum(tl.exp2((x - base) * 1.4426950408889634).to(tl.float64)))
    if has_scores:
        x = tl.load(scores + row * scores_stride + ids, mask=inside, other=float("-inf"))
        wrong = (x != x) | (x == float("inf"))
        bad = bad | wrong
        x = tl.where(wrong, float("-inf"), x)
        peak = tl.max(x)
        base = tl.where(peak > float("-inf"), peak, 0.0)
    if has_temperature:
        # Below the smallest normal number only the leaders have weight, so it may as well be that.
        heat = 1.4426950408889634 / tl.maximum(tl.load(temperature + row), 1.1754944e-38)
        tl.store(tile_mass + at, tl.sum(weight_of(x, base, heat).to(tl.float64)))
    tl.store(tile_max + at, peak)
    tl.store(broken + at, tl.max(bad.to(tl.int32)))
    tl.store(chunk_max + row * chunks + number, tl.max(x, 1), mask=number < chunks)


@triton.jit
def kth_key(keys, inside, k):
    """A key that exactly k of the keys inside reach or, where equal ones prevent that, the k-th
    largest. There are at least k of them.
    """
    low = tl.min(tl.where(inside, keys, 0x7FFFFFFF)).to(tl.int64)
    high = tl.max(tl.where(inside, keys, -0x80000000)).to(tl.int64) + 1
    count = tl.full([], 0, tl.int32)
    while (high - low > 1) & (count != k):
        middle = (low + high) >> 1
        count = tl.sum((inside & (keys >= middle)).to(tl.int32))
        low = tl.where(count >= k, middle, low)
        high = tl.where(count >= k, high, middle)
    return low.to(tl.int32)


@triton.jit
def gather_candidates(
    row_scores, selected, found_scores, found_ids, keys, inside, floor, vocab,
    chunk: tl.constexpr, group: tl.constexpr, padded_chunks: tl.constexpr, limit: tl.constexpr,
):  # fmt: skip
    """Stores the tokens whose key is at least floor, by rising id, the first `limit` of them.
    Returns how many there are.
    """
    reached = inside & (keys >= floor)
    place = tl.cumsum(reached.to(tl.int32), 0) - 1
    count = tl.sum(reached.to(tl.int32))
    tl.store(selected + place, tl.arange(0, padded_chunks), mask=reached)
    tl.debug_barrier()
    total = 0
    done = 0
    # Beyond the limit only their number matters, and not how far beyond.
    while (done < count) & (total <= limit):
        at = done + tl.arange(0, group)
        number = tl.load(selected + at, mask=at < count, other=0)
        ids = number[:, None] * chunk + tl.arange(0, chunk)[None, :]
        used = (at < count)[:, None] & (ids < vocab)
        x = tl.load(row_scores + ids, mask=used, other=float("-inf"))
        x = tl.reshape(x, [group * chunk])
        ids = tl.reshape(ids, [group * chunk])
        kept = tl.reshape(used, [group * chunk]) & (score_key(x) >= floor)
        to = total + tl.cumsum(kept.to(tl.int32), 0) - 1
        tl.store(found_scores + to, x, mask=kept & (to < limit))
        tl.store(found_ids + to, ids, mask=kept & (to < limit))
        total += tl.sum(kept.to(tl.int32))
        done += group
    tl.debug_barrier()
    return total


@triton.jit
def rank_candidates(
    scores, weights, ranks, before, count, peak, heat,
    rows: tl.constexpr, columns: tl.constexpr,
):  # fmt: skip
    """For each candidate, which lie by rising id: its weight, how many come before it in the order,
    and their weight.
    """
    for first in range(0, count, rows):
        at = first + tl.arange(0, rows)
        x = tl.load(scores + at, mask=at < count, other=float("-inf"))
        tl.store(weights + at, tl.exp((x - peak).to(tl.float64) * heat), mask=at < count)
    tl.debug_barrier()
    for first in range(0, count, rows):
        at = first + tl.arange(0, rows)
        x = tl.load(scores + at, mask=at < count, other=float("-inf"))
        rank = tl.zeros([rows], tl.int32)
        mass = tl.zeros([rows], tl.float64)
        for start in range(0, count, columns):
            other = start + tl.arange(0, columns)
            y = tl.load(scores + other, mask=other < count, other=float("-inf"))
            w = tl.load(weights + other, mask=other < count, other=0.0)
            earlier = (y[None, :] > x[:, None]) | (
                (y[None, :] == x[:, None]) & (other[None, :] < at[:, None])
            )
            earlier = earlier & (other < count)[None, :]
            rank += tl.sum(earlier.to(tl.int32), 1)
            mass += tl.sum(tl.where(earlier, w[None, :], 0.0), 1)
        tl.store(ranks + at, rank, mask=at < count)
        tl.store(before + at, mass, mask=at < count)
    tl.debug_barrier()


@triton.jit
def draw_candidate(
    ids, weights, ranks, before, count, k, p, total, least, u, vocab, rows: tl.constexpr
):
    """The token that u draws from the candidates that the filters keep."""
    limit = tl.where(k > 0, k, vocab)
    of_top_k = tl.full([], 0.0, tl.float64)
    for first in range(0, count, rows):
        at = first + tl.arange(0, rows)
        inside = at < count
        rank = tl.load(ranks + at, mask=inside, other=0)
        w = tl.load(weights + at, mask=inside, other=0.0)
        of_top_k += tl.sum(tl.where(inside & (rank < limit), w, 0.0))
    # The mass that top_p is a share of: of what top_k left, or of the vocabulary.
    share = tl.where(p < 1.0, p * tl.where(limit < vocab, of_top_k, total), float("inf"))
    kept_mass = of_top_k * 0.0
    for first in range(0, count, rows):
        at = first + tl.arange(0, rows)
        inside = at < count
        rank = tl.load(ranks + at, mask=inside, other=0)
        w = tl.load(weights + at, mask=inside, other=0.0)
        ahead = tl.load(before + at, mask=inside, other=0.0)
        kept = inside & (rank < limit) & (ahead < share) & (w >= least)
        w = tl.where(kept, w, 0.0)
        kept_mass += tl.sum(w)
        tl.store(before + at, w, mask=inside)
    tl.debug_barrier()
    target = u * kept_mass
    passed = kept_mass * 0.0
    place = 0
    last = 0
    for first in range(0, count, rows):
        at = first + tl.arange(0, rows)
        w = tl.load(before + at, mask=at < count, other=0.0)
        sums = passed + tl.cumsum(w, 0)
        place += tl.sum(((sums <= target) & (at < count)).to(tl.int32))
        last = tl.maximum(last, tl.max(tl.where(w > 0, at, 0)))
        passed += tl.sum(w)
    return tl.load(ids + tl.minimum(place, last))


@triton.jit
def above_three(row_scores, vocab, peak, heat, a, b, c, tile: tl.constexpr):
    """Number and mass of the tokens whose order key is above each of three pivots."""
    lane = tl.arange(0, tile)
    count_a = tl.zeros([tile], tl.int32)
    count_b = tl.zeros([tile], tl.int32)
    count_c = tl.zeros([tile], tl.int32)
    mass_a = tl.zeros([tile], tl.float64)
    mass_b = tl.zeros([tile], tl.float64)
    mass_c = tl.zeros([tile], tl.float64)
    for first in range(0, vocab, tile):
        ids = first + lane
        x = tl.load(row_scores + ids, mask=ids < vocab, other=float("-inf"))
        key = tl.where(ids < vocab, order_key(x, ids), -0x8000000000000000)
        w = weight_of(x, peak, heat).to(tl.float64)
        count_a += (key > a).to(tl.int32)
        count_b += (key > b).to(tl.int32)
        count_c += (key > c).to(tl.int32)
        mass_a += tl.where(key > a, w, 0.0)
        mass_b += tl.where(key > b, w, 0.0)
        mass_c += tl.where(key > c, w, 0.0)
    return (
        tl.sum(count_a),
        tl.sum(count_b),
        tl.sum(count_c),
        tl.sum(mass_a),
        tl.sum(mass_b),
        tl.sum(mass_c),
    )


@triton.jit
def between(low, high):
    """Halfway between two int64 whose sum may not fit."""
    return (low >> 1) + (high >> 1) + (low & high & 1)


@triton.jit
def search_last(
    row_scores, found_scores, found_ids, vocab, peak, heat, k, share, low, number,
    tile: tl.constexpr, limit: tl.constexpr,
):  # fmt: skip
    """The last token that is kept: the k-th, or with k = 0 the first up to and with which the mass
    reaches `share`. It lies above the order key low, as do `number` tokens at most.

    Returns an order key just below it, and number and mass of the tokens above that. Quarters the
    interval of order keys until few tokens are in it, and then halves it among those.
    """
    high = order_key(peak, tl.full([], 0, tl.int32))
    done = tl.full([], 0, tl.int32)  # tokens above high, and their mass
    mass = tl.full([], 0.0, tl.float64)
    while (number - done > limit) & (high > low + 1):
        b = between(low, high)
        a = between(low, b)
        c = between(b, high)
        n_a, n_b, n_c, m_a, m_b, m_c = above_three(row_scores, vocab, peak, heat, a, b, c, tile)
        at_a = tl.where(k > 0, n_a >= k, m_a >= share)
        at_b = tl.where(k > 0, n_b >= k, m_b >= share)
        at_c = tl.where(k > 0, n_c >= k, m_c >= share)
        # The interval (low, high] that has it: from above c downwards.
        number = tl.where(at_c, n_c, tl.where(at_b, n_b, tl.where(at_a, n_a, number)))
        low = tl.where(at_c, c, tl.where(at_b, b, tl.where(at_a, a, low)))
        done = tl.where(at_c, done, tl.where(at_b, n_c, tl.where(at_a, n_b, n_a)))
        mass = tl.where(at_c, mass, tl.where(at_b, m_c, tl.where(at_a, m_b, m_a)))
        high = tl.where(at_c, high, tl.where(at_b, c, tl.where(at_a, b, a)))
    count = tl.full([], 0, tl.int32)
    for first in range(0, vocab, tile):
        ids = first + tl.arange(0, tile)
        x = tl.load(row_scores + ids, mask=ids < vocab, other=float("-inf"))
        key = order_key(x, ids)
        kept = (ids < vocab) & (key > low) & (key <= high)
        to = count + tl.cumsum(kept.to(tl.int32), 0) - 1
        tl.store(found_scores + to, x, mask=kept & (to < limit))
        tl.store(found_ids + to, ids, mask=kept & (to < limit))
        count += tl.sum(kept.to(tl.int32))
    tl.debug_barrier()
    lane = tl.arange(0, limit)
    x = tl.load(found_scores + lane, mask=lane < count, other=float("-inf"))
    key = order_key(x, tl.load(found_ids + lane, mask=lane < count, other=0))
    w = tl.where(lane < count, weight_of(x, peak, heat), 0.0).to(tl.float64)
    while high > low + 1:
        middle = between(low, high)
        above = (lane < count) & (key > middle)
        more = done + tl.sum(above.to(tl.int32))
        enough = tl.where(k > 0, more >= k, mass + tl.sum(tl.where(above, w, 0.0)) >= share)
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle)
    above = (lane < count) & (key > low)
    tl.debug_barrier()
    return low, done + tl.sum(above.to(tl.int32)), mass + tl.sum(tl.where(above, w, 0.0))


@triton.jit
def draw_in_tile(
    row_scores, tile_number, vocab, peak, heat, cut, least, target, tile: tl.constexpr
):
    """The token of a tile that a target of its kept mass falls on."""
    lane = tl.arange(0, tile)
    ids = tile_number * tile + lane
    x = tl.load(row_scores + ids, mask=ids < vocab, other=float("-inf"))
    w = weight_of(x, peak, heat)
    kept = (ids < vocab) & (order_key(x, ids) > cut) & (w >= least)
    w = tl.where(kept, w, 0.0).to(tl.float64)
    place = tl.sum((tl.cumsum(w, 0) <= target).to(tl.int32))
    last = tl.max(tl.where(w > 0, lane, 0))
    return tile_number * tile + tl.minimum(place, last)


@triton.jit
def tile_of(masses, number, u):
    """Which tile u falls into, and how far into its mass: (tile, mass)."""
    sums = tl.cumsum(masses, 0)
    target = u * tl.max(sums)
    tile = tl.sum((sums <= target).to(tl.int32))
    tile = tl.minimum(tile, tl.max(tl.where(masses > 0, number, 0)))
    before = tl.max(tl.where(number < tile, sums, 0.0))
    return tile, target - before


@triton.jit
def uniform(seed, index, position):
    """Float64 in [0, 1), a multiple of 2^-53, as `reference/philox.py`."""
    first, second, _, _ = tl.philox(
        seed,
        (index & 0xFFFFFFFF).to(tl.uint32).to(tl.int32, bitcast=True),
        ((index >> 32) & 0xFFFFFFFF).to(tl.uint32).to(tl.int32, bitcast=True),
        (position & 0xFFFFFFFF).to(tl.uint32).to(tl.int32, bitcast=True),
        ((position >> 32) & 0xFFFFFFFF).to(tl.uint32).to(tl.int32, bitcast=True),
    )
    bits = (first.to(tl.int64) << 21) | (second.to(tl.int64) >> 11)
    return bits.to(tl.float64) * 1.1102230246251565e-16


@triton.jit
def choose_kernel(
    logits,
    scores,
    temperature,
    top_k,
    top_p,
    min_p,
    seeds,
    sample_index,
    position,
    chunk_max,
    tile_max,
    tile_mass,
    raw_max,
    raw_sum,
    broken,
    selected,
    found_scores,
    found_ids,
    weights,
    ranks,
    before,
    tokens,
    logprobs,
    logits_stride,
    scores_stride,
    vocab,
    chunks,
    tiles,
    has_temperature: tl.constexpr,
    has_top_k: tl.constexpr,
    has_top_p: tl.constexpr,
    has_min_p: tl.constexpr,
    has_index: tl.constexpr,
    chunk: tl.constexpr,
    tile: tl.constexpr,
    padded_chunks: tl.constexpr,
    padded_tiles: tl.constexpr,
    limit: tl.constexpr,
    margin: tl.constexpr,
):
    """Program: a row."""
    row = tl.program_id(0).to(tl.int64)
    row_scores = scores + row * scores_stride
    number = tl.arange(0, padded_tiles)
    in_row = number < tiles
    at = row * tiles + number
    peaks = tl.load(tile_max + at, mask=in_row, other=float("-inf"))
    peak = tl.max(peaks)
    bad = tl.max(tl.load(broken + at, mask=in_row, other=0))
    if (bad == 0) & (peak > float("-inf")):
        raw_peaks = tl.load(raw_max + at, mask=in_row, other=float("-inf"))
        raw_peak = tl.max(raw_peaks)
        raw_sums = tl.load(raw_sum + at, mask=in_row, other=0.0)
        raw_total = tl.sum(raw_sums * tl.exp((raw_peaks - raw_peak).to(tl.float64)))

        lane = tl.arange(0, padded_chunks)
        inside = lane < chunks
        maxima = tl.load(chunk_max + row * chunks + lane, mask=inside, other=float("-inf"))
        warm = 0.0
        if has_temperature:
            warm = tl.load(temperature + row)
        token = 0
        if warm > 0:
            if has_temperature:
                index = (row * 0).to(tl.int64)
                if has_index:
                    index = tl.load(sample_index + row)
                u = uniform(tl.load(seeds + row), index, tl.load(position + row))
                heat = 1.4426950408889634 / tl.maximum(warm, 1.1754944e-38)
                exact_heat = 1.0 / tl.maximum(warm, 1.1754944e-38).to(tl.float64)
                scale = tl.exp2((peaks - peak).to(tl.float64) * heat)
                masses = tl.load(tile_mass + at, mask=in_row, other=0.0) * scale
                masses = tl.where(in_row, masses, 0.0)
                total = tl.sum(masses)
                k = tl.full([], 0, tl.int32)
                p = tl.full([], 1.0, tl.float32)
                least = tl.full([], 0.0, tl.float32)
                if has_top_k:
                    k = tl.minimum(tl.load(top_k + row), vocab).to(tl.int32)
                    k = tl.where(k >= vocab, 0, k)
                if has_top_p:
                    p = tl.load(top_p + row)
                if has_min_p:
                    least = tl.load(min_p + row)
                if (k > 0) | (p < 1.0) | (least > 0.0):
                    keys = score_key(maxima)
                    # Tokens below the floor are not kept. Mass: all of them together have less
                    # than 1 - p of it; unless top_k comes before, whose mass is not known yet.
                    mass_floor = tl.maximum(1.0 - p.to(tl.float64), 0.0) * total / vocab
                    lowest = tl.where(k > 0, 0.0, tl.maximum(mass_floor, least.to(tl.float64)))
                    reach = peak + tl.log(margin * lowest) / exact_heat
                    floor = score_key(tl.maximum(reach, -3.4e38).to(tl.float32)) - 1
                    if k > 0:
                        if k <= chunks:
                            floor = kth_key(keys, inside, k)
                        else:
                            floor = tl.full([], -0x7FFFFFFF, tl.int32)
                    count = gather_candidates(
                        row_scores, selected + row * chunks, found_scores + row * limit,
                        found_ids + row * limit, keys, inside, floor, vocab,
                        chunk, tile // chunk, padded_chunks, limit,
                    )  # fmt: skip
                    if count <= limit:
                        rank_candidates(
                            found_scores + row * limit, weights + row * limit, ranks + row * limit,
                            before + row * limit, count, peak, exact_heat, 128, 32,
                        )  # fmt: skip
                        token = draw_candidate(
                            found_ids + row * limit, weights + row * limit, ranks + row * limit,
                            before + row * limit, count, k, p.to(tl.float64), total,
                            least.to(tl.float64), u, vocab, 128,
                        )  # fmt: skip
                    else:
                        cut = ((floor - 1).to(tl.int64) << 32) | 0x7FFFFFFF
                        whole = total
                        found = tl.full([], 0, tl.int32) + vocab
                        for phase in range(0, 2):  # one search for both, which halves the code
                            counted = tl.where(phase == 0, k, 0)
                            share = p.to(tl.float64) * whole
                            if (counted > 0) | ((phase == 1) & (p < 1.0)):
                                cut, found, whole = search_last(
                                    row_scores, found_scores + row * limit, found_ids + row * limit,
                                    vocab, peak, heat, counted, share, cut, found, tile, limit,
                                )  # fmt: skip
                        kept = tl.zeros([padded_tiles], tl.float64)
                        for each in range(0, tiles):
                            ids = each * tile + tl.arange(0, tile)
                            x = tl.load(row_scores + ids, mask=ids < vocab, other=float("-inf"))
                            w = weight_of(x, peak, heat)
                            w = tl.where((order_key(x, ids) > cut) & (w >= least), w, 0.0)
                            w = tl.where(ids < vocab, w, 0.0)
                            kept += tl.where(number == each, tl.sum(w.to(tl.float64)), 0.0)
                        drawn, target = tile_of(kept, number, u)
                        token = draw_in_tile(
                            row_scores, drawn, vocab, peak, heat, cut, least, target, tile
                        )
                else:
                    drawn, target = tile_of(masses, number, u)
                    own = tl.max(tl.where(number == drawn, peaks, float("-inf")))
                    target = target / tl.max(tl.where(number == drawn, scale, 0.0))
                    lowest_key = (tl.full([], -0x80000000, tl.int64)) << 32
                    token = draw_in_tile(
                        row_scores, drawn, vocab, own, heat, lowest_key, 0.0, target, tile
                    )
        else:
            first = tl.min(tl.where(inside & (maxima == peak), lane, padded_chunks))
            ids = first * chunk + tl.arange(0, chunk)
            x = tl.load(row_scores + ids, mask=ids < vocab, other=float("-inf"))
            token = tl.min(tl.where(x == peak, ids, 0x7FFFFFFF))
        chosen = tl.load(logits + row * logits_stride + token)
        logprob = (chosen - raw_peak).to(tl.float64) - tl.log(raw_total)
        tl.store(tokens + row, token.to(tl.int64))
        tl.store(logprobs + row, logprob.to(tl.float32))
    else:
        tl.store(tokens + row, tl.full([], -1, tl.int64))
        tl.store(logprobs + row, float("nan"))


@triton.jit
def top_kernel(
    logits,
    chunk_max,
    raw_max,
    raw_sum,
    broken,
    selected,
    found_scores,
    found_ids,
    weights,
    ranks,
    before,
    out_logprobs,
    out_ids,
    logits_stride,
    vocab,
    chunks,
    tiles,
    k,
    chunk: tl.constexpr,
    tile: tl.constexpr,
    padded_chunks: tl.constexpr,
    padded_tiles: tl.constexpr,
    limit: tl.constexpr,
):
    """The k largest of a row in order. Program: a row."""
    row = tl.program_id(0).to(tl.int64)
    row_scores = logits + row * logits_stride
    number = tl.arange(0, padded_tiles)
    at = row * tiles + number
    peaks = tl.load(raw_max + at, mask=number < tiles, other=float("-inf"))
    peak = tl.max(peaks)
    bad = tl.max(tl.load(broken + at, mask=number < tiles, other=0))
    if (bad == 0) & (peak > float("-inf")):
        sums = tl.load(raw_sum + at, mask=number < tiles, other=0.0)
        log_total = tl.log(tl.sum(sums * tl.exp((peaks - peak).to(tl.float64))))
        lane = tl.arange(0, padded_chunks)
        inside = lane < chunks
        maxima = tl.load(chunk_max + row * chunks + lane, mask=inside, other=float("-inf"))
        keys = score_key(maxima)
        floor = tl.full([], -0x7FFFFFFF, tl.int32)
        if k <= chunks:
            floor = kth_key(keys, inside, k)
        count = gather_candidates(
            row_scores, selected + row * chunks, found_scores + row * limit,
            found_ids + row * limit, keys, inside, floor, vocab,
            chunk, tile // chunk, padded_chunks, limit,
        )  # fmt: skip
        if count > limit:
            # Too many to rank: find the k in question, and gather those.
            cut = ((floor - 1).to(tl.int64) << 32) | 0x7FFFFFFF
            cut, count, _ = search_last(
                row_scores, found_scores + row * limit, found_ids + row * limit,
                vocab, peak, 1.0, k, tl.full([], 0.0, tl.float64), cut, vocab, tile, limit,
            )  # fmt: skip
            count = tl.full([], 0, tl.int32)
            for first in range(0, vocab, tile):
                ids = first + tl.arange(0, tile)
                x = tl.load(row_scores + ids, mask=ids < vocab, other=float("-inf"))
                kept = (ids < vocab) & (order_key(x, ids) > cut)
                to = count + tl.cumsum(kept.to(tl.int32), 0) - 1
                tl.store(found_scores + row * limit + to, x, mask=kept & (to < limit))
                tl.store(found_ids + row * limit + to, ids, mask=kept & (to < limit))
                count += tl.sum(kept.to(tl.int32))
            tl.debug_barrier()
        rank_candidates(
            found_scores + row * limit, weights + row * limit, ranks + row * limit,
            before + row * limit, count, peak, (peak * 0.0 + 1.0).to(tl.float64), 128, 32,
        )  # fmt: skip
        for first in range(0, count, 128):
            place = first + tl.arange(0, 128)
            used = place < count
            rank = tl.load(ranks + row * limit + place, mask=used, other=k)
            x = tl.load(found_scores + row * limit + place, mask=used, other=0.0)
            ids = tl.load(found_ids + row * limit + place, mask=used, other=0)
            logprob = ((x - peak).to(tl.float64) - log_total).to(tl.float32)
            tl.store(out_logprobs + row * k + rank, logprob, mask=rank < k)
            tl.store(out_ids + row * k + rank, ids.to(tl.int64), mask=rank < k)
    else:
        for first in range(0, k, 128):
            place = first + tl.arange(0, 128)
            nothing = tl.full([128], float("nan"), tl.float32)
            tl.store(out_logprobs + row * k + place, nothing, mask=place < k)
            tl.store(out_ids + row * k + place, place.to(tl.int64), mask=place < k)


@triton.jit
def penalty_kernel(
    logits,
    out,
    repetition,
    presence,
    frequency,
    prompt_mask,
    output_counts,
    logits_stride,
    vocab,
    has_repetition: tl.constexpr,
    has_presence: tl.constexpr,
    has_frequency: tl.constexpr,
    has_prompt: tl.constexpr,
    has_counts: tl.constexpr,
    tile: tl.constexpr,
):
    """Program (row, tile)."""
    row = tl.program_id(0).to(tl.int64)
    ids = tl.program_id(1) * tile + tl.arange(0, tile)
    inside = ids < vocab
    x = tl.load(logits + row * logits_stride + ids, mask=inside)
    counts = tl.zeros([tile], tl.int32)
    if has_counts:
        counts = tl.load(output_counts + row * vocab + ids, mask=inside, other=0)
    if has_repetition:
        seen = counts > 0
        if has_prompt:
            seen = seen | (tl.load(prompt_mask + row * vocab + ids, mask=inside, other=0) != 0)
        factor = tl.load(repetition + row)
        x = tl.where(seen, tl.where(x > 0, tl.div_rn(x, factor), x * factor), x)
    if has_presence:
        x = x - tl.load(presence + row) * (counts > 0).to(tl.float32)
    if has_frequency:
        x = x - tl.load(frequency + row) * counts.to(tl.float32)
    tl.store(out + row * vocab + ids, x, mask=inside)


def penalised(
    logits: Tensor,  # [rows, vocab]
    repetition: Tensor | None,
    presence: Tensor | None,
    frequency: Tensor | None,
    prompt_mask: Tensor | None,
    output_counts: Tensor | None,
) -> Tensor:
    rows, vocab = logits.shape
    out = torch.empty((rows, vocab), dtype=torch.float32, device=logits.device)
    tables = (repetition, presence, frequency, prompt_mask, output_counts)
    penalty_kernel[(rows, triton.cdiv(vocab, TILE))](
        *(logits, out),
        *(out if table is None else table.contiguous() for table in tables),
        *(logits.stride(0), vocab, *(table is not None for table in tables)),
        tile=TILE,
    )
    return out


def sample(
    logits: Tensor,  # [rows, vocab]
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
    rows, vocab = logits.shape
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    logprobs = torch.empty(rows, dtype=torch.float32, device=logits.device)
    if rows == 0:
        return tokens, logprobs
    logits = _unit_stride(logits)
    with where(logits):
        scores = logits
        penalties = (repetition_penalty, presence_penalty, frequency_penalty)
        if any(penalty is not None for penalty in penalties):
            scores = penalised(logits, *penalties, prompt_mask, output_counts)
        if bias_rows is not None:
            assert bias_ids is not None
            assert bias_values is not None
            scores = scores.index_put((bias_rows, bias_ids), bias_values, accumulate=True)
        if banned_rows is not None:
            assert banned_ids is not None
            # A tensor, so that nothing is copied from the host.
            banned = torch.full_like(banned_ids, -torch.inf, dtype=torch.float32)
            scores = scores.index_put((banned_rows, banned_ids), banned)
        scores = _unit_stride(scores)
        summary, shape = _scan(logits, scores, temperature)
        chunks, tiles = shape
        optional = (temperature, top_k, top_p, min_p, seeds, sample_index, position)
        choose_kernel[(rows,)](
            *(logits, scores),
            *(tokens if tensor is None else tensor.contiguous() for tensor in optional),
            *summary,
            *_scratch(rows, chunks, logits.device),
            *(tokens, logprobs, logits.stride(0), scores.stride(0), vocab, chunks, tiles),
            has_temperature=temperature is not None,
            has_top_k=top_k is not None,
            has_top_p=top_p is not None,
            has_min_p=min_p is not None,
            has_index=sample_index is not None,
            chunk=CHUNK,
            tile=TILE,
            padded_chunks=_padded(chunks),
            padded_tiles=_padded(tiles),
            limit=CANDIDATES,
            margin=MARGIN,
            num_warps=CHOOSE_WARPS,
        )
    return tokens, logprobs


def _scan(
    logits: Tensor, scores: Tensor, temperature: Tensor | None
) -> tuple[tuple[Tensor, ...], tuple[int, int]]:
    """What `choose_kernel` reads of each row, and its numbers of chunks and tiles."""
    rows, vocab = logits.shape
    chunks, tiles = triton.cdiv(vocab, CHUNK), triton.cdiv(vocab, TILE)

    def empty(columns: int, dtype: torch.dtype) -> Tensor:
        return torch.empty((rows, columns), dtype=dtype, device=logits.device)

    chunk_max, tile_max = empty(chunks, torch.float32), empty(tiles, torch.float32)
    tile_mass, raw_max = empty(tiles, torch.float64), empty(tiles, torch.float32)
    raw_sum, broken = empty(tiles, torch.float64), empty(tiles, torch.int32)
    summary = (chunk_max, tile_max, tile_mass, raw_max, raw_sum, broken)
    scan_kernel[(rows, tiles)](
        *(logits, scores, logits if temperature is None else temperature.contiguous(), *summary),
        *(logits.stride(0), scores.stride(0), vocab, chunks, tiles),
        has_scores=scores is not logits,
        has_temperature=temperature is not None,
        chunk=CHUNK,
        tile_chunks=TILE // CHUNK,
    )
    return summary, (chunks, tiles)


def _scratch(rows: int, chunks: int, device: torch.device) -> tuple[Tensor, ...]:
    """Chunks that are read; scores, ids, weights, ranks and preceding mass of candidates."""
    kinds = (torch.float32, torch.int32, torch.float64, torch.int32, torch.float64)
    return (
        torch.empty((rows, chunks), dtype=torch.int32, device=device),
        *(torch.empty((rows, CANDIDATES), dtype=kind, device=device) for kind in kinds),
    )


def _padded(count: int) -> int:
    return max(16, triton.next_power_of_2(count))


def _unit_stride(x: Tensor) -> Tensor:
    return x if x.stride(1) == 1 else x.contiguous()


def top_logprobs(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    rows, vocab = logits.shape
    if k > MOST_TOP:
        return reference.top_logprobs(logits, k)
    logprobs = torch.empty((rows, k), dtype=torch.float32, device=logits.device)
    ids = torch.empty((rows, k), dtype=torch.int64, device=logits.device)
    if rows == 0 or k == 0:
        return logprobs, ids
    logits = _unit_stride(logits)
    with where(logits):
        (chunk_max, _, _, raw_max, raw_sum, broken), (chunks, tiles) = _scan(logits, logits, None)
        top_kernel[(rows,)](
            *(logits, chunk_max, raw_max, raw_sum, broken),
            *_scratch(rows, chunks, logits.device),
            *(logprobs, ids, logits.stride(0), vocab, chunks, tiles, k),
            chunk=CHUNK,
            tile=TILE,
            padded_chunks=_padded(chunks),
            padded_tiles=_padded(tiles),
            limit=CANDIDATES,
            num_warps=CHOOSE_WARPS,
        )
    return logprobs, ids


def supports(call: Any) -> str | None:
    if call.device != "cuda" and not INTERPRETED:
        return f"it needs a GPU, not a {call.device}"
    return None


KERNELS = {
    "sample": Kernel(sample, supports, efficiency=0.7),
    "top_logprobs": Kernel(top_logprobs, supports, efficiency=0.7),
}
