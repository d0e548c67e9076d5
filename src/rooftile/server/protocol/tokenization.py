"""/tokenize and /detokenize."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from rooftile.server.errors import bad_request
from rooftile.server.protocol.base import ClientModel, ServerModel
from rooftile.server.protocol.chat import ConversationFields, Message
from rooftile.server.protocol.sampling import Integer


class TokenizeRequest(ConversationFields):
    """A prompt, or the messages of a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1)] | None = None  # type: ignore[assignment]
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None

    def check(self) -> None:
        """Raises: ApiError 400 unless it has exactly one of prompt and messages."""
        if (self.prompt is None) == (self.messages is None):
            raise bad_request("give either prompt or messages", "prompt")
        if self.messages is not None:
            self.check_conversation()


class TokenizeResponse(ServerModel):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(ClientModel):
    model: str | None = None
    tokens: list[Integer]


class DetokenizeResponse(ServerModel):
    prompt: str
