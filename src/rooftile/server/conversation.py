"""From the messages of a chat to token ids, through the model's own template."""

from __future__ import annotations

from typing import Any

from rooftile.engine.async_llm import AsyncLLM
from rooftile.server.errors import bad_request
from rooftile.server.generation import encode_prompt
from rooftile.server.protocol.chat import ConversationFields
from rooftile.server.service import Service

# Marks the end of the message that the model is to continue; no template changes it.
END_MARK = "\ue000rooftile\ue001"


def encode_conversation(
    service: Service,
    llm: AsyncLLM,
    request: ConversationFields,
    messages: list[dict[str, Any]],
) -> list[int]:
    """Token ids of the conversation. Takes time: not for the event loop.

    Raises:
        ApiError: 400 without a template, or where it refuses the messages.
    """
    return encode_prompt(
        service, llm, _render(llm, request, messages), add_special_tokens=False, field="messages"
    )


def _render(llm: AsyncLLM, request: ConversationFields, messages: list[dict[str, Any]]) -> str:
    if llm.tokenizer is None or not llm.tokenizer.has_chat_template:
        raise bad_request(
            "this model has no chat template: it completes text; use /v1/completions", "messages"
        )
    continues = bool(request.continue_final_message)
    answer_next = request.add_generation_prompt is not False and not continues
    if continues:
        last = messages[-1]
        messages = [*messages[:-1], {**last, "content": last["content"] + END_MARK}]
    try:
        text = llm.tokenizer.render_chat(
            messages, add_generation_prompt=answer_next, **(request.chat_template_kwargs or {})
        )
    except Exception as error:  # a template is a program, and may fail in any way
        raise bad_request(
            f"the chat template refuses these messages: {str(error)[:200]}", "messages"
        ) from None
    if not continues:
        return text
    if END_MARK not in text:
        raise bad_request(
            "the chat template leaves out the last message, so it cannot be continued",
            "continue_final_message",
        )
    return text[: text.rindex(END_MARK)]
