"""What a user asks of one request: how to sample, and when to stop."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from torch import Tensor

    LogitsProcessor = Callable[[Sequence[int], Tensor], Tensor]


INT64_MAX = 2**63 - 1
FLOAT32_MAX = 3.4028234663852886e38
FLOAT32_TINY = 1.1754943508222875e-38  # the smallest that is not subnormal


@dataclass(frozen=True)
class SamplingParams:
    """Sampling and stopping of one request. Every field is checked on construction.

    n: continuations of the same prompt; their prompt's pages are shared.
    temperature: 0 is greedy (exact argmax, the lowest id on ties).
    top_p, top_k, min_p: keep the smallest set of mass top_p, the top_k likeliest (0: all), those
        with at least min_p times the largest probability. Applied in the order top_k, top_p, min_p.
    repetition_penalty: over prompt and output tokens; presence_penalty and frequency_penalty: over
        output tokens.
    logit_bias: token id -> added to its logit.
    seed: same seed, same text; None draws one. Samples of one request always differ.
    max_tokens: at most so many new tokens; None: until the model's length is reached; 0 is
        allowed with prompt_logprobs, to score a prompt and nothing else.
    min_tokens: no stop (token or string) before so many new tokens.
    stop: strings that end the text and are cut from it, unless include_stop_str_in_output.
    stop_token_ids: tokens that end it.
    bad_words: strings whose tokens, as the tokenizer spells them alone, after a space and within a
        text, never follow each other. The same letters in other tokens, as part of a longer word, may.
    ignore_eos: do not stop at the model's end-of-sequence tokens.
    logprobs: with each token, its log-probability and that of the k likeliest (0: only its own),
        from the unmodified distribution of the model.
    prompt_logprobs: the same for each prompt token but the first. Such a request does not read
        the prefix cache, since cached tokens have no logits.
    logits_processor: called as f(output_ids, logits [vocab] float32) -> logits before each token,
        ahead of the penalties; what it raises is this request's error.
    skip_special_tokens: leave special tokens out of the text.

    Raises:
        ValueError: a value outside its range; the message names it and the range.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    seed: int | None = None
    max_tokens: int | None = 256
    min_tokens: int = 0
    stop: str | Sequence[str] | None = None
    include_stop_str_in_output: bool = False
    stop_token_ids: Sequence[int] = ()
    bad_words: Sequence[str] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logits_processor: LogitsProcessor | None = None
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        _whole("n", self.n, 1)
        _number("temperature", self.temperature, 0.0)
        _number("top_p", self.top_p, 0.0, 1.0, low_open=True)
        _whole("top_k", self.top_k, 0, INT64_MAX, hint="0 keeps every token")
        _number("min_p", self.min_p, 0.0, 1.0)
        _number("repetition_penalty", self.repetition_penalty, 0.0, low_open=True)
        _number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        if self.seed is not None:
            _whole("seed", self.seed, -INT64_MAX - 1, INT64_MAX)
        if self.max_tokens is not None:
            least = 1 if self.prompt_logprobs is None else 0
            _whole("max_tokens", self.max_tokens, least)
        _whole("min_tokens", self.min_tokens, 0, self.max_tokens)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _whole(name, getattr(self, name), 0)
        if self.logits_processor is not None and not callable(self.logits_processor):
            raise ValueError(f"logits_processor is {self.logits_processor!r}; it must be callable")
        for flag in ("ignore_eos", "skip_special_tokens", "include_stop_str_in_output"):
            _flag(flag, getattr(self, flag))
        self._normalise("stop", _strings("stop", self.stop))
        self._normalise("bad_words", _strings("bad_words", self.bad_words))
        self._normalise("stop_token_ids", _token_ids("stop_token_ids", self.stop_token_ids))
        self._normalise("logit_bias", _logit_bias(self.logit_bias))

    def _normalise(self, field: str, value: object) -> None:
        object.__setattr__(self, field, value)

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return self.stop or ()  # type: ignore[return-value]  # normalised to a tuple above

    @property
    def counts_tokens(self) -> bool:
        """Whether sampling depends on the tokens so far."""
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )

    @property
    def needs_values(self) -> bool:
        """Whether each step of the request needs the values of its tokens on the host."""
        return self.logits_processor is not None

    def check_vocabulary(self, vocab_size: int) -> None:
        """Refuse token ids and counts that the model's vocabulary does not have."""
        for field, ids in (
            ("stop_token_ids", self.stop_token_ids),
            ("logit_bias", self.logit_bias),
        ):
            for token in ids or ():
                if token >= vocab_size:
                    raise ValueError(
                        f"{field} has token id {token}; the vocabulary ends at {vocab_size - 1}"
                    )
        for field in ("logprobs", "prompt_logprobs"):
            count = getattr(self, field)
            if count is not None and count > vocab_size:
                raise ValueError(f"{field} is {count}; the vocabulary has {vocab_size} tokens")


