"""/v1/chat/completions."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from rooftile.engine.request_body import RESERVED_VARIABLES
from rooftile.server.errors import bad_request
from rooftile.server.protocol.base import ClientModel, ServerModel
from rooftile.server.protocol.sampling import UNSUPPORTED, Integer, SamplingFields
from rooftile.server.protocol.usage import Usage

NO_TOOLS = "tool calls are not supported by this server yet"


class TextPart(ClientModel):
    type: str
    text: str | None = None


class Message(ClientModel):
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[TextPart] | None = None
    name: str | None = None

    def as_template_input(self, where: str) -> dict[str, Any]:
        """Raises: ApiError 400 for what no text model takes."""
        extra = self.model_extra or {}
        if (
            self.role in ("tool", "function")
            or extra.get("tool_calls")
            or extra.get("function_call")
        ):
            raise bad_request(f"{where}: {NO_TOOLS}", where)
        if self.content is None:
            raise bad_request(f"{where}.content is missing", f"{where}.content")
        message = {
            # The newer name of the same role, which templates do not know.
            "role": "system" if self.role == "developer" else self.role,
            "content": self.content if isinstance(self.content, str) else self._joined(where),
        }
        if self.name is not None:
            message["name"] = self.name
        return message

    def _joined(self, where: str) -> str:
        texts = []
        for index, part in enumerate(self.content or ()):
            assert isinstance(part, TextPart)
            if part.type != "text" or part.text is None:
                at = f"{where}.content[{index}]"
                raise bad_request(
                    f"{at} has type {ascii(part.type)[:40]}; this model takes parts of type "
                    f"'text' with a text",
                    at,
                )
            texts.append(part.text)
        return "\n".join(texts)


class ConversationFields(ClientModel):
    """What makes a prompt out of messages."""

    messages: Annotated[list[Message], Field(min_length=1)]
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def check_conversation(self) -> None:
        if self.continue_final_message:
            if self.add_generation_prompt:
                raise bad_request(
                    "continue_final_message and add_generation_prompt exclude each other",
                    "continue_final_message",
                )
            if self.messages[-1].role != "assistant":
                raise bad_request(
                    "continue_final_message needs a last message of the assistant",
                    "continue_final_message",
                )
        for name in self.chat_template_kwargs or {}:
            if name in RESERVED_VARIABLES:
                raise bad_request(
                    f"chat_template_kwargs may not set {name}", "chat_template_kwargs"
                )

    def template_input(self) -> list[dict[str, Any]]:
        return [
            message.as_template_input(f"messages[{index}]")
            for index, message in enumerate(self.messages)
        ]


class ChatRequest(SamplingFields, ConversationFields):
    unsupported: ClassVar = {
        **UNSUPPORTED,
        "audio": (),
        "chat_template": (),
        "echo": (False,),
        "function_call": ("none",),
        "functions": ([],),
        "modalities": (["text"],),
        "parallel_tool_calls": (True, False),  # without tools it means nothing
        "prediction": (),
        "prompt_cache_key": (),
        "reasoning_effort": (),
        "service_tier": ("auto", "default"),
        "store": (False,),
        "tool_choice": ("none", "auto"),  # there is nothing to choose from
        "tools": ([],),
        "verbosity": (),
        "web_search_options": (),
    }

    max_completion_tokens: Integer | None = None
    logprobs: bool | None = None
    top_logprobs: Integer | None = None

    def check(self) -> None:
        """Raises: ApiError 400 for fields that contradict each other."""
        self.check_stream_options()
        self.check_conversation()
        if self.top_logprobs is not None and not self.logprobs:
            raise bad_request("top_logprobs needs logprobs: true", "top_logprobs")
        for name in ("max_completion_tokens", "max_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise bad_request(f"{name} is {value}; it must be at least 1", name)
        both = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(both) > 1:
            raise bad_request(
                "max_tokens and max_completion_tokens differ; give one of them", "max_tokens"
            )

    @property
    def most_tokens(self) -> int | None:
        if self.max_completion_tokens is not None:
            return self.max_completion_tokens
        return self.max_tokens


class TopLogprob(ServerModel):
    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(ServerModel):
    content: list[TokenLogprob]
    refusal: None = None


class AnswerMessage(ServerModel):
    role: Literal["assistant"]
    content: str
    refusal: None = None


class Delta(ServerModel):
    role: Literal["assistant"] | None = None
    content: str | None = None


class ChatChoice(ServerModel):
    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: Literal["stop", "length"]
    stop_reason: int | str | None = None


class ChunkChoice(ServerModel):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: Literal["stop", "length"] | None = None
    stop_reason: int | str | None = None


class ChatCompletion(ServerModel):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class ChatChunk(ServerModel):
    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: Usage | None = None
