"""What quantisation costs: the loss of a model on English text, from Python's own documentation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rooftile.engine.llm import LLM


def reference_text() -> str:
    """Half a megabyte of English, the same wherever this version of Python runs.

    Raises:
        ValueError: this Python was installed without its documentation.
    """
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise ValueError(
            "this Python lacks the module pydoc_data.topics, the text that losses are measured on; "
            "give a text with --text"
        ) from None
    return "\n\n".join(topics[name].strip() for name in sorted(topics))


def windows(tokens: Sequence[int], count: int, length: int) -> Iterator[list[int]]:
    """`count` tokens in windows of `length`, spread evenly over the text.

    Raises:
        ValueError: the text has fewer tokens.
    """
    if count > len(tokens):
        raise ValueError(f"the text has {len(tokens)} tokens; {count} were asked for")
    number = max(1, count // length)
    for i in range(number):
        start = i * (len(tokens) - length) // max(1, number - 1) if number > 1 else 0
        yield list(tokens[start : start + length])


def loss(llm: LLM, prompts: Sequence[list[int]]) -> float:
    """Mean negative log-likelihood, in nats, of each prompt's tokens but the first."""
    from rooftile.engine.params import SamplingParams

    outputs = llm.generate(list(prompts), SamplingParams(max_tokens=0, prompt_logprobs=0))
    total, counted = 0.0, 0
    for output in outputs:
        for entry in output.prompt_logprobs or []:
            if entry is not None:
                total -= entry.logprob
                counted += 1
    return total / counted
