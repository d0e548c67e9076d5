"""sample, top_logprobs, token_ranks: distributions, filters, penalties, determinism, bad rows."""

from __future__ import annotations

import math
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rooftile.kernels.reference import sampling as reference
from rooftile.kernels.reference.philox import philox4x32, uniform
from rooftile.kernels.torch import sampling as fast
from rooftile.ops.sampling import (
    NAMES,
    SAMPLE,
    TOKEN_RANKS,
    TOP_LOGPROBS,
    SamplingCall,
    SamplingTensors,
    sample,
    token_ranks,
    top_logprobs,
)
from tests.ops.accuracy import kernels_to_test, opcheck

KERNELS = kernels_to_test(SAMPLE)
every_kernel = pytest.mark.parametrize("kernel", KERNELS)
every_kernel_of_top = pytest.mark.parametrize("kernel", kernels_to_test(TOP_LOGPROBS))
INTEGERS = {"top_k", "seeds", "sample_index", "position"}


def params(rows: int, **values: Any) -> SamplingTensors:
    """Numbers become tensors of every row; temperature 1, seed 1 and position = row by default."""
    values = {"temperature": 1.0, "seeds": 1, "position": torch.arange(rows)} | values
    return SamplingTensors(
        **{
            name: value
            if isinstance(value, Tensor)
            else torch.full(
                (rows,), value, dtype=torch.int64 if name in INTEGERS else torch.float32
            )
            for name, value in values.items()
            if value is not None
        }
    )


def log_probabilities(*probabilities: float) -> Tensor:
    return torch.tensor([probabilities], dtype=torch.float64).log().float()


def chi_square_fits(counts: Tensor, probabilities: Tensor) -> bool:
    """Below the 1 - 1e-6 quantile of chi-square (Wilson and Hilferty's approximation)."""
    possible = probabilities > 0
    assert int(counts[~possible].sum()) == 0, "an excluded token was drawn"
    expected = probabilities[possible] * counts.sum()
    statistic = float(((counts[possible] - expected) ** 2 / expected).sum())
    freedom = int(possible.sum()) - 1
    if freedom == 0:
        return True
    quantile = freedom * (1 - 2 / (9 * freedom) + 4.75 * math.sqrt(2 / (9 * freedom))) ** 3
    return statistic < quantile


