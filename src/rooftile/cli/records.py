"""Answers as JSON: the records of `rooftile generate --json` and of a file of results."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rooftile.engine.outputs import CompletionOutput, RequestOutput, TokenLogprobs

LEAST_LOGPROB = -9999.0  # JSON has no infinity


def finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else LEAST_LOGPROB


def output_record(output: RequestOutput) -> dict[str, Any]:
    """Counts, times and answers of one prompt."""
    record: dict[str, Any] = {
        "prompt_tokens": len(output.prompt_token_ids),
        "cached_tokens": output.num_cached_tokens,
        "time_to_first_token": output.metrics.time_to_first_token,
        "latency": output.metrics.latency,
        "outputs": [answer_record(answer) for answer in output.outputs],
    }
    if output.prompt_logprobs is not None:
        record["prompt_logprobs"] = logprob_records(output.prompt_logprobs)
    return record


def answer_record(answer: CompletionOutput) -> dict[str, Any]:
    record = {
        "index": answer.index,
        "text": answer.text,
        "token_ids": answer.token_ids,
        "finish_reason": answer.finish_reason,
        "stop_reason": answer.stop_reason,
        "error": answer.error,
    }
    if answer.score is not None:
        record["score"] = finite(answer.score)
    if answer.cumulative_logprob is not None:
        record["cumulative_logprob"] = finite(answer.cumulative_logprob)
    if answer.logprobs is not None:
        record["logprobs"] = logprob_records(answer.logprobs)
    return record


def logprob_records(logprobs: Sequence[TokenLogprobs | None]) -> list[dict[str, Any] | None]:
    return [
        None
        if entry is None
        else {
            "token_id": entry.token_id,
            "logprob": finite(entry.logprob),
            "top": [[token, finite(logprob)] for token, logprob in entry.top],
        }
        for entry in logprobs
    ]
