"""The sampling that a model's authors recommend, as its files say it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

FLOAT32_TINY = 1.1754943508222875e-38  # the smallest that is not subnormal
FLOAT32_MAX = 3.4028234663852886e38
# Fields of SamplingParams -> the least and the largest value.
RANGES: Mapping[str, tuple[float, float]] = {
    "temperature": (0.0, FLOAT32_MAX),
    "top_p": (FLOAT32_TINY, 1.0),
    "top_k": (0, 2**63 - 1),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (FLOAT32_TINY, FLOAT32_MAX),
}
# As llama.cpp's converter writes them.
GGUF_KEYS: Mapping[str, str] = {
    "temperature": "general.sampling.temp",
    "top_p": "general.sampling.top_p",
    "top_k": "general.sampling.top_k",
    "min_p": "general.sampling.min_p",
    "repetition_penalty": "general.sampling.penalty_repeat",
}


def sampling_of_generation_config(values: Mapping[str, Any], path: Path) -> dict[str, float]:
    """Fields of SamplingParams that a generation_config.json (`values`, read from `path`) has.

    A field that is null counts as absent, and a top_k of -1 as 0: every token. `do_sample: false` is
    temperature 0.

    Raises:
        ValueError: a value out of range, with file and field.
    """
    chosen = _chosen(values, {name: name for name in RANGES}, path)
    greedy = values.get("do_sample")
    if not isinstance(greedy, bool | None):
        raise _error(path, "do_sample", greedy, "true or false")
    return {**chosen, "temperature": 0.0} if greedy is False else chosen


def sampling_of_gguf(metadata: Mapping[str, Any], path: Path) -> dict[str, float]:
    """The same of a GGUF file's metadata.

    Raises:
        ValueError: a value out of range, with file and field.
    """
    # They are float32 there: 0.95 would read 0.949999988079071.
    plain = {
        key: float(f"{value:.7g}") if isinstance(value, float) else value
        for key in GGUF_KEYS.values()
        if (value := metadata.get(key)) is not None
    }
    return _chosen(plain, GGUF_KEYS, path)


def _chosen(values: Mapping[str, Any], keys: Mapping[str, str], path: Path) -> dict[str, float]:
    chosen: dict[str, float] = {}
    for name, key in keys.items():
        value = values.get(key)
        if value is None:
            continue
        low, high = RANGES[name]
        whole = name == "top_k"
        if whole and type(value) is int and value == -1:
            value = 0
        number = int if whole else int | float
        if not isinstance(value, number) or isinstance(value, bool) or not low <= value <= high:
            kind = "whole number" if whole else "number"
            above = "above 0" if low == FLOAT32_TINY else f"of at least {low:g}"
            most = f" and at most {high:g}" if high == 1.0 else ""
            raise _error(path, key, value, f"a {kind} {above}{most}")
        chosen[name] = value
    return chosen


def _error(path: Path, key: str, value: Any, expected: str) -> ValueError:
    return ValueError(
        f"{path}: {key} is {value!r:.80}; it must be {expected}. Correct the file, or leave its "
        f"sampling alone: generation_config=False (--no-generation-config)"
    )
