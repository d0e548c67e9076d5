"""Choosing the next tokens: `sample`, `top_logprobs`, `token_ranks`."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import NamedTuple

import torch
from torch import Tensor

from rooftile.ops.check import check_device, check_shape, check_tensors, refuse_gradient, require
from rooftile.ops.operator import Operator, contents_checked


@dataclass(frozen=True)
class SamplingTensors:
    """What each row asks of `sample`, one tensor a parameter; `None` turns it off for every row.

    Sparse tables (bias, banned) list entries, in any order and number, instead of rows.

    Fields:
        temperature: [rows] float32, 0: greedy; None: every row is greedy
        top_k: [rows] int64, 0: off
        top_p: [rows] float32 in (0, 1], 1: off
        min_p: [rows] float32 in [0, 1], 0: off
        repetition_penalty: [rows] float32 > 0, 1: off
        presence_penalty: [rows] float32, 0: off
        frequency_penalty: [rows] float32, 0: off
        prompt_mask: [rows, vocab] bool, the tokens of the prompt
        output_counts: [rows, vocab] int32, how often each was generated
        bias_rows: [entries] int64
        bias_ids: [entries] int64
        bias_values: [entries] float32, added; entries of one token add up
        banned_rows: [entries] int64
        banned_ids: [entries] int64, never chosen
        seeds: [rows] int64, of the request
        sample_index: [rows] int64, which of the request's n samples; None: 0
        position: [rows] int64, position of the token to be drawn
    """

    temperature: Tensor | None = None  # [rows] float32, 0: greedy; None: every row is greedy
    top_k: Tensor | None = None  # [rows] int64, 0: off
    top_p: Tensor | None = None  # [rows] float32 in (0, 1], 1: off
    min_p: Tensor | None = None  # [rows] float32 in [0, 1], 0: off
    repetition_penalty: Tensor | None = None  # [rows] float32 > 0, 1: off
    presence_penalty: Tensor | None = None  # [rows] float32, 0: off
    frequency_penalty: Tensor | None = None  # [rows] float32, 0: off
    prompt_mask: Tensor | None = None  # [rows, vocab] bool, the tokens of the prompt
    output_counts: Tensor | None = None  # [rows, vocab] int32, how often each was generated
    bias_rows: Tensor | None = None  # [entries] int64
    bias_ids: Tensor | None = None  # [entries] int64
    bias_values: Tensor | None = None  # [entries] float32, added; entries of one token add up
    banned_rows: Tensor | None = None  # [entries] int64
    banned_ids: Tensor | None = None  # [entries] int64, never chosen
    seeds: Tensor | None = None  # [rows] int64, of the request
    sample_index: Tensor | None = None  # [rows] int64, which of the request's n samples; None: 0
    position: Tensor | None = None  # [rows] int64, position of the token to be drawn


class SampleOutput(NamedTuple):
    """What `sample` chose.

    Fields:
        token_ids: [rows] int64, -1 for a row that cannot be sampled
        logprobs: [rows] float32, log softmax of the unmodified logits; NaN where -1
    """

    token_ids: Tensor  # [rows] int64, -1 for a row that cannot be sampled
    logprobs: Tensor  # [rows] float32, log softmax of the unmodified logits; NaN where -1


# The private operator takes the fields in this order; kernels receive them as arguments.
NAMES = tuple(field.name for field in fields(SamplingTensors))
BY_ROW = {
    "temperature": torch.float32,
    "top_k": torch.int64,
    "top_p": torch.float32,
    "min_p": torch.float32,
    "repetition_penalty": torch.float32,
    "presence_penalty": torch.float32,
    "frequency_penalty": torch.float32,
    "seeds": torch.int64,
    "sample_index": torch.int64,
    "position": torch.int64,
}
BY_TOKEN = {"prompt_mask": torch.bool, "output_counts": torch.int32}
SPARSE = {
    "bias": {"rows": torch.int64, "ids": torch.int64, "values": torch.float32},
    "banned": {"rows": torch.int64, "ids": torch.int64},
}
# What the contents of a field must fulfil: a test of the tensor, and the rule in words.
RANGES = {
    "temperature": (lambda t: (t >= 0) & t.isfinite(), "finite and not negative"),
    "top_k": (lambda t: t >= 0, "at least 0 (0 turns it off)"),
    "top_p": (lambda t: (t > 0) & (t <= 1), "in (0, 1]"),
    "min_p": (lambda t: (t >= 0) & (t <= 1), "in [0, 1]"),
    "repetition_penalty": (lambda t: (t > 0) & t.isfinite(), "finite and above 0"),
    "presence_penalty": (torch.isfinite, "finite"),
    "frequency_penalty": (torch.isfinite, "finite"),
    "bias_values": (lambda t: ~t.isnan() & (t != torch.inf), "a number, or -inf"),
}


@dataclass(frozen=True)
class SamplingCall:
    """The static properties that choose a kernel."""

    device: str


def sample(
    logits: Tensor,  # [rows, vocab] float32
    params: SamplingTensors | None = None,
    *,
    kernel: str = "auto",
) -> SampleOutput:
    """One token for each row.

    The logits go through, in this order: repetition penalty over prompt and output tokens
    (positive logits divided, others multiplied: Keskar et al. 2019), presence and frequency penalty
    over output tokens (subtracted once, and once an occurrence), bias, bans, temperature, top_k,
    top_p (of the distribution that top_k left, renormalised; the token that crosses p stays) and
    min_p (relative to the largest probability). Of tokens equal at a border the lowest ids stay.

    A row of temperature 0 takes the largest of the biased logits, the lowest id among equals.
    Another draws by inverse cumulative distribution, in order of token id, in float64, with one
    uniform number: Philox4x32-10(key = seed, counter = (sample_index, position)), whatever row of
    the batch it stands in.

    A row with a NaN or +inf logit, or with no token left to choose, gives token -1 and logprob NaN
    and disturbs no other row.

    Args:
        logits: [rows, vocab] float32

    Raises:
        ValueError: shapes, dtypes or devices that do not fit; a parameter that lacks the tensors
            it works on; contents out of range (checked on a CPU; on a GPU with ROOFTILE_CHECK=1).
    """
    _check_logits("sample", logits)
    params = SamplingTensors() if params is None else params
    tensors = {name: getattr(params, name) for name in NAMES}
    _check_params(logits, {name: t for name, t in tensors.items() if t is not None})
    return run_sample(logits, params, kernel)


def run_sample(
    logits: Tensor,  # [rows, vocab] float32
    params: SamplingTensors,
    kernel: str = "auto",
) -> SampleOutput:
    """`sample` without checks."""
    return SampleOutput(*SAMPLE.handle(logits, *(getattr(params, name) for name in NAMES), kernel))


def top_logprobs(
    logits: Tensor,  # [rows, vocab] float32
    k: int,
    *,
    kernel: str = "auto",
) -> tuple[Tensor, Tensor]:
    """The k likeliest tokens of each row: (logprobs [rows, k] float32, ids [rows, k] int64).

    In order of falling log softmax, lowest id first among equals. A row with NaN has NaN logprobs.

    Args:
        logits: [rows, vocab] float32

    Raises:
        ValueError: logits that are no float32 matrix, or k outside 0..vocab.
    """
    _check_logits("top_logprobs", logits)
    require(
        0 <= k <= logits.shape[1],
        lambda: (
            f"top_logprobs: k is {k}; it must be from 0 to the vocabulary's size, {logits.shape[1]}"
        ),
    )
    return TOP_LOGPROBS.handle(logits, k, kernel)


def token_ranks(
    logits: Tensor,  # [rows, vocab] float32
    token_ids: Tensor,  # [rows] int64
    *,
    kernel: str = "auto",
) -> Tensor:
    """The place of a token in `top_logprobs`' order, 1 for the likeliest: [rows] int64.

    Args:
        logits: [rows, vocab] float32
        token_ids: [rows] int64

    Raises:
        ValueError: shapes or dtypes that do not fit, or an id outside the vocabulary (checked on a
            CPU; on a GPU with ROOFTILE_CHECK=1).
    """
    _check_logits("token_ranks", logits)
    check_device("token_ranks", logits=logits, token_ids=token_ids)
    check_shape("token_ranks", "token_ids", token_ids, (logits.shape[0],), "[rows]")
    _check_dtype("token_ranks", "token_ids", token_ids, torch.int64)
    if contents_checked(token_ids):
        _check_below("token_ranks", "token_ids", token_ids, logits.shape[1], "vocab")
    return TOKEN_RANKS.handle(logits, token_ids, kernel)


def _check_logits(operator: str, logits: Tensor) -> None:
    check_tensors(operator, logits=logits)
    require(
        logits.dim() == 2 and logits.shape[1] > 0,
        lambda: (
            f"{operator}: logits has shape {list(logits.shape)}; expected [rows, vocab], vocab above 0"
        ),
    )
    _check_dtype(operator, "logits", logits, torch.float32)
    refuse_gradient(operator, logits=logits)


def _check_dtype(operator: str, name: str, tensor: Tensor, dtype: torch.dtype) -> None:
    require(
        tensor.dtype == dtype,
        lambda: f"{operator}: {name} has dtype {tensor.dtype}; convert it to {dtype}",
    )


def _check_below(operator: str, name: str, tensor: Tensor, end: int, what: str) -> None:
    wrong = (tensor < 0) | (tensor >= end)
    if bool(wrong.any()):
        raise ValueError(
            f"{operator}: {name} has the value {tensor[wrong][0].item()}; "
            f"it must be from 0 to {what} - 1 = {end - 1}"
        )


def _check_params(logits: Tensor, given: dict[str, Tensor]) -> None:
    rows, vocab = logits.shape
    check_device("sample", logits=logits, **given)
    for name, dtype in BY_ROW.items():
        if name in given:
            check_shape("sample", name, given[name], (rows,), "[rows]")
            _check_dtype("sample", name, given[name], dtype)
    for name, dtype in BY_TOKEN.items():
        if name in given:
            check_shape("sample", name, given[name], (rows, vocab), "[rows, vocab]")
            _check_dtype("sample", name, given[name], dtype)
    for table, columns in SPARSE.items():
        present = [f"{table}_{column}" for column in columns if f"{table}_{column}" in given]
        if not present:
            continue
        if len(present) != len(columns):
            raise ValueError(
                f"sample: {', '.join(present)} given alone; give each of "
                f"{', '.join(f'{table}_{column}' for column in columns)}"
            )
        entries = given[present[0]].shape[:1]
        for column, dtype in columns.items():
            name = f"{table}_{column}"
            check_shape("sample", name, given[name], tuple(entries), "[entries]")
            _check_dtype("sample", name, given[name], dtype)
    _check_needs(given)
    if contents_checked(logits):
        _check_contents(given, rows, vocab)


def _check_needs(given: dict[str, Tensor]) -> None:
    """Parameters that work on other tensors need them."""
    needs = [
        ("temperature", ("seeds",), "the draw is a function of the seed"),
        ("temperature", ("position",), "each position draws its own number"),
        ("repetition_penalty", ("prompt_mask", "output_counts"), "it works on their tokens"),
        ("presence_penalty", ("output_counts",), "it works on output tokens"),
        ("frequency_penalty", ("output_counts",), "it works on output tokens"),
    ]
    for name, needed, why in needs:
        if name in given and not any(n in given for n in needed):
            raise ValueError(f"sample: {name} needs {' or '.join(needed)}: {why}")


def _check_contents(given: dict[str, Tensor], rows: int, vocab: int) -> None:
    for name, (fulfilled, rule) in RANGES.items():
        if name in given:
            wrong = ~fulfilled(given[name])
            if bool(wrong.any()):
                raise ValueError(
                    f"sample: {name} has the value {given[name][wrong][0].item():g}; "
                    f"it must be {rule}"
                )
    for table in SPARSE:
        if f"{table}_rows" in given:
            _check_below("sample", f"{table}_rows", given[f"{table}_rows"], rows, "rows")
            _check_below("sample", f"{table}_ids", given[f"{table}_ids"], vocab, "vocab")


def _call(logits: Tensor, *_: object) -> SamplingCall:
    return SamplingCall(logits.device.type)


SAMPLE = Operator(
    "sample",
    f"(Tensor logits, {', '.join(f'Tensor? {name}' for name in NAMES)}) -> (Tensor, Tensor)",
    module="sampling",
    families=("triton", "cpu", "torch", "reference"),
    call=_call,
    fake=lambda logits, *_: (
        logits.new_empty(logits.shape[0], dtype=torch.int64),
        logits.new_empty(logits.shape[0]),
    ),
)

TOP_LOGPROBS = Operator(
    "top_logprobs",
    "(Tensor logits, int k) -> (Tensor, Tensor)",
    module="sampling",
    families=("triton", "torch", "reference"),
    call=_call,
    fake=lambda logits, k: (
        logits.new_empty(logits.shape[0], k),
        logits.new_empty(logits.shape[0], k, dtype=torch.int64),
    ),
)

TOKEN_RANKS = Operator(
    "token_ranks",
    "(Tensor logits, Tensor token_ids) -> Tensor",
    module="sampling",
    families=("reference",),
    call=_call,
    fake=lambda logits, token_ids: token_ids.new_empty(token_ids.shape),
)