def _whole(
    name: str, value: Any, low: int, high: int | None = None, hint: str | None = None
) -> None:
    # bool is an int in Python, but n=True is a mistake.
    if (
        not isinstance(value, int)
        or isinstance(value, bool)
        or value < low
        or (high is not None and value > high)
    ):
        limit = f"at least {low}" if high is None else f"from {low} to {high}"
        extra = f" ({hint})" if hint else ""
        raise ValueError(f"{name} is {value!r:.80}; it must be a whole number {limit}{extra}")


def _number(
    name: str, value: Any, low: float, high: float = math.inf, low_open: bool = False
) -> None:
    """A number that stays finite, and above 0 where it must be, in the float32 that kernels use."""
    # The comparisons also hold for integers that no float can take; NaN fails them all.
    within = (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and low <= value <= high
        and not (low_open and value == low)
    )
    if within and abs(value) <= FLOAT32_MAX and not (low_open and value < low + FLOAT32_TINY):
        return
    above = f"above {low:g}" if low_open else f"at least {low:g}"
    limit = above if high == math.inf else f"{above} and at most {high:g}"
    held = " that float32 can hold" if within else ""
    raise ValueError(f"{name} is {value!r:.80}; it must be a finite number {limit}{held}")


def _flag(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise ValueError(f"{name} is {value!r}; it must be True or False")


def _strings(name: str, values: Any) -> tuple[str, ...]:
    if values is None or isinstance(values, str):
        strings: tuple[Any, ...] = () if values is None else (values,)
    else:
        strings = _listed(name, values)
    for string in strings:
        if not isinstance(string, str) or not string:
            raise ValueError(
                f"{name} has {string!r}; it must be a non-empty string or a list of them"
            )
    return strings


def _token_ids(name: str, ids: Any) -> tuple[int, ...]:
    listed = _listed(name, ids)
    for token in listed:
        _whole(f"{name} entry", token, 0)
    return listed


def _listed(name: str, values: Any) -> tuple[Any, ...]:
    # These can be iterated over too, but what comes out is not what was meant.
    if not isinstance(values, str | bytes | bytearray | Mapping):
        try:
            return tuple(values)
        except TypeError:
            pass
    raise ValueError(f"{name} is {values!r}; it must be a list")


def _logit_bias(bias: Any) -> dict[int, float] | None:
    if bias is None:
        return None
    if not isinstance(bias, Mapping):
        raise ValueError(f"logit_bias is {bias!r}; it must map token ids to numbers")
    for token, value in bias.items():
        _whole("logit_bias key", token, 0)
        _number(f"logit_bias[{token}]", value, -100.0, 100.0)
    return dict(bias) or None


@dataclass(frozen=True)
class BeamSearchParams:
    """Beam search: the `width` likeliest continuations are kept at each step.

    max_tokens: at most so many new tokens. n_best: how many of the finished ones are returned.
    length_penalty: a finished continuation scores sum of log-probabilities divided by its length
        (generated tokens, without the prompt) to this power; above 0 favours longer ones.
    early_stopping: True ends once `width` are finished; False when the best running one, at its
        present length, cannot beat the worst finished; "never" reckons with max_tokens instead.
    ignore_eos: only max_tokens ends a continuation.

    Raises:
        ValueError: a value outside its range; the message names it and the range.
    """

    width: int = 4
    max_tokens: int = 64
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    n_best: int = 1
    ignore_eos: bool = False
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        _whole("width", self.width, 1)
        _whole("max_tokens", self.max_tokens, 1)
        # Lengths to this power must stay within what a float can hold.
        _number("length_penalty", self.length_penalty, -20.0, 20.0)
        if not isinstance(self.early_stopping, bool) and self.early_stopping != "never":
            raise ValueError(
                f"early_stopping is {self.early_stopping!r}; it must be True, False or 'never'"
            )
        _whole("n_best", self.n_best, 1, self.width)
        for flag in ("ignore_eos", "skip_special_tokens"):
            _flag(flag, getattr(self, flag))


Params = SamplingParams | BeamSearchParams
