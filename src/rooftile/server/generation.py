"""What one call asks of the engine: a request per prompt, followed together, ended together."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Sequence

from rooftile.engine.async_llm import AsyncLLM
from rooftile.engine.outputs import CompletionOutput, RequestOutput
from rooftile.engine.params import Params
from rooftile.server.errors import ApiError, bad_request, failed, unavailable
from rooftile.server.protocol.base import ClientModel
from rooftile.server.protocol.sampling import refusal
from rooftile.server.service import Service

logger = logging.getLogger("rooftile.server")


def encode_prompt(
    service: Service, llm: AsyncLLM, text: str, add_special_tokens: bool, field: str = "prompt"
) -> list[int]:
    """Token ids of a text. Takes time in proportion to the text: not for the event loop.

    Raises:
        ApiError: 400 without a tokenizer, or for a text that is far too long to be encoded at all.
    """
    if llm.tokenizer is None:
        raise bad_request("this model has no tokenizer; give the prompt as token ids", field)
    least = service.texts.least_tokens(text)
    if least >= llm.limits.max_model_len:
        raise bad_request(
            f"the {field} has at least {least} tokens; the model takes "
            f"{llm.limits.max_model_len} with the answer",
            field,
        )
    return llm.tokenizer.encode(text, add_special_tokens)


class Generation:
    """The engine's requests of one call; `close` ends what is unfinished, and must be called."""

    def __init__(
        self, service: Service, llm: AsyncLLM, model: type[ClientModel], *, prompts: int, n: int
    ) -> None:
        self.id = uuid.uuid4().hex
        self.outputs: list[RequestOutput] = []
        self._service = service
        self._llm = llm
        self._model = model
        self._give_back: Callable[[], None] | None = service.reserve(prompts, n)

    async def start(
        self,
        prompts: Callable[[], list[list[int]]],
        params: Params,
        cache_salt: str | None,
    ) -> None:
        """Hand every prompt to the engine, or none. prompts: encodes them, off the event loop.

        Raises:
            ApiError: 400 for what the engine refuses.
        """

        def prepare() -> list[list[int]]:
            encoded = prompts()
            for index, prompt_ids in enumerate(encoded):
                try:
                    self._llm.limits.check(prompt_ids, params)
                except ValueError as error:
                    where = f"prompt {index}: " if len(encoded) > 1 else ""
                    problem = refusal(error, self._model)
                    problem.body["error"]["message"] = f"{where}{error}"
                    raise problem from None
            return encoded

        encoded = await self._service.off_loop(prepare)
        if self._service.ended:
            raise _ended()
        for index, prompt_ids in enumerate(encoded):
            try:
                output = self._llm.add_request(
                    prompt_ids, params, request_id=f"{self.id}-{index}", cache_salt=cache_salt
                )
            except ValueError as error:
                raise refusal(error, self._model) from None
            self.outputs.append(output)

    async def news(self) -> AsyncIterator[int]:
        """The index of a prompt whose output changed, until all are finished.

        Raises:
            ApiError: an output failed, or was ended by the server.
        """
        if len(self.outputs) == 1:
            async for output in self._llm.follow(self.outputs[0]):
                _check(output)
                yield 0
            return
        # One place in the queue: an output grows by itself, so a slow reader misses nothing.
        changed: asyncio.Queue[int | BaseException] = asyncio.Queue(1)

        async def follow(index: int) -> None:
            try:
                async for _ in self._llm.follow(self.outputs[index]):
                    await changed.put(index)
            except Exception as error:
                await changed.put(error)

        tasks = [asyncio.create_task(follow(index)) for index in range(len(self.outputs))]
        try:
            finished: set[int] = set()
            while len(finished) < len(self.outputs):
                item = await changed.get()
                if isinstance(item, BaseException):
                    raise item
                _check(self.outputs[item])
                if self.outputs[item].finished:
                    finished.add(item)
                yield item
        finally:
            for task in tasks:
                task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.gather(*tasks, return_exceptions=True)

    async def finish(self) -> None:
        """Wait for all outputs. Raises: what `news` does."""
        async for _ in self.news():
            pass

    @contextlib.contextmanager
    def closed_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Abort what is unfinished, count the rest. Idempotent."""
        if self._give_back is None:
            return
        for output in self.outputs:
            self._llm.abort(output.request_id)
            self._service.metrics.count(output)
        self._give_back()
        self._give_back = None


def _check(output: RequestOutput) -> None:
    for choice in output.outputs:
        if choice.finish_reason == "error":
            raise _failure(choice)
        if choice.finish_reason == "abort":
            raise _ended()


def _ended() -> ApiError:
    return unavailable("the server ended this request to shut down", "shutting_down")


def _failure(choice: CompletionOutput) -> ApiError:
    logger.error("a request failed in the engine: %s", choice.error)
    return failed(f"the engine failed on this request: {choice.error}")


def log_prompt(service: Service, generation: Generation, prompts: Sequence[object]) -> None:
    if service.config.log_prompts:
        for index, prompt in enumerate(prompts):
            logger.info("prompt %s-%d: %r", generation.id, index, prompt)
