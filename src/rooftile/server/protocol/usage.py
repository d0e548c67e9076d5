"""Token counts of an answer."""

from __future__ import annotations

from collections.abc import Sequence

from rooftile.engine.outputs import RequestOutput
from rooftile.server.protocol.base import ServerModel


class PromptTokensDetails(ServerModel):
    cached_tokens: int


class Usage(ServerModel):
    """prompt_tokens counts each prompt once, whatever n is."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails

    @classmethod
    def of(cls, outputs: Sequence[RequestOutput]) -> Usage:
        prompt = sum(len(output.prompt_token_ids) for output in outputs)
        completion = sum(len(c.token_ids) for output in outputs for c in output.outputs)
        cached = sum(output.num_cached_tokens for output in outputs)
        return cls(
            prompt_tokens=prompt,
            completion_tokens=completion,
            total_tokens=prompt + completion,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=cached),
        )
