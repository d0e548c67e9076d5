"""POST /v1/completions."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

from rooftile.engine.async_llm import AsyncLLM
from rooftile.server.choices import Choice, Echo, News, prompt_entries
from rooftile.server.generation import Generation, encode_prompt, log_prompt
from rooftile.server.logprobs import completion_logprobs
from rooftile.server.params import engine_params
from rooftile.server.protocol.completion import (
    DEFAULT_MAX_TOKENS,
    Completion,
    CompletionChoice,
    CompletionRequest,
)
from rooftile.server.protocol.sampling import check_logprobs
from rooftile.server.protocol.usage import Usage
from rooftile.server.service import Service
from rooftile.server.tokens import TokenTexts


async def complete(
    service: Service, request: CompletionRequest
) -> Completion | AsyncIterator[Completion]:
    """Raises: ApiError for what cannot be answered."""
    request.check()
    model = service.check_model(request.model)
    llm = service.llm
    if request.logprobs is not None:
        check_logprobs("logprobs", request.logprobs, service.config.max_logprobs)
    max_tokens = DEFAULT_MAX_TOKENS if request.max_tokens is None else request.max_tokens
    score = request.logprobs
    if request.echo and score is None and max_tokens == 0:
        score = 0  # the engine computes a prompt alone only to score it
    params = await engine_params(
        service,
        request,
        max_tokens=max_tokens,
        logprobs=request.logprobs,
        prompt_logprobs=score if request.echo else None,
    )
    prompts: list[str | list[int]] = request.prompt
    n = request.n or 1
    generation = Generation(service, llm, CompletionRequest, prompts=len(prompts), n=n)
    with generation.closed_on_error():
        log_prompt(service, generation, prompts)
        await generation.start(lambda: _encode(service, llm, request), params, request.cache_salt)
        answer = _Answer(service.texts, request, generation, model)
        if request.echo:
            answer.echo_texts = await service.off_loop(_echo_texts, llm, request)
        if request.stream:
            return _stream(answer, request)
        await generation.finish()
    generation.close()
    # Log-probabilities of a long text take a while.
    return answer.whole() if request.logprobs is None else await service.off_loop(answer.whole)


def _encode(service: Service, llm: AsyncLLM, request: CompletionRequest) -> list[list[int]]:
    special = request.add_special_tokens is not False
    return [
        encode_prompt(service, llm, prompt, special) if isinstance(prompt, str) else prompt
        for prompt in request.prompt
    ]


def _echo_texts(llm: AsyncLLM, request: CompletionRequest) -> list[str]:
    skip = request.skip_special_tokens is not False
    return [
        prompt
        if isinstance(prompt, str)
        else ""
        if llm.tokenizer is None
        else llm.tokenizer.decode(prompt, skip_special_tokens=skip)
        for prompt in request.prompt
    ]


class _Answer:
    """The choices of a request, index = prompt x n + i."""

    def __init__(
        self, texts: TokenTexts, request: CompletionRequest, generation: Generation, model: str
    ) -> None:
        self.generation = generation
        self.echo_texts: list[str] | None = None
        self._texts = texts
        self._wants_logprobs = request.logprobs is not None
        hidden = frozenset() if request.skip_special_tokens is False else texts.special_ids
        n = request.n or 1
        self.choices = [
            [
                Choice(
                    prompt * n + choice.index,
                    choice,
                    texts if self._wants_logprobs else None,
                    hidden,
                )
                for choice in output.outputs
            ]
            for prompt, output in enumerate(generation.outputs)
        ]
        self._frame: dict[str, Any] = {
            "id": f"cmpl-{generation.id}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
        }

    def news(self, prompt: int) -> list[CompletionChoice]:
        echo = None if self.echo_texts is None else partial(self._echo, self.echo_texts, prompt)
        return [
            self._as_choice(choice.index, news)
            for choice in self.choices[prompt]
            if (news := choice.news(echo)) is not None
        ]

    def _echo(self, echo_texts: list[str], prompt: int) -> Echo:
        text, output = echo_texts[prompt], self.generation.outputs[prompt]
        if not self._wants_logprobs:
            return Echo(text)
        entries = prompt_entries(
            text, output.prompt_token_ids, output.prompt_logprobs or (), self._texts
        )
        return Echo(text, entries)

    def _as_choice(self, index: int, news: News) -> CompletionChoice:
        return CompletionChoice(
            index=index,
            text=news.text,
            logprobs=None
            if news.entries is None
            else completion_logprobs(news.entries, self._texts),
            finish_reason=news.finish_reason,  # type: ignore[arg-type]  # others have been raised
            stop_reason=news.stop_reason,
        )

    def frame(self, choices: list[CompletionChoice], **more: Any) -> Completion:
        return Completion(**self._frame, choices=choices, **more)

    def usage(self) -> Usage:
        return Usage.of(self.generation.outputs)

    def whole(self) -> Completion:
        choices = [choice for prompt in range(len(self.choices)) for choice in self.news(prompt)]
        return self.frame(choices, usage=self.usage())


async def _stream(answer: _Answer, request: CompletionRequest) -> AsyncIterator[Completion]:
    usage = {"usage": None} if request.includes_usage else {}
    try:
        async for prompt in answer.generation.news():
            for choice in answer.news(prompt):
                yield answer.frame([choice], **usage)
        if request.includes_usage:
            yield answer.frame([], usage=answer.usage())
    finally:
        answer.generation.close()