def filtered(logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> Tensor:
    """The distribution of one row as the docstring defines it, in plain Python."""
    vocab = len(logits)
    scores = [float(x) for x in logits]
    order = sorted(range(vocab), key=lambda i: (-scores[i], i))
    weights = [math.exp((s - max(scores)) / temperature) for s in scores]
    kept = order[:top_k] if top_k else order
    total, mass, nucleus = sum(weights[i] for i in kept), 0.0, []
    for i in kept:
        if top_p < 1 and mass >= top_p * total:
            break
        nucleus.append(i)
        mass += weights[i]
    kept = [i for i in nucleus if weights[i] >= min_p]
    result = torch.zeros(vocab, dtype=torch.float64)
    for i in kept:
        result[i] = weights[i]
    return result / result.sum()


def test_philox_known_answers() -> None:
    """The vectors that Random123 publishes for philox4x32, 10 rounds."""
    counter = torch.tensor(
        [
            [0, 0, 0, 0],
            [0xFFFFFFFF] * 4,
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        ]
    )
    key = torch.tensor([[0, 0], [0xFFFFFFFF] * 2, [0xA4093822, 0x299F31D0]])
    expected = [
        [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8],
        [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ]
    assert philox4x32(counter.T, key.T).T.tolist() == expected


def test_uniforms_depend_on_each_part_of_seed_index_and_position() -> None:
    values = [0, 1, 2**32, 2**62, -1]
    grid = torch.cartesian_prod(*[torch.tensor(values)] * 3)
    numbers = uniform(*grid.unbind(1))
    assert numbers.dtype == torch.float64
    assert len(set(numbers.tolist())) == len(values) ** 3
    assert bool(((numbers >= 0) & (numbers < 1)).all())
    # The pi vector above: 53 bits of its first two words.
    seed, index, position = 0x299F31D0A4093822, 0x85A308D3243F6A88, 0x0370734413198A2E
    index -= 2**64  # as the signed number of the same bits
    number = uniform(*(torch.tensor([v]) for v in (seed, index, position)))
    assert float(number) == (0xD16CFE0994FDCCEB >> 11) / 2**53


DISTRIBUTIONS = [
    {},
    {"temperature": 0.5},
    {"temperature": 3.0},
    {"top_k": 3},
    {"top_p": 0.7},
    {"min_p": 0.3},
    {"top_k": 4, "top_p": 0.8, "min_p": 0.2, "temperature": 1.5},
]


def check_draws(draws: int, kernel: str, settings: dict[str, Any]) -> None:
    logits = log_probabilities(0.05, 0.2, 0.3, 0.0, 0.1, 0.1, 0.25)
    options = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | settings
    out = sample(logits.expand(draws, -1), params(draws, **settings), kernel=kernel)
    counts = out.token_ids.bincount(minlength=logits.shape[1])
    assert chi_square_fits(counts, filtered(logits[0], **options))
    expected = torch.log_softmax(logits.double(), -1)[0, out.token_ids]
    torch.testing.assert_close(out.logprobs, expected.float())


@every_kernel
@pytest.mark.parametrize("settings", DISTRIBUTIONS, ids=str)
def test_distributions(kernel: str, settings: dict[str, Any]) -> None:
    check_draws(200_000, kernel, settings)


@pytest.mark.slow
@every_kernel
@pytest.mark.parametrize("settings", DISTRIBUTIONS, ids=str)
def test_distributions_of_a_million_draws(kernel: str, settings: dict[str, Any]) -> None:
    check_draws(1_000_000, kernel, settings)


@every_kernel
@pytest.mark.parametrize("vocab", [700, 768])
def test_distribution_over_a_larger_vocabulary(kernel: str, vocab: int) -> None:
    """More tokens than a block, an end that is not a whole block; each part of seed varied."""
    logits = 2 * torch.randn(1, vocab)
    rows = torch.arange(20_000)
    settings = params(len(rows), seeds=rows % 7, sample_index=rows // 7 % 11, position=rows // 77)
    out = sample(logits.expand(len(rows), -1), settings, kernel=kernel)
    expected = torch.softmax(logits[0].double(), -1)
    # Tokens are pooled, so that each pool is large enough for the statistic.
    pools = torch.arange(vocab) * 20 // vocab
    counts = torch.zeros(20).index_add(0, pools[out.token_ids], torch.ones(len(rows)))
    shares = torch.zeros(20, dtype=torch.float64).index_add(0, pools, expected)
    assert chi_square_fits(counts, shares)


@given(
    rows=st.integers(1, 6),
    vocab=st.sampled_from([1, 2, 5, 40, 300, 1025, 5000]),
    ties=st.booleans(),
    use=st.lists(st.sampled_from(["top_k", "top_p", "min_p", "bias", "banned", "penalties"])),
    group=st.sampled_from([1, 10_000, 2**19]),
    wide=st.sampled_from([0, 3, 4096]),
    seed=st.integers(0, 2**32),
)
def test_fast_kernel_equals_the_reference(
    rows: int, vocab: int, ties: bool, use: list[str], group: int, wide: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)

    def uniforms(low: float, high: float) -> Tensor:
        return low + (high - low) * torch.rand(rows, generator=generator)

    def integers(high: int, size: tuple[int, ...]) -> Tensor:
        return torch.randint(0, high, size, generator=generator)

    logits = 3 * torch.randn(rows, vocab, generator=generator)
    if ties:
        logits = logits.round()
    off = torch.rand(rows, generator=generator) < 0.3
    chosen: dict[str, Any] = {"temperature": uniforms(0.2, 2.0).where(~off, 0.0)}
    if "top_k" in use:
        chosen["top_k"] = integers(vocab + 5, (rows,)).where(integers(3, (rows,)) > 0, 0)
    if "top_p" in use:
        chosen["top_p"] = uniforms(0.05, 1.3).clamp_max(1)
    if "min_p" in use:
        chosen["min_p"] = uniforms(-0.2, 0.6).clamp_min(0)
    if "bias" in use:
        chosen["bias_rows"], chosen["bias_ids"] = integers(rows, (9,)), integers(vocab, (9,))
        chosen["bias_values"] = 5 * torch.randn(9, generator=generator)
    if "banned" in use:
        chosen["banned_rows"], chosen["banned_ids"] = integers(rows, (9,)), integers(vocab, (9,))
    if "penalties" in use:
        chosen["repetition_penalty"] = uniforms(0.7, 2.0)
        chosen["presence_penalty"], chosen["frequency_penalty"] = uniforms(-1, 1), uniforms(-1, 1)
        chosen["prompt_mask"] = integers(4, (rows, vocab)) == 0
        chosen["output_counts"] = (integers(9, (rows, vocab)) - 5).clamp_min(0).int()
    settings = params(rows, seeds=integers(2**31, (rows,)), **chosen)
    with pytest.MonkeyPatch.context() as patch:
        # However rows are grouped, and whichever go one by one.
        patch.setattr(fast, "GROUP_ELEMENTS", group)
        patch.setattr(fast, "WIDE", wide)
        cut = sample(logits, settings, kernel="torch")
    exact = sample(logits, settings, kernel="reference")
    assert torch.equal(cut.token_ids, exact.token_ids)
    torch.testing.assert_close(cut.logprobs, exact.logprobs, equal_nan=True)


@every_kernel
@pytest.mark.parametrize("vocab", [7, 1031])
def test_a_row_draws_the_same_wherever_it_stands(kernel: str, vocab: int) -> None:
    rows = 33
    logits = 2 * torch.randn(rows, vocab)
    settings = params(
        rows,
        seeds=torch.arange(rows) * 1_000_003,
        sample_index=torch.arange(rows) % 3,
        temperature=torch.rand(rows).where(torch.arange(rows) % 4 > 0, 0.0),
        top_k=torch.arange(rows) % 5 * 3,
        top_p=0.3 + 0.7 * torch.rand(rows),
    )
    together = sample(logits, settings, kernel=kernel)

    def pick(order: Tensor) -> SamplingTensors:
        given = {f.name: getattr(settings, f.name) for f in fields(settings)}
        return SamplingTensors(**{n: None if t is None else t[order] for n, t in given.items()})

    for order in (
        torch.randperm(rows),
        torch.arange(rows).flip(0),
        torch.tensor([5]),
        torch.tensor([2, 9]),
    ):
        alone = sample(logits[order], pick(order), kernel=kernel)
        assert torch.equal(alone.token_ids, together.token_ids[order])
        assert torch.equal(alone.logprobs, together.logprobs[order])


@every_kernel
def test_greedy_takes_the_lowest_id_of_equals(kernel: str) -> None:
    logits = torch.zeros(4, 1500)
    for row, ids in enumerate([(3, 900), (255, 256), (1499, 1490), (700,)]):
        logits[row, list(ids)] = 2.0
    expected = [3, 255, 1490, 700]
    assert sample(logits, kernel=kernel).token_ids.tolist() == expected
    cold = params(4, temperature=0.0)
    assert sample(logits, cold, kernel=kernel).token_ids.tolist() == expected
    assert sample(logits[:1], kernel=kernel).token_ids.tolist() == expected[:1]
    assert sample(torch.full((3, 1500), -5.0), kernel=kernel).token_ids.tolist() == [0, 0, 0]


@every_kernel
def test_tokens_equal_at_a_border_stay_by_lowest_id(kernel: str) -> None:
    draws = 3000
    logits = torch.tensor([0.0, 1.0, 0.0, 0.0, 1.0, 0.0, -0.0]).expand(draws, -1)

    def drawn(**settings: Any) -> set[int]:
        return set(sample(logits, params(draws, **settings), kernel=kernel).token_ids.tolist())

    assert drawn(top_k=1) == {1}
    assert drawn(top_k=3) == {0, 1, 4}
    assert drawn(top_k=4) == {0, 1, 2, 4}
    # The two leaders hold 2e / (2e + 5) = 0.52 of the mass, each other token 0.096.
    assert drawn(top_p=0.26) == {1}
    assert drawn(top_p=0.5) == {1, 4}
    assert drawn(top_p=0.6) == {0, 1, 4}
    assert drawn(top_p=0.65) == {0, 1, 2, 4}
    assert drawn(min_p=0.9) == {1, 4}
    assert drawn(min_p=0.3) == {0, 1, 2, 3, 4, 5, 6}


@every_kernel
def test_top_p_works_on_what_top_k_left(kernel: str) -> None:
    # Of 0.4, 0.3, 0.2, 0.1, top_k = 2 leaves 4/7 and 3/7: top_p = 0.5 is crossed by the first.
    logits = log_probabilities(0.3, 0.4, 0.1, 0.2).expand(2000, -1)
    both = sample(logits, params(2000, top_k=2, top_p=0.5), kernel=kernel)
    assert set(both.token_ids.tolist()) == {1}
    alone = sample(logits, params(2000, top_p=0.5), kernel=kernel)
    assert set(alone.token_ids.tolist()) == {0, 1}


@every_kernel
def test_limits_of_the_filters(kernel: str) -> None:
    logits = torch.randn(64, 300)
    plain = sample(logits, params(64), kernel=kernel).token_ids
    for off in ({"top_k": 300}, {"top_k": 10**6}, {"top_k": 0}, {"top_p": 1.0}, {"min_p": 0.0}):
        assert torch.equal(sample(logits, params(64, **off), kernel=kernel).token_ids, plain)
    greedy = logits.argmax(-1)
    for one in ({"top_k": 1}, {"top_p": 1e-9}, {"min_p": 1.0}):
        assert torch.equal(sample(logits, params(64, **one), kernel=kernel).token_ids, greedy)


@every_kernel
@pytest.mark.parametrize("temperature", [1e-6, 1e-38, 1e-45])
def test_tiny_temperatures_do_not_overflow(kernel: str, temperature: float) -> None:
    logits = 1e4 * torch.randn(50, 200)
    out = sample(logits, params(50, temperature=temperature), kernel=kernel)
    assert torch.equal(out.token_ids, logits.argmax(-1))
    assert bool(out.logprobs.isfinite().all())
    nucleus = params(50, temperature=temperature, top_p=0.9, min_p=0.1, top_k=7)
    assert torch.equal(sample(logits, nucleus, kernel=kernel).token_ids, logits.argmax(-1))
    # Equal leaders still share the mass.
    ties = torch.tensor([1e4, -1e4, 1e4]).expand(400, -1)
    out = sample(ties, params(400, temperature=temperature), kernel=kernel)
    assert 140 < int((out.token_ids == 0).sum()) < 260


def hf_repetition(logits: Tensor, ids: Tensor, penalty: float) -> Tensor:
    from transformers import RepetitionPenaltyLogitsProcessor

    return RepetitionPenaltyLogitsProcessor(penalty)(ids[None], logits[None])[0]


@every_kernel
def test_penalties_work_on_the_right_tokens(kernel: str) -> None:
    """A bias of one token reveals each processed logit: greedy flips where it passes the leader."""
    vocab, prompt, output = 12, [1, 4, 4], [4, 7, 7, 7, 9]
    logits = torch.randn(vocab)
    mask = torch.zeros(vocab, dtype=torch.bool)
    mask[prompt] = True
    counts = torch.tensor(output).bincount(minlength=vocab).int()
    expected = hf_repetition(logits, torch.tensor(prompt + output), 1.7)
    expected = expected - 0.3 * (counts > 0) - 0.2 * counts
    below, above = expected.max() - expected - 1e-3, expected.max() - expected + 1e-3
    ids = torch.arange(vocab)
    for bias, chosen in ((below, expected.argmax().expand(vocab)), (above, ids)):
        settings = SamplingTensors(
            repetition_penalty=torch.full((vocab,), 1.7),
            presence_penalty=torch.full((vocab,), 0.3),
            frequency_penalty=torch.full((vocab,), 0.2),
            prompt_mask=mask.expand(vocab, -1),
            output_counts=counts.expand(vocab, -1),
            bias_rows=ids,
            bias_ids=ids,
            bias_values=bias,
        )
        out = sample(logits.expand(vocab, -1), settings, kernel=kernel)
        assert torch.equal(out.token_ids, chosen)
        raw = torch.log_softmax(logits, -1)[out.token_ids]
        torch.testing.assert_close(out.logprobs, raw)


@every_kernel
def test_penalties_of_one_row_leave_the_others(kernel: str) -> None:
    logits = torch.tensor([[2.0, 1.9, -1.0]]).expand(3, -1)
    settings = SamplingTensors(
        frequency_penalty=torch.tensor([0.0, 1.0, 0.0]),
        repetition_penalty=torch.tensor([1.0, 1.0, 4.0]),
        output_counts=torch.ones(3, 3, dtype=torch.int32)
        * torch.tensor([1, 0, 0], dtype=torch.int32),
    )
    assert sample(logits, settings, kernel=kernel).token_ids.tolist() == [0, 1, 1]
    # A negative logit is multiplied: token 1 falls to -4 and behind token 2.
    below = torch.tensor([[-2.0, -1.0, -3.0]])
    seen = SamplingTensors(
        repetition_penalty=torch.tensor([4.0]), prompt_mask=torch.tensor([[True, True, False]])
    )
    assert sample(below, seen, kernel=kernel).token_ids.tolist() == [2]


@every_kernel
def test_bias_adds_up_and_bans_win(kernel: str) -> None:
    logits = torch.zeros(2, 5)
    settings = SamplingTensors(
        bias_rows=torch.tensor([0, 0, 0, 1]),
        bias_ids=torch.tensor([3, 4, 3, 2]),
        bias_values=torch.tensor([1.0, 1.5, 1.0, 9.0]),
    )
    assert sample(logits, settings, kernel=kernel).token_ids.tolist() == [3, 2]
    banned = replace(settings, banned_rows=torch.tensor([0, 1]), banned_ids=torch.tensor([3, 2]))
    assert sample(logits, banned, kernel=kernel).token_ids.tolist() == [4, 0]
    assert torch.equal(logits, torch.zeros(2, 5))


@every_kernel
@pytest.mark.parametrize("vocab", [6, 1100])
@pytest.mark.parametrize("temperature", [None, 0.0, 0.8])
@pytest.mark.parametrize("filters", [{}, {"top_k": 3}, {"top_p": 0.9, "min_p": 0.01}], ids=str)
def test_bad_rows_fail_alone(
    kernel: str, vocab: int, temperature: float | None, filters: dict[str, Any]
) -> None:
    rows, bad = 9, [0, 2, 4, 5, 8]
    good = [row for row in range(rows) if row not in bad]
    logits = torch.randn(rows, vocab)
    logits[:, 2] = -torch.inf
    settings = params(
        rows,
        temperature=temperature,
        **filters,
        banned_rows=torch.full((vocab,), 8),
        banned_ids=torch.arange(vocab),
    )
    clean = sample(logits, settings, kernel=kernel)
    logits[0, vocab - 1] = torch.nan
    logits[2, 1] = torch.inf
    logits[4] = -torch.inf
    logits[5] = torch.nan
    out = sample(logits, settings, kernel=kernel)
    assert out.token_ids[bad].tolist() == [-1] * len(bad)
    assert bool(out.logprobs[bad].isnan().all())
    assert torch.equal(out.token_ids[good], clean.token_ids[good])
    assert torch.equal(out.logprobs[good], clean.logprobs[good])
    assert bool((out.token_ids[good] >= 0).all())


@every_kernel
def test_a_ban_does_not_hide_a_nan(kernel: str) -> None:
    logits = torch.tensor([[0.0, torch.nan, 1.0]])
    banned = SamplingTensors(banned_rows=torch.tensor([0]), banned_ids=torch.tensor([1]))
    assert sample(logits, banned, kernel=kernel).token_ids.tolist() == [-1]


@every_kernel
def test_a_single_finite_logit_is_certain(kernel: str) -> None:
    logits = torch.full((50, 400), -torch.inf)
    logits[torch.arange(50), torch.arange(50) * 8 + 7] = -3.0
    for filters in ({}, {"top_k": 5}, {"top_p": 0.5}, {"top_p": 0.999, "min_p": 0.5}):
        out = sample(logits, params(50, **filters), kernel=kernel)
        assert torch.equal(out.token_ids, torch.arange(50) * 8 + 7)
        assert bool((out.logprobs == 0).all())


@every_kernel
def test_no_rows(kernel: str) -> None:
    for settings in (None, params(0, top_k=3, top_p=0.5)):
        out = sample(torch.empty(0, 8), settings, kernel=kernel)
        assert out.token_ids.shape == out.logprobs.shape == (0,)
    for of_top in kernels_to_test(TOP_LOGPROBS):
        found = top_logprobs(torch.empty(0, 8), 3, kernel=of_top)
        assert [t.shape for t in found] == [(0, 3)] * 2


@every_kernel_of_top
@given(
    rows=st.integers(1, 5),
    vocab=st.sampled_from([1, 3, 50, 700]),
    ties=st.booleans(),
    seed=st.integers(0, 2**32),
    data=st.data(),
)
def test_top_logprobs_and_ranks(
    kernel: str, rows: int, vocab: int, ties: bool, seed: int, data: st.DataObject
) -> None:
    generator = torch.Generator().manual_seed(seed)
    # Columns of a wider tensor: rows are not contiguous.
    logits = torch.randn(rows, vocab + 3, generator=generator)[:, :vocab]
    if ties:
        logits = logits.round()
    logits = logits.where(torch.rand(rows, vocab, generator=generator) > 0.1, -torch.inf)
    logits[:, vocab // 2] = 0.0
    k = data.draw(st.integers(0, vocab))
    logprobs, ids = top_logprobs(logits, k, kernel=kernel)
    order = [sorted(range(vocab), key=lambda i, r=row: (-r[i], i)) for row in logits.tolist()]
    assert ids.tolist() == [row[:k] for row in order]
    exact = torch.log_softmax(logits.double(), -1)
    torch.testing.assert_close(logprobs.double(), exact.gather(1, ids), rtol=1e-5, atol=1e-5)
    for place in range(k):
        assert token_ranks(logits, ids[:, place]).tolist() == [place + 1] * rows


@every_kernel_of_top
def test_top_logprobs_of_bad_rows(kernel: str) -> None:
    logits = torch.randn(3, 20)
    logits[0, 5], logits[1] = torch.nan, -torch.inf
    logprobs, ids = top_logprobs(logits, 4, kernel=kernel)
    assert bool(logprobs[:2].isnan().all())
    assert bool(((ids >= 0) & (ids < 20)).all())
    assert torch.equal(ids[2], logits[2].topk(4).indices)


def test_opcheck_and_compile() -> None:
    logits = torch.randn(4, 30)
    settings = params(4, top_k=3, top_p=0.9)
    arguments = [getattr(settings, name) for name in NAMES]
    opcheck(SAMPLE, logits, *arguments)
    opcheck(SAMPLE, logits, *[None] * len(NAMES))
    opcheck(TOP_LOGPROBS, logits, 3)
    opcheck(TOKEN_RANKS, logits, torch.tensor([0, 1, 2, 3]))
    for function, *rest in ((sample, settings), (top_logprobs, 3), (token_ranks, torch.arange(4))):
        compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(logits, *rest), function(logits, *rest))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"temperature": -0.5}, "temperature has the value -0.5; it must be finite and not neg"),
        ({"temperature": math.inf}, "temperature has the value inf"),
        ({"top_k": -1}, "top_k has the value -1; it must be at least 0"),
        ({"top_p": 0.0}, r"top_p has the value 0; it must be in \(0, 1\]"),
        ({"top_p": math.nan}, "top_p has the value nan"),
        ({"min_p": 1.5}, r"min_p has the value 1.5; it must be in \[0, 1\]"),
        (
            {"repetition_penalty": 0.0, "prompt_mask": torch.zeros(3, 8).bool()},
            "repetition_penalty has",
        ),
        ({"repetition_penalty": 1.5}, "repetition_penalty needs prompt_mask or output_counts"),
        ({"presence_penalty": 1.5}, "presence_penalty needs output_counts"),
        ({"frequency_penalty": 1.5}, "frequency_penalty needs output_counts"),
        ({"seeds": None}, "temperature needs seeds"),
        ({"position": None}, "temperature needs position"),
        ({"top_k": torch.ones(3)}, "top_k has dtype torch.float32; convert it to torch.int64"),
        ({"top_p": torch.ones(2)}, r"top_p has shape \[2\]; expected \[rows\] = \[3\]"),
        ({"output_counts": torch.ones(3, 8)}, "output_counts has dtype torch.float32"),
        ({"prompt_mask": torch.ones(3, 7).bool()}, r"prompt_mask has shape \[3, 7\]; expected"),
        ({"banned_ids": torch.tensor([1])}, "banned_ids given alone; give each of banned_rows"),
        (
            {"banned_rows": torch.tensor([0]), "banned_ids": torch.tensor([8])},
            "banned_ids has the value 8; it must be from 0 to vocab - 1 = 7",
        ),
        (
            {"banned_rows": torch.tensor([3]), "banned_ids": torch.tensor([0])},
            "banned_rows has the value 3; it must be from 0 to rows - 1 = 2",
        ),
        (
            {
                "bias_rows": torch.tensor([0]),
                "bias_ids": torch.tensor([0]),
                "bias_values": torch.tensor([torch.nan]),
            },
            "bias_values has the value nan",
        ),
        (
            {"banned_rows": torch.tensor([0, 1]), "banned_ids": torch.tensor([0])},
            r"banned_ids has shape \[1\]; expected \[entries\] = \[2\]",
        ),
        ({"seeds": torch.ones(3, dtype=torch.int64, device="meta")}, "seeds is on meta but logits"),
    ],
)
def test_sample_refuses_naming_the_field(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sample(torch.randn(3, 8), params(3, **changes))


def test_other_refusals() -> None:
    with pytest.raises(ValueError, match=r"logits has shape \[8\]; expected \[rows, vocab\]"):
        sample(torch.randn(8))
    with pytest.raises(ValueError, match="logits has dtype torch.bfloat16; convert it to torch.fl"):
        sample(torch.randn(2, 8).bfloat16())
    with pytest.raises(ValueError, match="k is 9; it must be from 0 to the vocabulary's size, 8"):
        top_logprobs(torch.randn(2, 8), 9)
    with pytest.raises(ValueError, match="token_ids has the value -1; it must be from 0"):
        token_ranks(torch.randn(2, 8), torch.tensor([0, -1]))
    with pytest.raises(ValueError, match="token_ids has dtype torch.int32"):
        token_ranks(torch.randn(2, 8), torch.tensor([0, 1], dtype=torch.int32))
    with pytest.raises(ValueError, match="kernel='gluon' does not exist"):
        sample(torch.randn(2, 8), kernel="gluon")
    with pytest.raises(NotImplementedError, match="'torch' cannot run .* which only a CPU can"):
        SAMPLE.choose(SamplingCall("cuda"), "torch")
    assert SAMPLE.choose(SamplingCall("cuda")) in ("triton", "reference")


@pytest.mark.parametrize("vocab", [5, 250, 600])
def test_the_ends_of_the_uniform_interval_draw_tokens_that_have_mass(vocab: int) -> None:
    rows = 200
    scores = torch.full((rows, vocab), -torch.inf)
    scores[:, 2:-2] = torch.randn(rows, vocab - 4)
    warm = torch.ones(rows)
    weights = reference.filtered_weights(scores, warm, None, None, None)
    for end, token in ((0.0, 2), (1 - 2.0**-53, vocab - 3)):
        uniforms = torch.full((rows,), end, dtype=torch.float64)
        assert reference.draw(weights, uniforms).tolist() == [token] * rows
        assert fast.draw_from_all(scores, uniforms, warm).tolist() == [token] * rows


def test_rounding_at_the_end_of_a_block_draws_no_token_beyond_it() -> None:
    """Weights of many magnitudes, whose block sum and running sum round apart."""
    rows, vocab = 2000, 253
    scores = 12 * torch.randn(rows, vocab).sort(-1).values
    uniforms = torch.full((rows,), 1 - 2.0**-53, dtype=torch.float64)
    tokens = fast.draw_from_all(scores, uniforms, torch.ones(rows))
    assert bool((tokens < vocab).all())
