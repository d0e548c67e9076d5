"""/v1/completions."""

from __future__ import annotations

from typing import ClassVar, Literal

from rooftile.server.errors import bad_request
from rooftile.server.protocol.base import ServerModel
from rooftile.server.protocol.prompts import Prompts
from rooftile.server.protocol.sampling import UNSUPPORTED, Integer, SamplingFields
from rooftile.server.protocol.usage import Usage

DEFAULT_MAX_TOKENS = 16  # OpenAI's


class CompletionRequest(SamplingFields):
    unsupported: ClassVar = {**UNSUPPORTED, "suffix": ("",)}

    prompt: Prompts
    best_of: Integer | None = None
    echo: bool | None = None
    logprobs: Integer | None = None
    add_special_tokens: bool | None = None

    def check(self) -> None:
        """Raises: ApiError 400 for fields that contradict each other."""
        self.check_stream_options()
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise bad_request(
                f"best_of is {self.best_of}; only the value of n is supported", "best_of"
            )


class CompletionLogprobs(ServerModel):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(ServerModel):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: Literal["stop", "length"] | None = None
    stop_reason: int | str | None = None  # the token or string that ended it


class Completion(ServerModel):
    """A whole answer, or a chunk of a stream."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None
