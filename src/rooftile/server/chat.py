"""POST /v1/chat/completions."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Any

from rooftile.server.choices import Choice, News
from rooftile.server.conversation import encode_conversation
from rooftile.server.generation import Generation, log_prompt
from rooftile.server.logprobs import chat_logprobs
from rooftile.server.params import engine_params
from rooftile.server.protocol.chat import (
    AnswerMessage,
    ChatChoice,
    ChatChunk,
    ChatCompletion,
    ChatLogprobs,
    ChatRequest,
    ChunkChoice,
    Delta,
)
from rooftile.server.protocol.sampling import check_logprobs
from rooftile.server.protocol.usage import Usage
from rooftile.server.service import Service
from rooftile.server.tokens import TokenTexts


async def chat(service: Service, request: ChatRequest) -> ChatCompletion | AsyncIterator[ChatChunk]:
    """Raises: ApiError for what cannot be answered."""
    request.check()
    model = service.check_model(request.model)
    llm = service.llm
    messages = request.template_input()
    logprobs = None
    if request.logprobs:
        logprobs = request.top_logprobs or 0
        check_logprobs("top_logprobs", logprobs, service.config.max_logprobs)
    params = await engine_params(
        service, request, max_tokens=request.most_tokens, logprobs=logprobs
    )
    generation = Generation(service, llm, ChatRequest, prompts=1, n=request.n or 1)
    with generation.closed_on_error():
        log_prompt(service, generation, [messages])
        await generation.start(
            lambda: [encode_conversation(service, llm, request, messages)],
            params,
            request.cache_salt,
        )
        answer = _Answer(service.texts, request, generation, model)
        if request.stream:
            return _stream(answer, request)
        await generation.finish()
    generation.close()
    # Log-probabilities of a long text take a while.
    return await service.off_loop(answer.whole) if request.logprobs else answer.whole()


class _Answer:
    def __init__(
        self, texts: TokenTexts, request: ChatRequest, generation: Generation, model: str
    ) -> None:
        self.generation = generation
        self._texts = texts
        hidden = frozenset() if request.skip_special_tokens is False else texts.special_ids
        (output,) = generation.outputs
        self.choices = [
            Choice(choice.index, choice, texts if request.logprobs else None, hidden)
            for choice in output.outputs
        ]
        self._begun = [False] * len(self.choices)
        self._frame: dict[str, Any] = {
            "id": f"chatcmpl-{generation.id}",
            "created": int(time.time()),
            "model": model,
        }

    def news(self) -> list[ChunkChoice]:
        return [
            self._as_chunk(choice.index, news)
            for choice in self.choices
            if (news := choice.news()) is not None
        ]

    def _as_chunk(self, index: int, news: News) -> ChunkChoice:
        parts: dict[str, Any] = {}
        if not self._begun[index]:
            self._begun[index] = True
            parts = {"role": "assistant", "content": news.text}
        elif news.text:
            parts = {"content": news.text}
        return ChunkChoice(
            index=index,
            delta=Delta(**parts),
            logprobs=self._logprobs(news),
            finish_reason=news.finish_reason,  # type: ignore[arg-type]  # others have been raised
            stop_reason=news.stop_reason,
        )

    def _logprobs(self, news: News) -> ChatLogprobs | None:
        return None if news.entries is None else chat_logprobs(news.entries, self._texts)

    def chunk(self, choices: list[ChunkChoice], **more: Any) -> ChatChunk:
        return ChatChunk(**self._frame, object="chat.completion.chunk", choices=choices, **more)

    def usage(self) -> Usage:
        return Usage.of(self.generation.outputs)

    def whole(self) -> ChatCompletion:
        choices = []
        for choice in self.choices:
            news = choice.news()
            assert news is not None
            choices.append(
                ChatChoice(
                    index=choice.index,
                    message=AnswerMessage(role="assistant", content=news.text, refusal=None),
                    logprobs=self._logprobs(news),
                    finish_reason=news.finish_reason,  # type: ignore[arg-type]
                    stop_reason=news.stop_reason,
                )
            )
        return ChatCompletion(
            **self._frame, object="chat.completion", choices=choices, usage=self.usage()
        )


async def _stream(answer: _Answer, request: ChatRequest) -> AsyncIterator[ChatChunk]:
    usage = {"usage": None} if request.includes_usage else {}
    try:
        async for _ in answer.generation.news():
            for choice in answer.news():
                yield answer.chunk([choice], **usage)
        if request.includes_usage:
            yield answer.chunk([], usage=answer.usage())
    finally:
        answer.generation.close()
